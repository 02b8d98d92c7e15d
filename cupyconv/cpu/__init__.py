"""Passes on NumPy arrays."""
