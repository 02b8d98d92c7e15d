"""Launches of the generic kernels."""

from __future__ import annotations

from cupyconv.errors import ConvError
from cupyconv.gpu import parameters
from cupyconv.gpu.launch import STORAGE, Launch
from cupyconv.planning.device import Device
from cupyconv.planning.plan import PassPlan
from cupyconv.planning.reach import MOST_BLOCKS, Count
from cupyconv.planning.strides import Strides
from cupyconv.problem import ConvProblem

_ARGUMENTS = {
    "forward": ("x", "w", "bias", "y"),
    "backprop_input": ("y", "w", "bias", "x"),
    "backprop_filter": ("x", "y", "w"),
}


def prepare(
    pass_plan: PassPlan,
    problem: ConvProblem,
    strides: Strides,
    activation: str | None,
    device: Device,
) -> tuple[Launch, ...]:
    """The launch of one planned pass.

    Raises:
        ConvError: it has more blocks than there may be.
    """
    tile = pass_plan.tile
    assert tile is not None
    blocks = Count("blocks", pass_plan.blocks, MOST_BLOCKS)
    if blocks.value > blocks.most:  # of layers that no arrays may have, plans are made all the same
        raise ConvError(
            "the problem must fit a launch", f"cuda-generic {blocks}", "Compute it in parts"
        )
    defines = {**_variant(problem, strides), **tile.defines}
    if pass_plan.pass_ != "backprop_filter":
        defines["ACTIVATION"] = parameters.ACTIVATION[activation]
    entry = f"conv_{pass_plan.pass_}"
    packed = parameters.pack(problem, strides)
    launch = Launch(
        source=f"{entry}.cu",
        entry=entry,
        defines=tuple(defines.items()),
        grid=(pass_plan.blocks,),
        block=(tile.threads,),
        shared_bytes=0,
        arguments=(*_ARGUMENTS[pass_plan.pass_], packed),
    )
    return (launch,)


def _variant(problem: ConvProblem, strides: Strides) -> dict[str, str | int]:
    return {"STORAGE": STORAGE[problem.dtype], "INDEX": parameters.index_type(problem, strides)}
