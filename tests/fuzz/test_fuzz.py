"""The attack of tests/fuzz finds and shrinks injected faults, and reports nothing else."""

from __future__ import annotations

import importlib.util
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from math import prod
from typing import Any

import numpy as np
import pytest

import cupyconv
from tests import emulator

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import torch

from tests.fuzz import checking, drawing, judging, oracle
from tests.fuzz.attacking import Orders, attack
from tests.fuzz.cases import OPERATIONS, Case, View

SEED = "i"

HEALTHY = {name: getattr(cupyconv, name) for name in OPERATIONS}


# -- faults ----------------------------------------------------------------------------------------

Function = Callable[..., Any]
Fault = Callable[[Function, tuple[Any, ...], dict[str, Any]], Any]
"""Function that calls a library function with its arguments and makes a mistake."""


def exchanges_the_paddings(function, given, keywords):
    padding = keywords.get("padding")
    if isinstance(padding, tuple) and all(isinstance(side, tuple) for side in padding):
        if min(map(len, padding)) < 2 or min(map(min, padding)) < 0:
            return function(*given, **keywords)
        keywords["padding"] = tuple((after, before) for before, after in padding)
        keywords["impl"] = "auto"
    return function(*given, **keywords)


def drops_negative_strides(function, given, keywords):
    def forwards(value):
        if not isinstance(value, np.ndarray):
            return value
        return value[tuple(slice(None, None, -1 if s < 0 else 1) for s in value.strides)]

    return function(*map(forwards, given), **keywords)


def is_off_by_some_ulp(function, given, keywords):
    result = function(*given, **keywords)
    if result.dtype == np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            result *= np.float32(1 + 100 * 2.0**-23)
    return result


def raises_with_many_groups(function, given, keywords):
    if keywords.get("groups", 1) > 2:
        raise ZeroDivisionError("a crash")
    return function(*given, **keywords)


def refuses_long_strides(function, given, keywords):
    if np.max(keywords.get("stride", 1)) > 3:
        raise cupyconv.ConvError("strides are short", "this one is not", "Use another")
    return function(*given, **keywords)


def takes_what_it_should_refuse(function, given, keywords):
    try:
        return function(*given, **keywords)
    except cupyconv.ConvError:
        return np.zeros(1)


def writes_beside_out(function, given, keywords):
    result = function(*given, **keywords)
    out = keywords.get("out")
    if out is not None and out.ndim > 1 and out.strides[-1] > out.itemsize and out.size:
        beside = np.ndarray(
            1, np.uint8, out.base, _address(out) - _address(out.base) + out.itemsize
        )
        beside[...] = 0
    return result


def _address(array):
    return array.__array_interface__["data"][0]


def changes_an_input(function, given, keywords):
    result = function(*given, **keywords)
    array = given[-1]
    if isinstance(array, np.ndarray) and array.size and array.flags.writeable:
        array.flat[0] += 1
    return result


def loses_what_is_not_finite(function, given, keywords):
    result = function(*given, **keywords)
    return np.nan_to_num(result, copy=False, nan=0.0, posinf=0.0, neginf=0.0)


def conjugates_twice(function, given, keywords):
    result = function(*given, **keywords)
    if result.dtype.kind == "c":
        result.imag *= -1
    return result


def forgets_lazy_signs(function, given, keywords):
    def memory(value):
        is_lazy = isinstance(value, torch.Tensor) and value.is_neg() and not value.is_conj()
        if not is_lazy or value.dtype == torch.bfloat16:
            return value
        return np.from_dlpack(value)

    return function(*map(memory, given), **keywords)


FAULTS = {  # fault: start of the finding's kind
    exchanges_the_paddings: "wrong",
    drops_negative_strides: "wrong",
    is_off_by_some_ulp: "wrong",
    loses_what_is_not_finite: "wrong",
    raises_with_many_groups: "raised",
    refuses_long_strides: "refused",
    takes_what_it_should_refuse: "illegal",
    conjugates_twice: "wrong",
    writes_beside_out: "outside",
    changes_an_input: "changed",
    forgets_lazy_signs: "wrong",
}
LAYERS = 150
"""Maximum number of layers until a fault must be found (hand-set)."""


def put_in(patch: pytest.MonkeyPatch, module: Any, fault: Fault) -> None:
    """Inject a fault into a module's functions."""

    def faulty(function: Function) -> Function:
        return lambda *given, **keywords: fault(function, given, keywords)

    for name in OPERATIONS:
        patch.setattr(module, name, faulty(getattr(module, name)))


def first_finding(stream: str, kind: str) -> str:
    """Return the report of the first finding of a kind, or raise AssertionError."""
    for message, content in attack(Orders(SEED, (stream,), layers=LAYERS)):
        if message == "finding" and content[0][0] == kind:
            return content[1]
    raise AssertionError(f"nothing found in {LAYERS} layers")


def program_of(report: str) -> str:
    return report[report.index("from math") :]


