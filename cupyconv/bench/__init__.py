"""Benchmark of each pass against other libraries and against the processor's roofline.

suites        layers to measure
places        CPU or GPU: arrays, free memory and clock
timing        time of a call
data          random tensors of a layer, in a memory order
pytorch       calls of PyTorch
ceilings      measured rates of a large matrix product and a large copy
environment   hardware and software versions of a run
results       measured rows, their comparison, and the JSON file
run           the benchmark loop over layers, memory orders and passes
report, plot  tables, SVG
"""
