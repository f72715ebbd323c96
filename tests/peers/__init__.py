"""Tests beside other libraries, which must be installed."""
