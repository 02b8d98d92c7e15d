"""Results: computed together, or written to Zarr; and what is said where workers die."""

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
        lazy: arrays, or anything else of Dask.

    Returns:
        Their numbers, in arrays of their chunks' kind.

    Raises:
        WorkerError: a task's workers died, again and again.
    """
    with _deaths_told():
        return dask_compute(*lazy)


@contextmanager
def _deaths_told() -> Iterator[None]:
    """Says in a WorkerError what distributed's KilledWorker leaves out."""
    try:
        yield
    except _killed_worker() as error:
        raise WorkerError(
            f"every worker that computed one of the tasks died, {error.allowed_failures + 1} of "
            f"them: the task is {error.task}, the last worker was {error.last_worker.address}. "
            "Workers mostly die for want of memory: use smaller chunks, as "
            "cupyconv.dask.suggest_chunks gives them, or raise memory_limit; their logs say more"
        ) from error


def _killed_worker() -> Any:
    """distributed's error, where it is in use."""
    distributed = sys.modules.get("distributed")
    return () if distributed is None else distributed.KilledWorker


def from_zarr(path: str | os.PathLike[str]) -> da.Array:
    """A Dask array over a Zarr folder, of which nothing is read yet.

    Raises:
        ConvError: it has more chunks than a graph can; when it is computed, that a chunk is
            damaged.
        OSError, ValueError: it is no such folder, or whatever else Zarr raises.
    """
    import zarr

    array = zarr.open_array(str(path), mode="r")
    chunks = array.shards or array.chunks
    count = prod(-(-size // chunk) for size, chunk in zip(array.shape, chunks, strict=True))
    if count > MOST_CHUNKS:
        raise ConvError(
            f"a Zarr array must have at most {MOST_CHUNKS:,} chunks",
            f"{path} has {count:,}",
            "Write it again in larger ones",
        )
    return da.from_array(_Reader(array, Path(path)), chunks=chunks, name=False)


MOST_CHUNKS = 1_000_000
"""Of an array that is read: a graph has several tasks for each."""


class _Reader:
    """A Zarr array that says in a ConvError what is wrong with a chunk."""

    def __init__(self, array: Any, path: Path) -> None:
        self._array, self._path = array, path
        self.shape, self.dtype, self.ndim = array.shape, array.dtype, array.ndim

    def __getitem__(self, region: Any) -> Any:
        try:
            return self._array[region]
        except MemoryError:
            raise
        except Exception as error:  # of each codec its own
            raise ConvError(
                "the chunks of a Zarr array must be whole",
                f"{self._path} has one that cannot be read ({type(error).__name__}: {error})",
                "Write it again, for example with cupyconv.dask.to_zarr",
            ) from error


def to_zarr(array: da.Array, path: str | os.PathLike[str]) -> Path:
    """Compute an array and write it to a Zarr folder: the whole of it, or nothing.

    It is written beside ``path`` under another name, which it loses when all chunks are there, so
    that a full disk or a worker that dies leaves nothing that could be taken for the result.

    Args:
        array: any Dask array; where its chunks differ in size, they are rechunked to the largest.
        path: the folder to make, on a file system that all workers share.

    Returns:
        The path.

    Raises:
        ConvError: there is something at ``path`` already, or no folder to make it in.
        ConvTypeError: Zarr has no such dtype.
        OSError: the disk is full or cannot be written.
        WorkerError: as for ``compute``.
    """
    import zarr

    target = Path(path)
    if target.exists():
        raise ConvError("a result is written to a new folder", f"{target} exists", "Choose another")
    if not target.parent.is_dir():
        raise ConvError(
            "a result is written into a folder", f"there is no {target.parent}", "Make it first"
        )
    if array.dtype == arrays.numpy_dtype("bfloat16"):
        raise ConvTypeError(
            "Zarr has no bfloat16. Write float32, which holds it exactly: y.astype('float32')"
        )
    largest = tuple(max(sizes) for sizes in array.chunks)
    regular = array.rechunk(largest)
    temporary = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        chunks = tuple(max(size, 1) for size in largest)
        store = zarr.create_array(
            store=str(temporary / "whole"), shape=array.shape, chunks=chunks, dtype=array.dtype
        )
        with _deaths_told():
            regular.store(store, lock=False)
        os.replace(temporary / "whole", target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return target
