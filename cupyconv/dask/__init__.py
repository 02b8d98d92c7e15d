"""Passes on Dask arrays, for data larger than the memory of a machine or GPU.

The functions take the arguments of cupyconv's functions.  The chunks may be NumPy or CuPy arrays.
The results are Dask arrays, which are computed lazily::

    import cupyconv.dask as cd

    x = dask.array.from_zarr("volume.zarr")
    y = cd.conv_forward(x, w, padding=1)
    cd.to_zarr(y, "result.zarr")

* Arrays may be chunked anywhere over the batch, the channels and space, including inside a stride
  or a group.  No tensor is gathered into one chunk.
* The task of a result's chunk reads only a halo from neighbouring chunks.  The halo is cut on the
  worker that has the chunk, so that only the halo moves between workers.
* Contributions of several chunks are added in the order of the chunks, so that results are bitwise
  the same for any scheduler and number of workers.  16-bit dtypes are added in float32 and rounded
  once.
* The graph has few tasks per chunk.  If n axes are chunked and halos are shorter than chunks, these
  are at most 3**n tasks that cut pieces, and one that joins the pieces and computes.  Sums over
  several chunks need further tasks.
* If a worker dies, the cluster recomputes its tasks on another worker.  If that fails repeatedly,
  ``compute`` and ``to_zarr`` raise a WorkerError that names the task; Dask's own ``.compute()``
  raises KilledWorker.

This package needs the dask extra: pip install '.[dask]' in a checkout.  Examples also assume
``import numpy as np`` and ``import dask.array``.
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


def __dir__() -> list[str]:
    return sorted(__all__)
