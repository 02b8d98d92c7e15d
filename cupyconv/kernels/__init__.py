"""Kernel families: what each refuses, its choices, their modelled time, and their launches."""
