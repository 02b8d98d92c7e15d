"""Tests of the NumPy path."""
