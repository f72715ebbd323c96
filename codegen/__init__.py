"""Program -> loop IR -> passes -> C / CUDA text."""

if __name__ != "stagedtensor.codegen":
    raise ImportError("codegen/ is the package stagedtensor.codegen; import it by that name")
