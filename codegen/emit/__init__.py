"""Emission: a scheduled module of the loop IR -> source text. ``c`` prints C; ``c_like`` is what C and CUDA share."""