def most_elements(program: str) -> int:
    """Return the size of the largest array of a program's case; the program must pass."""
    namespace: dict[str, Any] = {}
    exec(program, namespace)
    return max(prod(shape) for shape in namespace["case"].operands.values())


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found_and_shrunk(fault, monkeypatch):
    with monkeypatch.context() as patch:
        put_in(patch, cupyconv, fault)
        program = program_of(first_finding("numpy", FAULTS[fault]))
        with pytest.raises(AssertionError):
            exec(program, {})
    assert most_elements(program) <= 20, program


def test_faults_of_kernels_are_found_and_shrunk(monkeypatch):
    def as_a_kernel(name: str) -> Function:
        def compute(*given: Any, arch: str, precision: str = "", impl: str = "", **keywords: Any):
            result = HEALTHY[name](*given, **keywords)
            if arch == "sm_89" and result.size:
                result.flat[-1] += 1
            return result

        return compute

    with monkeypatch.context() as patch:
        for name in OPERATIONS:
            patch.setattr(emulator, name, as_a_kernel(name))
        program = program_of(first_finding("kernels", "wrong"))
        with pytest.raises(AssertionError):
            exec(program, {})
    assert "arch='sm_89'" in program
    assert most_elements(program) <= 20, program


# -- no faults -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("stream", "layers"), [("numpy", 100), ("kernels", 1)])
def test_short_attack_finds_nothing(stream, layers):
    *_, (_, figures) = messages = list(attack(Orders(SEED, (stream,), layers=layers)))
    assert [content[1] for message, content in messages if message == "finding"] == []
    passes = figures.passes if stream == "numpy" else figures.kernels
    assert passes.total() >= 3 * layers


@pytest.mark.parametrize("draw", [drawing.numpy_cases, drawing.kernel_cases])
def test_number_and_seed_determine_a_case(draw):
    assert repr(list(draw("b", 7))) == repr(list(draw("b", 7)))
    assert repr(list(draw("b", 7))) != repr(list(draw("b", 8)))
    assert repr(list(draw("b", 7))) != repr(list(draw("c", 7)))


def test_random_cases_cover_every_feature():
    cases = [case for number in range(600) for case in drawing.numpy_cases(SEED, number)]
    views = [view for case in cases for view in case.views.values()]
    assert {case.operation for case in cases} == set(OPERATIONS)
    assert {case.dtype for case in cases} == set(oracle.DTYPES)
    assert {case.rank for case in cases} >= {1, 2, 3}
    for field in vars(View()):
        assert any(getattr(view, field) for view in views), field
    for word in ("activation", "bias", "shift", "adds", "poke", "bad_out"):
        assert any(getattr(case, word) for case in cases), word
    assert any(case.batch == 0 for case in cases)
    assert 0.9 < sum(map(is_legal, cases)) / len(cases) < 1


def is_legal(case: Case) -> bool:
    try:
        oracle.geometry(case)
    except oracle.IllegalError:
        return False
    return True


@pytest.mark.thorough
def test_interrupted_attack_prints_its_summary():
    command = [sys.executable, "-m", "tests.fuzz", "--only", "numpy", "--jobs", "1", "--seed", "d"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as attacker:
        assert attacker.stdout is not None
        assert attacker.stdout.readline() == "seed d\n"
        attacker.send_signal(signal.SIGINT)
        rest = attacker.stdout.read()
    assert re.search(r"layers \d+, passes on NumPy \d+, .* findings \d+\n$", rest)
    assert attacker.returncode in (0, 1)


# -- the oracle ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "taps", "stride", "padding", "output", "pads"),
    [  # TensorFlow's examples of SAME and VALID, then even filters and wide strides
        (13, 6, 5, "SAME", 3, (1, 2)),
        (13, 6, 5, "VALID", 2, (0, 0)),
        (7, 2, 1, "same", 7, (0, 1)),
        (7, 2, 1, "same_lower", 7, (1, 0)),
        (9, 1, 4, "same", 3, (0, 0)),
    ],
)
def test_oracle_pads_as_documented(size, taps, stride, padding, output, pads):
    layer = oracle.geometry(
        Case("conv_forward", 1, 1, 1, 1, (size,), (taps,), stride, padding=padding)
    )
    assert (layer.outputs, layer.pads) == ((output,), (pads,))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_sums_in_any_order_are_accepted(dtype):
    # The filter is broadcast, so that only 63 of the 504 results differ.  With so few, all may be
    # nearly exact by chance.
    repeated = View(repeated=(1, 2))
    for seed in range(60):
        case = Case(
            *("conv_backprop_input", 9, 8, 16, 8, (7,), (3,)),
            views={"w": repeated},
            dtype=dtype,
            dy=(9, 16, 5),
            values="decades",
            size=4,
            seed=seed,
        )
        known = checking.layer_of(case).oracle
        terms, _ = known.terms(case.operation)
        rng = np.random.default_rng(seed)
        for _ in range(5):
            shuffled = rng.permuted(terms, axis=-1).astype(dtype)
            sums = known.stored(case.operation, np.cumsum(shuffled, -1)[..., -1])
            assert not judging.bounds(case, known).wrong(sums).any()


def test_oracle_shares_no_code_with_the_library():
    script = (
        "import sys; from tests.fuzz import oracle, judging; "
        "assert not [name for name in sys.modules if name.startswith('cupyconv')]"
    )
    subprocess.run([sys.executable, "-c", script], check=True)
