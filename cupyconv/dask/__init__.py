"""The three passes on Dask arrays: data larger than a machine's or a GPU's memory.

The functions are those of cupyconv with the same arguments, on arrays whose chunks are NumPy or
CuPy, and give Dask arrays that compute nothing until they are asked::

    import cupyconv.dask as cd

    x = dask.array.from_zarr("volume.zarr")
    y = cd.conv_forward(x, w, padding=1)
    cd.to_zarr(y, "result.zarr")

* Arrays may be chunked over the batch, the channels and space, anywhere: a boundary may lie inside
  a stride or a group.  Nothing is gathered into one chunk.
* A chunk of the result takes exactly the pixels under its windows (or over its taps) from its
  neighbours; these are cut out where they are, and only they move.
* What several chunks contribute to one number is added in the order of the chunks, so that results
  are the same bits whatever the scheduler and the number of its workers.  16-bit types are added in
  float32 and rounded once.
* There are a few tasks for each chunk: at most three to the number of chunked axes for its pieces,
  one that puts them together, one that computes.
* What a worker that dies has not finished, the cluster computes on another.  ``compute`` and
  ``to_zarr`` say what happened where this does not help; Dask's own ``.compute()`` ends in its
  KilledWorker.

Needs the dask extra: pip install '.[dask]' in a checkout.
"""

from cupyconv.errors import install_command

try:
    import dask.array  # noqa: F401
except ImportError as error:
    raise ImportError(
        f"cupyconv.dask needs Dask, which could not be imported ({error}). "
        f"Install it with: {install_command('dask')}"
    ) from error

from cupyconv.dask.chunks import suggest_chunks
from cupyconv.dask.passes import (
    conv_backprop_bias,
    conv_backprop_filter,
    conv_backprop_input,
    conv_forward,
    conv_transpose,
)
from cupyconv.dask.results import compute, to_zarr

__all__ = [
    "compute",
    "conv_backprop_bias",
    "conv_backprop_filter",
    "conv_backprop_input",
    "conv_forward",
    "conv_transpose",
    "suggest_chunks",
    "to_zarr",
]
