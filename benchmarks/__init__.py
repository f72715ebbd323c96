"""Measurements: training steps and kernels beside torch and JAX, growth curves, compile times.

``python -m stagedtensor bench`` is the way in. The folder stands at the top of the repository and ships as
``stagedtensor.benchmarks``. It is a user of the language like any other: nothing in the compiler imports it.
"""
