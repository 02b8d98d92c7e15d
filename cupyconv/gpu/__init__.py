"""Compilation, loading and launching of the kernels on a GPU."""
