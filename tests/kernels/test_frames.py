"""3-D layers whose frames are divided into runs that the same taps read."""

from __future__ import annotations

import itertools

import pytest

from cupyconv import ConvProblem
from cupyconv.kernels import frames
from cupyconv.planning import Request
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES
from tests import agreement, emulator
from tests.agreement import fits, plan_by
from tests.configurations import in_formats, random_problems

CAUSAL = ConvProblem((2, 64, 3, 4, 5), (64, 64, 3, 3, 3), padding=((2, 0), (1, 1), (1, 1)))
"""Layer that pads frames only before the first, as video networks do."""

PADDED = ConvProblem(
    (1, 8, 5, 3, 4), (16, 8, 4, 3, 1), stride=(2, 2, 1), dilation=(3, 1, 1), padding=((9, 5), 1, 0)
)
"""Layer with outputs that read only padding frames, and inputs that no output reads."""

ODD = ConvProblem((1, 16, 4, 3, 3), (16, 16, 3, 3, 3), padding=1)
"""Layer whose frames have an odd number of pixels, so that runs of frames begin between vectors."""

LAYERS = (
    *(CAUSAL, CAUSAL.replace(padding=(0, 1, 1)), CAUSAL.replace(stride=(2, 1, 2))),
    *(PADDED, ODD),
)
FORMATS = (("NDHWC", "ODHWI"), ("NDHWC", "DHWIO"), ("NCDHW", "OIDHW"))


def test_runs_contain_exactly_the_taps_that_read_frames():
    divided = 0
    volumes = (one for one in random_problems(600, seed=9) if one.spatial_rank == 3)
    for problem, pass_ in itertools.product((*LAYERS, *volumes), PASSES[:2]):
        axis, found = problem.axes[0], frames.parts(problem, pass_, divided=True)[0]
        reads = {(place, tap) for places, taps in found for place in places for tap in taps}
        by_output = pass_ == "forward"
        assert reads == {
            (output if by_output else at, tap)
            for output, tap in itertools.product(range(axis.output), range(axis.filter))
            if 0
            <= (at := output * axis.stride - axis.pad_before + tap * axis.dilation)
            < axis.input
        }
        places = [place for run, _ in found for place in run]
        assert sorted(places) == list(range(axis.output if by_output else axis.input))
        divided += len(found) > len(frames.parts(problem, pass_)[0])
    assert divided > 50


EACH = [
    *itertools.product((("cuda-hopper", "sm_90a"), ("cuda-gather", "sm_80")), LAYERS, FORMATS),
    (("cuda-hopper-bf16x6", "sm_90a"), CAUSAL, FORMATS[0]),
]


@pytest.mark.costly
@pytest.mark.parametrize(("kernel", "layer", "formats"), EACH)
def test_divided_frames_are_exact(kernel, layer, formats):
    impl, arch = kernel
    precision, dtype = ("bf16x6", "float32") if "bf16x6" in impl else ("ieee", "float16")
    problem = in_formats(layer, *formats).replace(dtype=dtype)
    taken = fits(problem, impl, arch, precision)
    for pass_ in taken:
        request = Request(problem, pass_, emulator.device(arch), precision).reduced
        found = FAMILIES[impl].candidates(request)
        divided = [one for one in found if one.divides_frames]
        chosen = (divided or found)[-1]
        one = plan_by(lambda _, chosen=chosen: chosen, problem, impl, request.device,
                      precision=precision, passes=(pass_,))  # fmt: skip
        agreement.require_exact(
            emulator, problem, impl=one, arch=arch, precision=precision, passes=(pass_,)
        )
    assert taken


@pytest.mark.costly
@pytest.mark.parametrize("stride", [1, (2, 1, 1)])
def test_filters_along_frames_read_channels_first_without_copies(stride):
    """Pixels of a frame are merged into one axis, whose lines the kernel reads."""
    problem = ConvProblem((2, 72, 4, 10, 12), (64, 72, 3, 1, 1), stride=stride,
                          padding=((2, 0), 0, 0), dtype="bfloat16")  # fmt: skip
    device = emulator.device("sm_90a")
    for pass_ in PASSES:
        found = FAMILIES["cuda-hopper"].candidates(Request(problem, pass_, device))
        planar = [one for one in found if one.tile.defines["PLANAR"]]
        chosen = min(planar, key=lambda one: one.workspace_bytes)
        assert chosen.workspace_bytes <= 2 * 64 * 72 * 3  # w
        one = plan_by(lambda _, chosen=chosen: chosen, problem, "cuda-hopper", device,
                      passes=(pass_,))  # fmt: skip
        agreement.require_exact(emulator, problem, impl=one, arch="sm_90a", passes=(pass_,))
