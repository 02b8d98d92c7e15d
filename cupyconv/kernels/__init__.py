"""Kernel families: their unsupported layers, configurations, modelled times and launches."""
