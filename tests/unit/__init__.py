"""Tests of single modules: no compiler, no device."""
