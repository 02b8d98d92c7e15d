"""One-time measurements of the library; the repository contains their results."""
