"""Studies: one-time measurements about the library, whose results are kept."""
