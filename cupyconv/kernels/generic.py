"""cuda-generic (cuda/conv_forward.cu, conv_backprop_input.cu, conv_backprop_filter.cu).

These plain tiled kernels support every configuration, dtype and chip.
"""

from __future__ import annotations

from cupyconv.errors import ConvError
from cupyconv.kernels import cost, parameters
from cupyconv.kernels.family import Choices, Tile, accumulator_bytes
from cupyconv.kernels.limits import MOST_BLOCKS, Count
from cupyconv.kernels.request import PLAIN, Epilogue, Request
from cupyconv.kernels.tiled import Tiled
from cupyconv.launch import STORAGE, Launch


def _tile(
    block_m: int, block_n: int, thread_m: int, thread_n: int, itemsize: int | None = None
) -> Tile:
    threads = (block_m // thread_m) * (block_n // thread_n)
    macros = (("THREAD_M", thread_m), ("THREAD_N", thread_n))
    most = 8 if itemsize is None else itemsize
    return Tile(block_m, block_n, 16, threads, macros, itemsize=itemsize, most_bytes=most)


_RESIDENT = 2
"""Resident blocks per multiprocessor (counted)."""


_ARGUMENTS = {
    "forward": ("x", "w", "bias", "add", "y"),
    "backprop_input": ("y", "w", "bias", "add", "x"),
    "backprop_filter": ("x", "y", "w"),
}
"""Names of the kernels' arrays by pass.  A gradient has the name of its tensor."""


class Generic(Tiled):
    name = "cuda-generic"
    summary = "tiled implicit GEMM for every configuration, dtype and chip"
    tiles = (
        _tile(64, 64, 4, 4),
        _tile(32, 32, 2, 2, itemsize=16),  # each sum takes four registers
    )

    def counts(self, request: Request) -> tuple[Count, ...]:
        return ()

    def block(self, request: Request, tile: Tile) -> tuple[int, cost.Work, cost.Work]:
        chip, problem = request.chip, request.problem
        size, flops = accumulator_bytes(problem), problem.flops_of_product
        rate = cost.per_cycle(chip, cost.plain_rate(request))
        products = tile.block_m * tile.block_n
        copied = (tile.block_m + tile.block_n) / 32
        # A thread reads the elements of A and B for its square of sums.
        read = products / 32 * 2 / tile.defines["THREAD_M"]
        per_k = cost.Work(
            multiplying=products * flops / rate,
            wavefronts=(2 * copied + read) * cost.wavefronts(size),
            instructions=products / 32 * flops / 2 + read + cost.ACCESS_INSTRUCTIONS * copied,
            waits=1 / tile.block_k,
        )
        return _RESIDENT, per_k, cost.Work(0, 0)

    def launches(
        self, request: Request, choices: Choices, epilogue: Epilogue = PLAIN, copied_w: bool = False
    ) -> tuple[Launch, ...]:
        """Return the launches of a pass: always one.

        Raises:
            ConvError: the launch needs more blocks than a grid can have.
        """
        problem, strides, tile, pass_ = request.problem, request.memory, choices.tile, request.pass_
        assert tile is not None
        blocks = Count("blocks", choices.blocks, MOST_BLOCKS)
        if blocks.value > blocks.most:  # plans also exist for layers too large for any array
            raise ConvError(
                "the problem must fit into one launch",
                f"{self.name} {blocks}",
                "Compute the layer in parts",
            )
        defines: dict[str, str | int] = {
            "STORAGE": STORAGE[problem.dtype],
            "INDEX": parameters.index_type(problem, strides),
            **tile.defines,
        }
        if pass_ != "backprop_filter":
            defines |= epilogue.defines
        launch = Launch(
            source=f"conv_{pass_}.cu",
            entry=f"conv_{pass_}",
            defines=tuple(defines.items()),
            grid=(choices.blocks,),
            block=(tile.threads,),
            shared_bytes=0,
            arguments=(*_ARGUMENTS[pass_], parameters.pack(problem, strides)),
        )
        return (launch,)


CUDA_GENERIC = Generic()
