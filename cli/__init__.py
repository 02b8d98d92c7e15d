"""The command line, on top of the public library."""
