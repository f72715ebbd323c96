"""Tests of the package as a whole: packaging, imports, tables, documents."""
