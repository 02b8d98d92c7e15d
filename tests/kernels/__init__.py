"""Tests of the kernels, on the emulator and as compiled code."""
