"""Passes over programs and over modules of unscheduled kernels: one concern a file, each pure, listed in ``pipeline``."""
