"""Measuring each pass against other libraries and against what the processor can do.

suites        which layers
timing        how long a call takes
places        the CPU or a GPU: its memory and its clock
data          random tensors of a layer, in a memory order
implementations, peers    ours and other libraries', as calls
checks        is a result right; nothing is timed before it is
ceilings      the rates of a large matrix product and a large copy
ecosystem     what a call through PyTorch and a layer on Dask cost
first_call    how long a new process takes for its first result
environment   what the figures were measured on
results       figures, the log they are appended to, and reading them back
run           all of the above, layer by layer
report, export, plot, readme    what is shown of it
"""
