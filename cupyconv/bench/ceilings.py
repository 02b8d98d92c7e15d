"""Measured roofline of the processor: the rates of a large matrix product and of a large copy.

Each run measures both rates again, on random data, with the fastest installed library.  The
roofline time of a pass is the longer of two times: the time of its FLOPs at the product's rate, and
the time to move each of its tensors once at the copy's rate.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from cupyconv import markup
from cupyconv.bench import environment, timing
from cupyconv.bench.data import random_flat
from cupyconv.bench.places import Place
from cupyconv.bench.pytorch import PyTorch
from cupyconv.bench.results import Ceiling
from cupyconv.errors import CupyconvError
from cupyconv.problem import ITEMSIZE, flops_of_product

PRODUCT_SIZE = {"cpu": 1536, "gpu": 8192}
"""Rows and columns of the square matrices that are multiplied, by place (chosen)."""

COPY_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}
"""Size of the copied array in bytes, by place (chosen)."""


class NoCeilingError(CupyconvError):
    """No installed library can measure a ceiling; the message gives each library's reason."""


def measure(place: Place, dtype: str, torch: PyTorch | None, seconds: float) -> Ceiling:
    """Measure the ceiling of a dtype.

    Args:
        torch: PyTorch, called inside its ``settings``, which enable or disable TF32; None if it is
            not installed.
        seconds: time to spend on each product and each copy.

    Raises:
        NoCeilingError: no library can measure, for example on a GPU without cuBLAS and PyTorch.
    """
    size, copy_bytes = PRODUCT_SIZE[place.name], COPY_BYTES[place.name]
    array_library = "numpy" if place.name == "cpu" else "cupy"
    products: dict[str, Callable[[], timing.Call]] = {}
    copies: dict[str, Callable[[], timing.Call]] = {array_library: lambda: _copy(place, copy_bytes)}
    if torch is not None:
        products["torch"] = lambda: torch.product(size, dtype)
        copies["torch"] = lambda: torch.copy(copy_bytes)
    # NumPy multiplies 16-bit matrices without BLAS, so its float32 product is measured instead.
    # CuPy may not support bfloat16 products; float16 has the same rate.
    product_dtype = dtype
    if ITEMSIZE[dtype] == 2:
        product_dtype = "float32" if place.name == "cpu" else "float16"
    products[array_library] = lambda: _product(place, size, product_dtype)
    product_by, product_seconds = _fastest(place, products, seconds)
    clock = environment.smi().get("clocks.sm", "") if place.name == "gpu" else ""
    copy_by, copy_seconds = _fastest(place, copies, seconds)
    return Ceiling(
        flops_of_product(dtype) * size**3 / product_seconds,
        2 * copy_bytes / copy_seconds,
        product_by,
        copy_by,
        clock,
    )


def _fastest(
    place: Place, makers: Mapping[str, Callable[[], timing.Call]], seconds: float
) -> tuple[str, float]:
    """Return the name and the time of the fastest call; skip calls that fail.

    Raises:
        NoCeilingError: every call failed.
    """
    times: dict[str, float] = {}
    refusals = []
    for name, make in makers.items():
        try:
            measured = timing.measure({name: make()}, 1, place.clock, seconds)
        except Exception as error:  # if cuBLAS is missing or memory runs out, use another library
            why, _, _ = str(error).partition("\n")
            refusals.append(f"{name}: {markup.in_line(why)}")
            continue
        times[name] = measured[name].seconds
        place.release()
    if not times:
        raise NoCeilingError("; ".join(refusals))
    fastest = min(times, key=times.__getitem__)
    return fastest, times[fastest]


def _product(place: Place, size: int, dtype: str) -> timing.Call:
    a, b = (random_flat(size * size, dtype, seed, place.xp).reshape(size, size) for seed in (1, 2))
    return lambda _: a @ b


def _copy(place: Place, size: int) -> timing.Call:
    source = random_flat(size // 4, "float32", 1, place.xp)
    target = place.xp.empty_like(source)
    return lambda _: place.xp.copyto(target, source)
