"""A staged tensor language that compiles a whole mixed-precision training step into readable kernels."""
