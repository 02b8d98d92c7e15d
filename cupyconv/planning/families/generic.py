"""cuda-generic (cuda/conv_forward.cu and its two siblings): the plain reference.

It takes every configuration, dtype and chip.
"""

from __future__ import annotations

from cupyconv.planning import cost
from cupyconv.planning.families.family import Tile, accumulator_bytes
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


# Of a step of BLOCK_K: counted.
_OF_PRODUCT = 2.4  # instructions for each multiply-add, itself included
_WAVEFRONTS = 0.75  # of shared memory for each, of 4 bytes
_WAITS = 6  # of a warp, whose loads are few at a time
_RESIDENT = 2  # blocks of a multiprocessor


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
        chip, problem = request.device.chip, request.problem
        products = tile.block_m * tile.block_n * tile.block_k / 32  # of warps, in a step
        flops = problem.flops_of_product
        executed = _OF_PRODUCT * products * flops / 2
        of_cycle = cost.plain_rate(request) * 1e3 / chip.multiprocessors / chip.clock
        step = cost.Work(
            multiplying=32 * products * flops / of_cycle,
            wavefronts=_WAVEFRONTS * products * accumulator_bytes(problem) / 4,
            instructions=executed,
            longest=executed / (tile.threads / 32),
            waits=_WAITS,
        )
        steps = depth / blocks / tile.block_k
        return cost.of_blocks(chip, blocks, _RESIDENT, step.times(steps))


CUDA_GENERIC = Generic()
