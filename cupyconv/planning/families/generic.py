"""cuda-generic (cuda/conv_forward.cu and its two siblings): the plain reference.

It takes every configuration, dtype and chip.
"""

from __future__ import annotations

from cupyconv.planning import cost
from cupyconv.planning.families.family import Tile
from cupyconv.planning.families.tiled import Tiled
from cupyconv.planning.reach import Count
from cupyconv.planning.request import Request


def _tile(
    block_m: int, block_n: int, thread_m: int, thread_n: int, itemsize: int | None = None
) -> Tile:
    threads = (block_m // thread_m) * (block_n // thread_n)
    macros = (("THREAD_M", thread_m), ("THREAD_N", thread_n))
    most = 8 if itemsize is None else itemsize
    return Tile(block_m, block_n, 16, threads, macros, itemsize=itemsize, most_bytes=most)


_EFFICIENCY = 0.25
"""Share of the rate of the products; modelled, from the instructions beside them."""


class Generic(Tiled):
    name = "cuda-generic"
    summary = "tiled implicit GEMM for every configuration, dtype and chip"
    kernels = "generic"
    tiles = (
        _tile(64, 64, 4, 4),
        _tile(32, 32, 2, 2, itemsize=16),  # a sum takes four registers
    )

    def counts(self, request: Request) -> tuple[Count, ...]:
        return ()

    def computing(self, request: Request, tile: Tile, depth: int, blocks: int) -> float:
        chip = request.device.chip
        products = request.problem.flops_of_product * depth * tile.block_m * tile.block_n
        full_rate = cost.computing(chip, cost.plain_rate(request), products)
        waves = -(-blocks // chip.multiprocessors)
        return full_rate / _EFFICIENCY * waves * chip.multiprocessors / blocks


CUDA_GENERIC = Generic()
