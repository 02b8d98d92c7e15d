"""Operands that cuda-gather first copies to channels last: results, plans and workspace."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cupyconv import ConvError, ConvProblem
from cupyconv.kernels.gather import COPIES
from cupyconv.kernels.strides import Strides, contiguous_strides, element_strides
from cupyconv.planning import Device, Request, plan, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.planning.plan import contenders
from cupyconv.problem import PASSES
from tests import agreement, emulator, views
from tests.agreement import plan_with
from tests.configurations import CASES, FAMILY_CASES, all_formats, in_formats, random_data
from tests.launches import filter_form

pytestmark = pytest.mark.costly

GATHER, SM_80 = FAMILIES["cuda-gather"], Device.of("sm_80")
PROBLEMS = {case.name: case.problem for case in (*CASES, *FAMILY_CASES)}
DEEP = ConvProblem((32, 384, 28, 28), (384, 384, 3, 3), padding=1, dtype="float16")
"""Layer whose copies take little time compared with the product."""

LAST = in_formats(DEEP, "NHWC", "OHWI")
BOTH = 3
"""Index in COPIES of both operands."""

# -- results ---------------------------------------------------------------------------------------

# Case, dtype, precision, splits and architecture.
RUNS = (
    ("pieces_of_8", "float16", "ieee", 1, "sm_80"),
    ("pieces_of_8_stride_2", "bfloat16", "ieee", 1, "sm_80"),
    ("pieces_of_8_everything_differs", "float32", "ieee", 3, "sm_86"),
    ("odd_channels", "float16", "ieee", 3, "sm_80"),
    ("groups_of_3_to_2", "float32", "tf32", 1, "sm_80"),
    ("volume_phases", "float64", "ieee", 1, "sm_80"),
    ("grouped_pieces", "float16", "ieee", 1, "sm_75"),
    ("long_signal", "float32", "ieee", 5, "sm_80"),
    ("several_tiles", "float16", "ieee", 1, "sm_90a"),
)


@pytest.mark.thorough
@pytest.mark.parametrize("number", range(len(RUNS)), ids=[f"{run[0]}-{run[1]}" for run in RUNS])
def test_copies_of_one_or_both_operands_are_exact(number):
    """Each case is run in two of six formats; sums of splits precede copies in the workspace."""
    name, dtype, precision, splits, arch = RUNS[number]
    problem = PROBLEMS[name].replace(dtype=dtype)
    formatted = [all_formats(problem)[0], all_formats(problem)[number % 6]]
    for turn, one in enumerate(formatted):
        copies = BOTH if turn == 0 else 1 + number % BOTH
        made = plan_with(
            *(one, "cuda-gather", emulator.device(arch)),
            tile=number,
            splits=splits,
            copies=copies,
            precision=precision,
        )
        with emulator.settings(emulator.SCHEDULES[(number + turn) % 3]):
            agreement.require_exact(emulator, one, impl=made, precision=precision, arch=arch)


@pytest.mark.parametrize("copies", [1, 2, BOTH])
def test_empty_batch_is_exact_with_copies(copies):
    problem = PROBLEMS["empty_batch"].replace(dtype="float16")
    made = plan_with(problem, "cuda-gather", SM_80, copies=copies)
    agreement.require_exact(emulator, problem, impl=made)


@pytest.mark.parametrize("pass_", PASSES)
def test_copies_of_any_view_are_exact(pass_):
    """The same kernels run for every view, whatever its strides and alignment."""
    problem = PROBLEMS["pieces_of_8"].replace(dtype="float16")
    launched = []
    for kind in views.KINDS:
        kinds = {
            operand: kind
            for operand in views.OPERANDS[pass_]
            if operand in ("x", "w", "dy") and views.suits(problem, pass_, operand, kind)
        }
        strides = views.strides_of(problem, pass_, kinds)
        made = plan_with(problem, "cuda-gather", SM_80, copies=BOTH, strides=strides)
        with emulator.settings(on_outcome=lambda one: launched.append(one.kernel)):
            views.require_exact(emulator, problem, pass_, kinds, impl=made)
    assert launched == ["conv_arrange", "conv_gather"] * len(views.KINDS)


@pytest.mark.parametrize("impl", ["cuda-gather", "cuda-columns"])
def test_prepared_filter_is_not_copied(impl):
    """Results are bitwise equal with a prepared filter and with a copied filter."""
    problem = PROBLEMS["pieces_of_8"].replace(dtype="float16")
    data, strides = random_data(problem), Strides.contiguous(problem)
    backend = emulator.convolutions.backend("sm_80")
    sets = COPIES["forward"] if impl == "cuda-gather" else [("w",)]
    for number, copies in enumerate(sets):
        request = Request(problem, "forward", backend.device, strides=strides)
        chosen = plan_with(problem, impl, backend.device, copies=number)["forward"]
        assert chosen.copies == copies
        form = backend.filter_form(request, chosen)
        assert (form.name if form else None) == ("OHWI" if "w" in copies else None)
        emulator.convolutions.require_same_bits_if_prepared(backend, request, chosen, data)
        assert request.affords(chosen.workspace_bytes)


@pytest.mark.parametrize("formats", [("NCHW", "OIHW"), ("NHWC", "HWIO"), ("NHWC", "OHWI")])
def test_cuda_columns_names_copies_of_w_by_their_memory_order(formats):
    problem = in_formats(ConvProblem((2, 16, 9, 7), (8, 16, 3, 3), padding=1), *formats)
    apart = contiguous_strides([size + 1 for size in problem.filter_shape])  # an uneven filter
    strides = replace(Strides.contiguous(problem), w=apart)
    for pass_, order in (("forward", "OHWI"), ("backprop_input", "IHWO")):
        planned = plan_pass(Request(problem, pass_, SM_80, strides=strides), "cuda-columns")
        assert filter_form(planned, problem, strides, SM_80).name == order


# -- plans -----------------------------------------------------------------------------------------


def test_operands_are_copied_only_if_that_is_faster():
    for pass_ in PASSES:
        of_pass = plan_pass(Request(DEEP, pass_, SM_80))
        assert of_pass.copies == COPIES[pass_][-1 if pass_ != "backprop_filter" else 2]
        assert of_pass.reason.endswith("copied with channels last")
        assert not plan_pass(Request(LAST, pass_, SM_80)).copies
        pointwise = ConvProblem((32, 256, 28, 28), (256, 256, 1, 1), dtype="float16")
        assert not plan_pass(Request(pointwise, pass_, SM_80)).copies
    small = DEEP.replace(input_shape=(2, 8, 9, 7), filter_shape=(8, 8, 2, 2))
    request = Request(small, "forward", SM_80)
    first, *_ = contenders(request, "cuda-gather", 1000)
    assert not first.copies


def test_only_channels_first_operands_are_copied():
    """Operands that are already channels last are not copied."""
    for formats, expected in {
        ("NCHW", "OHWI"): ("x",),
        ("NHWC", "OIHW"): ("w",),
    }.items():
        problem = in_formats(DEEP, *formats)
        found = contenders(Request(problem, "forward", SM_80), "cuda-gather", 1000)
        assert {one.copies for one in found} == {(), expected}
    # An odd number of channels allows no vectors in either order.
    odd = ConvProblem((32, 7, 28, 28), (64, 7, 3, 3), dtype="float16")
    found = contenders(Request(odd, "forward", SM_80), "cuda-gather", 1000)
    assert {one.copies for one in found} == {()}


def test_unaligned_operands_are_copied():
    strides = replace(Strides.contiguous(LAST), alignment=2)
    for pass_ in PASSES:
        found = plan_pass(Request(LAST, pass_, SM_80, strides=strides))
        assert found.copies == COPIES[pass_][BOTH]


def test_candidates_include_copies_and_no_copies():
    for pass_ in PASSES:
        found = contenders(Request(DEEP, pass_, SM_80), "auto", 5)
        ways = {bool(one.copies) for one in found if one.implementation == "cuda-gather"}
        assert ways == {True, False}


def test_copies_respect_the_workspace_limit():
    for pass_ in PASSES:
        free = plan_pass(Request(DEEP, pass_, SM_80))
        needed = free.workspace_bytes
        limited = plan_pass(Request(DEEP, pass_, SM_80, workspace_limit=needed))
        assert replace(limited, reason="") == replace(free, reason="")
        for limit in (needed - 1, 32 * 384 * 28 * 28 * 2 + 17, 100_000, 1, 0):
            bound = plan_pass(Request(DEEP, pass_, SM_80, workspace_limit=limit))
            assert bound.workspace_bytes <= limit
            assert f"bytes of workspace, but the limit is {limit}" in bound.reason


def test_plans_with_copies_are_replayed_on_other_strides():
    planned_ = plan(DEEP, "sm_80")
    turned = np.zeros(DEEP.input_shape, np.float16)[:, ::-1, ::-1]
    contiguous = Strides.contiguous(DEEP)
    strides = replace(contiguous, x=element_strides(turned), alignment=2)
    for pass_ in PASSES:
        request = Request(DEEP, pass_, SM_80, strides=strides)
        assert planned_.replay(request) is planned_[pass_]
        short = replace(request, workspace_limit=planned_[pass_].workspace_bytes - 1)
        with pytest.raises(ConvError, match="bytes of workspace, the limit"):
            planned_.replay(short)
