"""cuda-direct (cuda/conv_direct.cu): what it refuses, and how strips are cut."""

from __future__ import annotations

from math import prod

from cupyconv.planning import cost
from cupyconv.planning.families.streaming import Flow, Streaming, chunks_of
from cupyconv.planning.request import Request
from cupyconv.problem import ConvProblem

MAX_SOURCES = 16
"""Source channels of a group, all of which a thread holds for a pixel."""

MAX_UNROLLED = 64
"""Taps of a row times source channels, whose products are unrolled."""

MAX_COLUMNS = 96
"""Columns of the input under a strip that are still unrolled: a 31-tap filter with dilation 2."""

_LEAST_PIXELS = 1024  # of a chunk
_EFFICIENCY = 0.3  # share of the rate; to be replaced by a measurement


def channels_of(problem: ConvProblem, pass_: str) -> tuple[int, int]:
    """Results and sources of a group at a pixel.

    The filter gradient walks the output, so its results are the filters.
    """
    channels, filters = problem.C // problem.groups, problem.K // problem.groups
    return (channels, filters) if pass_ == "backprop_input" else (filters, channels)


def strip_of(problem: ConvProblem, pass_: str) -> int:
    """Neighbouring pixels of a row that a thread computes; in backprop_input, whole strides."""
    return -(-4 // problem.stride[-1]) * problem.stride[-1] if pass_ == "backprop_input" else 4


class Direct(Streaming):
    name = "cuda-direct"
    summary = "strips of neighbouring pixels and channels, each byte moved about once"
    kernels = "direct"

    def refuses_layer(self, request: Request) -> str | None:
        problem, pass_ = request.problem, request.pass_
        outs, ins = channels_of(problem, pass_)
        if problem.is_complex:
            return "cuda-direct multiplies real numbers"
        if ins > MAX_SOURCES:
            return f"cuda-direct takes up to {MAX_SOURCES} source channels a group, not {ins}"
        strip = strip_of(problem, pass_)
        taps, stride, dilation = problem.filter_sizes[-1], problem.stride[-1], problem.dilation[-1]
        columns = (strip - 1) * stride + (taps - 1) * dilation + 1
        if columns > MAX_COLUMNS:
            return f"{columns} columns under a strip of {strip} are more than {MAX_COLUMNS}"
        if taps * ins > MAX_UNROLLED:
            return (
                f"{taps} taps of {ins} channels are more than the {MAX_UNROLLED} that are unrolled"
            )
        if prod(problem.filter_sizes[:-1]) * ins >= 2**16 or problem.groups * outs >= 2**16:
            return "the rows of the filter, or the channels, are more than a launch has blocks for"
        return None

    def flow(self, request: Request) -> Flow:
        problem = request.problem
        rate = cost.plain_rate(request)
        microseconds = cost.computing(request.device.chip, rate, problem.flops) / _EFFICIENCY
        channels_and_rows = -(-problem.K // 64) * prod(problem.filter_sizes[:-1])
        pixels = problem.N * prod(problem.output_sizes)
        return Flow(microseconds, chunks_of(pixels, channels_and_rows, _LEAST_PIXELS))


CUDA_DIRECT = Direct()
