"""Benchmark of each pass against PyTorch and against the processor's measured roofline."""
