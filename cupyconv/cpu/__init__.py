"""The passes on NumPy arrays."""
