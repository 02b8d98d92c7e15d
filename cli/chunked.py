"""`cupyconv grads --dask`: compute the passes chunk by chunk, on files larger than memory."""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cupyconv import ConvError, ConvProblem
from cupyconv.checking import ROUNDOFF, Agreement, adjoint_agreement, least_scale
from cupyconv.cli import data, output, paths

THREADS = 2
"""Chunks computed at the same time (hand-set); NumPy's BLAS uses several threads for each chunk."""

_SLACK = 64
"""Largest permitted difference of inner products, in units of ROUNDOFF times the largest product
of two tensors' norms, such as |y| |dy| (hand-set)."""


def open_array(option: str, place: str) -> Any:
    """Return a lazy Dask array over a .npy file or a Zarr folder.

    Args:
        option: the option that names the file or folder, such as "--x".
        place: path of the file or folder.

    Raises:
        ConvError: the path is no .npy file or Zarr folder, or its array is damaged or not numeric.
        OSError: the file cannot be opened.
    """
    import dask.array as da
    import numpy as np

    from cupyconv.dask.results import from_zarr

    path = Path(place)
    if not path.is_dir():
        path.open("rb").close()  # raises OSError if the file is missing
    try:
        if path.is_dir():
            array = from_zarr(path)
        else:
            array = da.from_array(np.load(path, mmap_mode="r"), chunks="auto")
    except (ConvError, MemoryError):
        raise
    except Exception as error:  # parsers of damaged files raise nearly anything
        raise ConvError(
            f"with --dask, {option} must be a .npy file or a Zarr folder of one array",
            f"{path} is neither, or is damaged ({' '.join(str(error).split())[:120]})",
            "Write it with numpy.save or cupyconv.dask.to_zarr",
        ) from None
    data.require_numbers(option, path, array.dtype)
    return array


def require_folder(path: Path) -> None:
    """Check, before anything is computed, that a folder for results can be created.

    Raises:
        ConvError: the path exists already, or its parent folder is missing or not writable.
    """
    if os.path.lexists(path):
        raise ConvError(
            "with --dask, --save must be a new folder", f"{path} exists", "Choose another path"
        )
    paths.require_writable("--save", path)


def compute(
    problem: ConvProblem,
    opened: dict[str, Any],
    seed: int,
    kind: str,
    impl: str,
    target: Path | None,
) -> tuple[dict[str, float], dict[str, float]]:
    """Compute all passes, a few chunks at a time, with a progress bar.

    The inner product of complex tensors a and b is the real part of sum(a * conj(b)).

    Args:
        opened: given arrays among x, w and dy, by name; the other arrays are random.
        seed: seed of the random arrays.
        kind: kind of the random arrays, "normal" or "integers".
        impl: name of the implementation.
        target: folder for y.zarr, dx.zarr, dw.zarr and db.zarr; None keeps no results.

    Returns:
        The Euclidean norms of all tensors, and the inner products that must agree, by name.
    """
    import dask
    import dask.array as da

    import cupyconv.dask as cd
    from cupyconv import arrays

    available = data.available_memory() or 1 << 32
    suggested = cd.suggest_chunks(problem, available // 2 // THREADS)
    dtype = arrays.numpy_dtype(problem.dtype)
    generator = da.random.default_rng(seed)

    def drawn(shape: tuple[int, ...], chunks: Any) -> Any:
        if kind == "integers":
            return generator.integers(-3, 4, shape, chunks=chunks)
        return generator.standard_normal(shape, chunks=chunks)

    shapes = {
        "x": (problem.input_shape, suggested),
        "w": (problem.filter_shape, -1),
        "dy": (problem.output_shape, None),
    }
    layer, operands = {**problem.keywords, "impl": impl}, dict[str, Any]()
    for name, (shape, chunks) in shapes.items():
        if name == "dy":  # dy gets the chunks of y, so that all passes use the same chunks
            chunks = cd.conv_forward(operands["x"], operands["w"], **layer).chunks
        array = opened.get(name)
        if array is None:
            array = drawn(shape, chunks)
            if problem.is_complex:
                array = array + 1j * drawn(shape, chunks)
        operands[name] = array.astype(dtype).rechunk(chunks)
    x, w, dy = operands.values()
    results = {
        "y": cd.conv_forward(x, w, **layer),
        "dx": cd.conv_backprop_input(problem.input_shape, w, dy, **layer),
        "dw": cd.conv_backprop_filter(x, problem.filter_shape, dy, **layer),
        "db": cd.conv_backprop_bias(dy, data_format=problem.data_format),
    }
    if target:
        target.mkdir()
    with _threads(target), _progress():
        if target:
            for name, array in results.items():
                writable = array.astype("float32") if problem.dtype == "bfloat16" else array
                results[name] = da.from_zarr(str(cd.to_zarr(writable, target / f"{name}.zarr")))
        kind_of_sums = "complex128" if problem.is_complex else "float64"
        wide = {name: array.astype(kind_of_sums) for name, array in (operands | results).items()}
        pairs = {"<y,dy>": ("y", "dy"), "<x,dx>": ("x", "dx"), "<w,dw>": ("w", "dw")}
        norms = {name: da.sqrt((abs(array) ** 2).sum()) for name, array in wide.items()}
        products = {name: (wide[a] * wide[b].conj()).sum().real for name, (a, b) in pairs.items()}
        norms, products = dask.compute(norms, products)
    return (
        {name: float(norms[name]) for name in ("x", "w", "y", "dy", "dx", "dw", "db")},
        {name: float(value) for name, value in products.items()},
    )


def adjoint(
    problem: ConvProblem, norms: Mapping[str, float], products: Mapping[str, float]
) -> Agreement:
    """Check the adjoint identity <y, dy> = <x, dx> = <w, dw>.

    The largest difference is divided by the largest product of norms, such as |y| |dy|, after
    ``least_scale`` of each element is added to the norm of the result.
    """
    results = {"y": problem.output_shape, "dx": problem.input_shape, "dw": problem.filter_shape}
    least = {name: least_scale(problem) * math.sqrt(math.prod(results[name])) for name in results}
    pairs = (("y", "dy"), ("dx", "x"), ("dw", "w"))
    scale = max((norms[a] + least[a]) * norms[b] for a, b in pairs)
    bound = _SLACK * ROUNDOFF[problem.dtype]
    return adjoint_agreement(products, scale, bound, is_finite=math.isfinite(scale))


@contextmanager
def _threads(target: Path | None) -> Iterator[None]:
    """Compute with a pool of THREADS threads; delete ``target`` if the computation fails."""
    import dask

    pool = ThreadPoolExecutor(THREADS)
    try:
        with dask.config.set(scheduler="threads", pool=pool):
            yield
    except BaseException:
        pool.shutdown(cancel_futures=True)  # otherwise the threads would go on writing
        if target:
            shutil.rmtree(target, ignore_errors=True)
        raise
    pool.shutdown()


@contextmanager
def _progress() -> Iterator[None]:
    """Show a progress bar over the tasks of each computation."""
    import sys

    from dask.callbacks import Callback
    from dask.diagnostics import ProgressBar

    with ProgressBar(out=sys.stderr) if output.is_terminal(sys.stderr) else Callback():
        yield
