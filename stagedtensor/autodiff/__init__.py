"""Reverse mode: derivative rows per op (``rules``), rules of whole ops (``structural``), the walk (``backprop``)."""
