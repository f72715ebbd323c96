"""The functions of the language: each builds nodes from tensors; none runs anything."""
