"""The attack of tests/fuzz finds faults, and reports nothing else."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from dataclasses import replace

import hypothesis
import numpy as np
import pytest
from hypothesis import HealthCheck, Phase

import cupyconv

if importlib.util.find_spec("torch") is None:
    pytest.skip("torch is not installed", allow_module_level=True)

from tests.fuzz import checking, judging, oracle
from tests.fuzz.attack import Attack, Layer, layers
from tests.fuzz.cases import OPERATIONS, Case, View
from tests.fuzz.checking import Fault
from tests.fuzz.kernels import pool


def is_off_by_some_ulp(function, given, keywords):
    result = function(*given, **keywords)
    if result.dtype == np.float32:
        with np.errstate(over="ignore", invalid="ignore"):
            result *= np.float32(1 + 100 * 2.0**-23)
    return result


def takes_what_it_should_refuse(function, given, keywords):
    try:
        return function(*given, **keywords)
    except cupyconv.ConvError:
        return np.zeros(1)


def writes_beside_out(function, given, keywords):
    result, out = function(*given, **keywords), keywords.get("out")
    if out is not None and out.ndim > 1 and out.strides[-1] > out.itemsize and out.size:
        ends = [one.__array_interface__["data"][0] for one in (out, out.base)]
        np.ndarray(1, np.uint8, out.base, ends[0] - ends[1] + out.itemsize)[...] = 0
    return result


def changes_an_input(function, given, keywords):
    result, array = function(*given, **keywords), given[-1]
    if isinstance(array, np.ndarray) and array.size and array.flags.writeable:
        array.flat[0] += 1
    return result


FAULTS = {
    is_off_by_some_ulp: "wrong",
    takes_what_it_should_refuse: "illegal",
    writes_beside_out: "outside",
    changes_an_input: "changed",
}
"""Start of the kind of fault, keyed by a function that calls the library's and makes a mistake."""


def attacked(check, count=150):
    """Call a function with the cases of some drawn layers."""
    how = {"deadline": None, "database": None, "phases": [Phase.generate]}
    how |= {"max_examples": count, "suppress_health_check": list(HealthCheck)}

    @hypothesis.seed(1)
    @hypothesis.settings(**how)
    @hypothesis.given(layers("numpy"))
    def each(cases):
        check(cases)

    each()


@pytest.mark.thorough
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_faults_are_found(fault, monkeypatch):
    for name in OPERATIONS:
        function = getattr(cupyconv, name)
        monkeypatch.setattr(
            cupyconv, name, lambda *a, function=function, **more: fault(function, a, more)
        )
    with pytest.raises(Fault) as found:
        attacked(Attack().layer)
    assert found.value.kind[0] == FAULTS[fault]
    program = str(found.value).partition("\n\n")[2]
    with pytest.raises(AssertionError):
        exec(program, {})
    monkeypatch.undo()
    exec(program, {})


@pytest.mark.parametrize("stream", ["numpy", pytest.param("kernels", marks=pytest.mark.thorough)])
def test_short_attack_finds_nothing(stream):
    attack = Attack()
    with pool.limited():
        assert attack.round(stream, "i") == []
    assert attack.counts.total() >= 20


def test_data_sets_with_one_seed_are_judged_apart():
    """hypothesis may draw one seed for several sets of data of a layer."""
    first = Case("conv_forward", 1, 4, 4, 4, (5,), (3,), dy=(1, 4, 3), values="normal")
    for changes in (
        {"values": "integers"},
        {"bias": 4},
        {"views": {"x": View(reversed=(2,))}},
        {"dtype": "complex64"},
    ):
        other = replace(first, **changes)
        for pair in ((first, other), (other, first)):
            Attack().layer(Layer(pair))


@pytest.mark.thorough
def test_random_cases_cover_every_feature():
    cases = []
    attacked(cases.extend, 1200)
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
    for seed in range(20):
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
