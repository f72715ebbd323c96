"""Context, Routine, devices and the kernel cache."""

if __name__ != "stagedtensor.runtime":
    raise ImportError("runtime/ is the package stagedtensor.runtime; import it by that name")
