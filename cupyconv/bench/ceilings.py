"""Measured roofline of the processor: the rates of a large matrix product and of a large copy.

Each run measures both rates, the ceilings, again for every dtype, on random data, with the fastest
installed library.  The roofline time of a pass is the longer of two times: the time of its FLOPs at
the product's rate, and the time to move each of its tensors once at the copy's rate.
"""

from __future__ import annotations

from collections.abc import Callable
from math import prod
from typing import Any

from cupyconv import markup
from cupyconv.bench import environment, timing
from cupyconv.bench.data import random_flat
from cupyconv.bench.places import Place
from cupyconv.bench.pytorch import PyTorch
from cupyconv.bench.results import TORCH, Ceiling
from cupyconv.errors import CupyconvError
from cupyconv.problem import ITEMSIZE, flops_of_product

PRODUCT_SIZE = {"cpu": 1536, "gpu": 8192}
"""Rows, and also columns, of each of the two multiplied matrices, keyed by place (hand-set)."""

COPY_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}
"""Size of the copied array in bytes, keyed by place (hand-set)."""


class NoCeilingError(CupyconvError):
    """No installed library can measure a ceiling; the message gives each library's reason."""


def measure(place: Place, dtype: str, torch: PyTorch | None, seconds: float) -> Ceiling:
    """Measure the roofline of a dtype: the rates of a matrix product and of a copy.

    Args:
        torch: PyTorch inside the context of ``PyTorch.settings``; None to measure without PyTorch.
        seconds: seconds to spend on the product, and again on the copy, with each library.

    Raises:
        NoCeilingError: no library can measure, for example on a GPU without cuBLAS and PyTorch.
    """
    size, copied = PRODUCT_SIZE[place.name], COPY_BYTES[place.name]
    # NumPy multiplies 16-bit matrices without BLAS, so a float32 product is measured on the CPU.
    # CuPy may not support bfloat16 products; float16 has the same rate.
    product_dtype = dtype
    if ITEMSIZE[dtype] == 2:
        product_dtype = "float32" if place.name == "cpu" else "float16"
    product_by, product = _fastest(place, torch, (size, size), product_dtype, _product, seconds)
    clock = environment.smi().get("clocks.sm", "") if place.name == "gpu" else ""
    copy_by, copy = _fastest(place, torch, (copied // 4,), "float32", _copy, seconds)
    rate = flops_of_product(dtype) * size**3 / product
    return Ceiling(rate, 2 * copied / copy, product_by, copy_by, clock)


def _fastest(
    place: Place,
    torch: PyTorch | None,
    shape: tuple[int, ...],
    dtype: str,
    make: Callable[[Any, Any], timing.Call],
    seconds: float,
) -> tuple[str, float]:
    """Return the name of the fastest library, and the seconds that its call takes.

    Args:
        shape: shape of each of the two random arrays.
        make: function that returns the call to time, given the two arrays or tensors.
        seconds: seconds to spend on each library.

    Raises:
        NoCeilingError: every library failed.
    """
    times: dict[str, float] = {}
    refusals = []
    for name in (place.xp.__name__, *([TORCH] if torch else [])):
        try:
            flat = (random_flat(prod(shape), dtype, seed, place.xp) for seed in (1, 2))
            a, b = (array.reshape(shape) for array in flat)
            call = make(torch.tensor(a), torch.tensor(b)) if torch and name == TORCH else make(a, b)
            times[name] = timing.measure({name: call}, 1, place, seconds)[name].seconds
        except Exception as error:  # if cuBLAS is missing or memory runs out, use another library
            refusals.append(f"{name}: {markup.in_line(environment.first_line(error))}")
        place.release()
    if not times:
        raise NoCeilingError("; ".join(refusals))
    fastest = min(times, key=times.__getitem__)
    return fastest, times[fastest]


def _product(a: Any, b: Any) -> timing.Call:
    return lambda _: a @ b


def _copy(source: Any, target: Any) -> timing.Call:
    def copy(_: int) -> None:
        target[:] = source

    return copy
