"""Passes that a kernel family computes as passes of other problems: results and plans."""

from __future__ import annotations

from itertools import product

import pytest

from cupyconv import ConvProblem, Plan
from cupyconv.kernels.views import EXCHANGED
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.plan import ranked_candidates
from tests import agreement, emulator, views
from tests.configurations import all_formats, in_formats

pytestmark = pytest.mark.costly

FEW_FILTERS = ConvProblem(
    (2, 40, 9, 7), (3, 40, 3, 2), padding=((1, 2), (0, 1)), dilation=(1, 2), dtype="float16"
)
SIGNAL = ConvProblem((1, 130, 23), (1, 130, 5), padding=4, dtype="float64")
VOLUME = ConvProblem((1, 24, 3, 4, 6), (2, 24, 2, 3, 1), padding=(1, 0, 0), dtype="float32")


def plan_of_view(problem, name, pass_, device, impl="cuda-gather", number=0, **how):
    """Return a plan whose pass is computed as a view, with one of the best candidates."""

    def choose(request):
        found = [one for one in ranked_candidates(request, impl) if one.method.startswith(name)]
        return found[number % len(found)]

    return agreement.plan_by(choose, problem, impl, device, passes=[pass_], **how)


def require_exact(problem, name, pass_, arch="sm_80", precision="ieee", **how):
    made = plan_of_view(problem, name, pass_, arch, precision=precision, **how)
    agreement.require_exact(
        *(emulator, problem), impl=made, precision=precision, arch=arch, passes=(pass_,)
    )


# -- x and dy exchanged ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("problem", "dtype", "precision", "arch"),
    [
        (FEW_FILTERS, "float16", "ieee", "sm_80"),
        (FEW_FILTERS, "bfloat16", "ieee", "sm_80"),
        (FEW_FILTERS, "float32", "tf32", "sm_80"),
        (FEW_FILTERS, "float16", "ieee", "sm_75"),
        (SIGNAL, "float64", "ieee", "sm_80"),
        (VOLUME, "float32", "ieee", "sm_89"),
    ],
)
def test_exchanged_operands_give_exact_filter_gradients(problem, dtype, precision, arch):
    """Each memory order uses another candidate: another tile, number of splits or copy."""
    for number, one in enumerate(all_formats(problem.replace(dtype=dtype))):
        require_exact(one, EXCHANGED, "backprop_filter", arch, precision, number=3 * number)


@pytest.mark.parametrize("kind", views.KINDS, ids=lambda kind: kind.name)
def test_exchanged_operands_may_have_any_strides(kind):
    pass_ = "backprop_filter"
    names = ("x", "dy", "out")
    kinds = {name: kind for name in names if views.suits(FEW_FILTERS, pass_, name, kind)}
    strides = views.strides_of(FEW_FILTERS, pass_, kinds)
    made = plan_of_view(FEW_FILTERS, EXCHANGED, pass_, "sm_80", strides=strides)
    views.require_exact(emulator, FEW_FILTERS, pass_, kinds, impl=made)


def test_operands_are_exchanged_if_that_is_faster():
    last = ConvProblem((1, 128, 256, 256), (3, 128, 3, 3), padding=1, dtype="float16")
    for problem, device in product((last, in_formats(last, "NHWC", "OHWI")), ("sm_80", "sm_90a")):
        planned = plan_pass(problem, "backprop_filter", Device.of(device))
        assert planned.method == EXCHANGED
        assert f", with {EXCHANGED}: implicit GEMM" in planned.reason
    for change in (
        {"stride": 2},
        {"padding": 3},
        {"groups": 4, "filter_shape": (4, 32, 3, 3)},
        {"filter_shape": (128, 128, 3, 3)},
        {"filter_shape": (3, 128, 1, 1), "padding": 0},
    ):
        request = Request(last.replace(**change), "backprop_filter", Device.of("sm_80"))
        assert not any(
            one.method.startswith(EXCHANGED) for one in ranked_candidates(request, "auto")
        )


def test_reasons_name_the_copied_tensor_of_the_caller():
    """The view reads the caller's x as its dy."""
    made = plan_of_view(FEW_FILTERS, f"{EXCHANGED}; x arranged", "backprop_filter", "sm_80")
    planned = made["backprop_filter"]
    assert planned.reason.endswith("before it, x copied with channels last")
    assert Plan.from_json(made.to_json()) == made
