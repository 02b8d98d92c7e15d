"""Kernel families: implementations of the passes, with their modelled times and launches."""
