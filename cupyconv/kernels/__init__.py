"""Kernel families: each family's refusals, choices, modelled times and launches."""
