"""cuda-generic (cuda/conv_forward.cu and its two siblings): never the fastest, never wrong."""

from __future__ import annotations

from cupyconv.planning import cost
from cupyconv.planning.families.family import Tile
from cupyconv.planning.families.tiled import Tiled
from cupyconv.planning.request import Request


def _tile(
    block_m: int, block_n: int, thread_m: int, thread_n: int, itemsize: int | None = None
) -> Tile:
    threads = (block_m // thread_m) * (block_n // thread_n)
    macros = (("THREAD_M", thread_m), ("THREAD_N", thread_n))
    most = 8 if itemsize is None else itemsize
    return Tile(block_m, block_n, 16, threads, macros, itemsize=itemsize, most_bytes=most)


class Generic(Tiled):
    name = "cuda-generic"
    summary = "tiled implicit GEMM for every configuration, dtype and chip"
    kernels = "generic"
    efficiency = 0.25
    tiles = (
        _tile(64, 64, 4, 4),
        _tile(256, 8, 4, 2),  # few channels or filters in a group
        # A sum takes four registers, and a tile of 256 rows more than shared memory has.
        _tile(32, 32, 2, 2, itemsize=16),
        _tile(128, 8, 4, 2, itemsize=16),
    )

    def rate(self, request: Request) -> float:
        return cost.plain_rate(request)


CUDA_GENERIC = Generic()
