"""What the processor reaches at best: the rates of a large matrix product and of a large copy.

Both are measured in the run that they are compared with, on random data, by the fastest library
at hand.  Together they are the roofline: the time of a pass's FLOPs at the one rate, or of its
tensors, each moved once, at the other, whichever is longer.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from cupyconv import markup
from cupyconv.bench import environment, timing
from cupyconv.bench.data import random_flat
from cupyconv.bench.peers import TorchPeer
from cupyconv.bench.places import Place
from cupyconv.problem import ITEMSIZE, flops_of_product

PRODUCT_SIZE = {"cpu": 1536, "gpu": 8192}
"""Rows and columns of the matrices."""

COPY_BYTES = {"cpu": 256 << 20, "gpu": 2 << 30}


class NoCeilingError(Exception):
    """None of the libraries at hand can measure a ceiling; the message says why."""


@dataclass(frozen=True)
class Ceiling:
    """The roofline of one dtype.

    Attributes:
        flops_per_second: of a matrix product.
        bytes_per_second: of a copy, counting the bytes that are read and those that are written.
        product_by, copy_by: whose they are.
        clock: of the GPU's multiprocessors right after the product, as nvidia-smi tells it.
    """

    flops_per_second: float
    bytes_per_second: float
    product_by: str
    copy_by: str
    clock: str = ""

    def seconds(self, flops: float, bytes_: float) -> float:
        """The least time for this much arithmetic and traffic."""
        return max(flops / self.flops_per_second, bytes_ / self.bytes_per_second)


def measure(place: Place, dtype: str, peer: TorchPeer | None, seconds: float) -> Ceiling:
    """Measure the ceiling of a dtype.

    Args:
        peer: PyTorch within its settings, which decide on TF32; None without PyTorch.
        seconds: to spend on each product and copy.

    Raises:
        NoCeilingError: as on a GPU without cuBLAS and PyTorch.
    """
    size, copied = PRODUCT_SIZE[place.name], COPY_BYTES[place.name]
    own = "numpy" if place.name == "cpu" else "cupy"
    products: dict[str, Callable[[], timing.Call]] = {}
    copies: dict[str, Callable[[], timing.Call]] = {own: lambda: _copy(place, copied)}
    if peer is not None:
        products["torch"] = lambda: peer.product(size, dtype)
        copies["torch"] = lambda: peer.copy(copied)
    # NumPy multiplies 16-bit matrices one element at a time; its float32 product bounds them too.
    # CuPy may not multiply bfloat16, whose rate is that of float16.
    own_dtype = dtype
    if ITEMSIZE[dtype] == 2:
        own_dtype = "float32" if place.name == "cpu" else "float16"
    products[own] = lambda: _product(place, size, own_dtype)
    product_by, product_seconds = _fastest(place, products, seconds)
    clock = environment.smi().get("clocks.sm", "") if place.name == "gpu" else ""
    copy_by, copy_seconds = _fastest(place, copies, seconds)
    return Ceiling(
        flops_of_product(dtype) * size**3 / product_seconds,
        2 * copied / copy_seconds,
        product_by,
        copy_by,
        clock,
    )


def _fastest(
    place: Place, makers: Mapping[str, Callable[[], timing.Call]], seconds: float
) -> tuple[str, float]:
    """The fastest of these and its time; one that a library does not offer is left out.

    Raises:
        NoCeilingError: no library offers any.
    """
    times: dict[str, float] = {}
    refusals = []
    for name, make in makers.items():
        try:
            measured = timing.measure({name: make()}, 1, place.clock, seconds)
        except Exception as error:  # a missing cuBLAS, too little memory: another one will do
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
