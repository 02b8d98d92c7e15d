"""Functions that compute Dask arrays and read or write Zarr folders, with clear errors."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import dask.array as da
from dask.base import compute as dask_compute

from cupyconv import arrays
from cupyconv.errors import ConvError, ConvTypeError, WorkerError


def compute(*lazy: Any) -> tuple[Any, ...]:
    """Compute Dask arrays together, as ``dask.compute`` does.

    Args:
        lazy: Dask arrays or other Dask collections.

    Returns:
        The computed arrays: NumPy or CuPy arrays, like their chunks.

    Raises:
        WorkerError: the workers of a task died repeatedly.

    >>> x = dask.array.ones((4, 2, 8, 8), chunks=(2, 2, 4, 8))
    >>> y = cd.conv_forward(x, np.ones((3, 2, 3, 3)))
    >>> [result.shape for result in cd.compute(x, y)]
    [(4, 2, 8, 8), (4, 3, 6, 6)]
    """
    with _worker_errors():
        return dask_compute(*lazy)


@contextmanager
def _worker_errors() -> Iterator[None]:
    """Convert distributed's KilledWorker to a WorkerError with more details."""
    try:
        yield
    except _killed_worker() as error:
        raise WorkerError(
            f"every worker that computed one of the tasks died ({error.allowed_failures + 1} in "
            f"total): the task is {error.task}, the last worker was {error.last_worker.address}. "
            "Workers mostly die from lack of memory: use smaller chunks, see "
            "cupyconv.dask.suggest_chunks, or raise memory_limit; the workers' logs have details"
        ) from error


def _killed_worker() -> Any:
    """Return distributed's KilledWorker, or () if distributed is not imported."""
    distributed = sys.modules.get("distributed")
    return () if distributed is None else distributed.KilledWorker


def from_zarr(path: str | os.PathLike[str]) -> da.Array:
    """Return a lazy Dask array over a Zarr folder.

    Raises:
        ConvError: the array has more than MOST_CHUNKS chunks; during computation, a chunk is
            damaged.
        OSError, ValueError: the folder is not a Zarr array; Zarr may raise other errors as well.
    """
    import zarr

    array = zarr.open_array(str(path), mode="r")
    chunks = array.shards or array.chunks
    count = prod(-(-size // chunk) for size, chunk in zip(array.shape, chunks, strict=True))
    if count > MOST_CHUNKS:
        raise ConvError(
            f"a Zarr array must have at most {MOST_CHUNKS:,} chunks",
            f"{path} has {count:,}",
            "Write it again with larger chunks",
        )
    return da.from_array(_Reader(array, Path(path)), chunks=chunks, name=False)


MOST_CHUNKS = 1_000_000
"""Largest number of chunks of a Zarr array; a graph has several tasks for each (hand-set)."""


class _Reader:
    """Wrapper of a Zarr array that raises ConvError for a damaged chunk."""

    def __init__(self, array: Any, path: Path) -> None:
        self._array, self._path = array, path
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, region: Any) -> Any:
        try:
            return self._array[region]
        except MemoryError:
            raise
        except Exception as error:  # codecs raise different types
            raise ConvError(
                "the chunks of a Zarr array must be readable",
                f"{self._path} has a chunk that cannot be read ({type(error).__name__}: {error})",
                "Write it again, for example with cupyconv.dask.to_zarr",
            ) from error


def to_zarr(array: da.Array, path: str | os.PathLike[str]) -> Path:
    """Compute an array and write it to a Zarr folder, completely or not at all.

    The array is written to a temporary folder next to ``path``, which is renamed when all chunks
    are written.  A full disk or a dying worker therefore leaves no partial result.

    Args:
        array: any Dask array; if the chunks along an axis differ in size, they are rechunked to the
            largest size.
        path: the folder to create, on a file system that all workers share.

    Returns:
        The path.

    Raises:
        ConvError: ``path`` exists already, or its parent folder does not.
        ConvTypeError: Zarr does not support the dtype.
        OSError: the disk is full or cannot be written.
        WorkerError: as for ``compute``.

    >>> x = dask.array.ones((4, 2, 8, 8), chunks=(2, 2, 4, 8))
    >>> path = cd.to_zarr(x, "x.zarr")
    >>> dask.array.from_zarr("x.zarr").shape
    (4, 2, 8, 8)
    """
    import zarr

    target = Path(path)
    if target.exists():
        raise ConvError("path must be a new folder", f"{target} exists", "Choose another path")
    if not target.parent.is_dir():
        raise ConvError(
            "path must be in an existing folder",
            f"there is no folder {target.parent}",
            "Create it first",
        )
    if array.dtype == arrays.numpy_dtype("bfloat16"):
        raise ConvTypeError(
            "Zarr has no bfloat16. Write float32, which represents bfloat16 exactly: "
            "y.astype('float32')"
        )
    largest = tuple(max(sizes) for sizes in array.chunks)
    regular = array.rechunk(largest)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        chunks = tuple(max(size, 1) for size in largest)
        store = zarr.create_array(
            store=str(temporary / "whole"), shape=array.shape, chunks=chunks, dtype=array.dtype
        )
        with _worker_errors():
            regular.store(store, lock=False)
        os.replace(temporary / "whole", target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
