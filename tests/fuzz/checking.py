"""Run one case on the library, and check its result."""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np

import cupyconv
from cupyconv import ConvError, ConvProblem, ConvTypeError
from cupyconv.cpu import blocked
from cupyconv.kernels.strides import Strides
from tests import agreement, emulator
from tests.emulator import CheckerError

from .cases import (
    ADDENDS,
    PART,
    PLAIN,
    Buffer,
    Case,
    KernelRun,
    NumpyRun,
    View,
    dtype_of,
    layout,
    place,
    places_of,
)
from .judging import bounds
from .kernels import NotTakenError, pool
from .oracle import ComplexOracle, Geometry, IllegalError, Oracle, geometry, result_shape

APIS: dict[type, Any] = {NumpyRun: cupyconv, KernelRun: emulator}
"""Object with the library's functions, keyed by the kind of run."""

NOT_TAKEN = "the implementation must support the problem"
"""Rule of the ConvError for a problem that an implementation refuses, but others support."""

HERE = Path(__file__).parent

LONGEST_RUN = 5.0
"""Limit in seconds of this thread's CPU time per NumPy pass of a random layer."""


class Fault(AssertionError):
    """A wrong result; each kind is a subclass, so that hypothesis shrinks each kind.

    Attributes:
        kind: key that faults with one cause share.
    """

    kind: tuple[str, ...]


@cache
def _class_of(kind: tuple[str, ...]) -> type[Fault]:
    return type(" / ".join(kind), (Fault,), {"kind": kind})


def fault(kind: tuple[str, ...], text: str) -> Fault:
    """Return a fault of a kind, whose text has the expected and the actual result."""
    return _class_of(kind)(text)


@dataclass
class Setting:
    """Data shared by the cases of one layer."""

    oracle: Oracle | ComplexOracle | None
    places: dict[str, Buffer]


def method_plan(case: Case, found: Geometry, method: str) -> cupyconv.Plan:
    """Return the plan of a case's layer, with one method for all passes."""
    planned = cupyconv.plan(problem_of(case, found), "cpu")
    passes = tuple(replace(one, method=method) for one in planned.passes)
    return replace(planned, passes=passes)


def problem_of(case: Case, found: Geometry) -> ConvProblem:
    """Return the library's own description of a legal layer."""
    return ConvProblem(
        found.shapes["x"],
        found.shapes["w"],
        stride=case.stride,
        padding=case.padding,
        dilation=case.dilation,
        groups=case.groups,
        data_format=case.data_format,
        filter_format=case.filter_format,
        dtype=case.dtype,
    )


def strides_of(case: Case, found: Geometry) -> Strides:
    """Return the strides and the alignment of the tensors of a legal case's pass."""
    result = {"conv_forward": "dy", "conv_backprop_filter": "w"}.get(case.operation, "x")
    strides, alignment = {}, 16
    for name in ("x", "w", "dy"):
        view, shape = case.views.get(name, PLAIN), found.shapes[name]
        if name == result:
            view, shape = out_view(case, shape)
        where = layout(view, shape)
        strides["y" if name == "dy" else name] = where.strides
        if prod(shape):
            alignment |= view.shift + where.first * dtype_of(case.dtype).itemsize
    return Strides(**strides, alignment=alignment & -alignment)


def kernel_plan(case: Case, found: Geometry | None) -> cupyconv.Plan | str:
    """Return the plan with the tile of a case's run, or the name of its implementation.

    The name is returned if the run has no tile, the case is illegal or the family refuses the pass.
    """
    run = case.run
    assert isinstance(run, KernelRun)
    if run.tile is None or run.impl == "auto" or found is None:
        return run.impl
    problem, device = problem_of(case, found), emulator.device(run.arch)
    strides = strides_of(case, found)
    if pass_of(case) not in agreement.fits(problem, run.impl, device, run.precision, strides):
        return run.impl
    return agreement.plan_with(
        *(problem, run.impl, device),
        tile=run.tile,
        passes=(pass_of(case),),
        precision=run.precision,
        strides=strides,
    )


def pass_of(case: Case) -> str:
    """Return the pass of a case; not for conv_backprop_bias."""
    return case.operation.removeprefix("conv_").replace("transpose", "backprop_input")


def arguments(case: Case, places: dict[str, Buffer]) -> tuple[list[Any], dict[str, Any]]:
    """Return the arguments of the operation, without ``out`` and ``impl``."""
    arrays = {name: one.given for name, one in places.items()}
    keywords = case.rules
    if case.operation in ADDENDS:
        if case.activation is not None:
            keywords["activation"] = case.activation
        if case.adds:
            keywords["add"] = arrays[ADDENDS[case.operation]]
    if case.operation == "conv_forward":
        given = [arrays["x"], arrays["w"]]
        return given if case.bias is None else [*given, arrays["bias"]], keywords
    if case.operation == "conv_backprop_input":
        return [case.x, arrays["w"], arrays["dy"]], keywords
    if case.operation == "conv_backprop_filter":
        return [arrays["x"], case.w, arrays["dy"]], keywords
    if case.operation == "conv_backprop_bias":
        return [arrays["dy"]], keywords
    if case.output_padding == "shape":
        keywords["output_shape"] = case.x
    elif case.output_padding is not None:
        keywords["output_padding"] = case.output_padding
    given = [arrays["dy"], arrays["w"]]
    return given if case.shift is None else [*given, arrays["shift"]], keywords


FILLER = 0x5A
"""Byte that fills the memory of ``out`` before the call."""


def out_view(case: Case, shape: tuple[int, ...]) -> tuple[View, tuple[int, ...]]:
    """Return the layout and shape of ``out`` for a result of this shape."""
    view = case.views.get("out", PLAIN)
    if case.bad_out == "shape":
        shape = (*shape[:-1], shape[-1] + 1)
    if case.bad_out == "read-only":
        view = replace(view, read_only=True)
    if case.bad_out == "overlapping":
        longest = max(range(len(shape)), key=shape.__getitem__)
        view = replace(view, repeated=(longest,))
    return view, shape


def out_place(case: Case, found: Geometry | None, places: dict[str, Buffer]) -> Buffer | None:
    """Return ``out``, with the case's fault if it has one; None if it is not passed."""
    if case.bad_out == "shared":
        return places[next(iter(case.operands))]
    if ("out" not in case.views and not case.bad_out) or found is None:
        return None
    view, shape = out_view(case, result_shape(found, case.operation))
    dtype = dtype_of(case.dtype)
    count = layout(view, shape).count
    made = place(view, shape, dtype, np.zeros(count))
    made.memory[:] = FILLER
    return made


def call(case: Case, found: Geometry | None, places: dict[str, Buffer], out: Buffer | None) -> Any:
    """Return the library's result; ``found`` is None for an illegal case."""
    given, keywords = arguments(case, places)
    if out is not None:
        keywords["out"] = out.given
    function = getattr(APIS[type(case.run)], case.operation)
    if isinstance(case.run, KernelRun):
        return _call_kernels(case, found, lambda **more: function(*given, **keywords, **more))
    if case.operation == "conv_backprop_bias":
        return function(*given, **keywords)
    impl: Any = case.run.method
    if impl not in ("auto", "reference"):
        assert found is not None
        impl = method_plan(case, found, impl)
    kept = blocked.BLOCK_BYTES
    blocked.BLOCK_BYTES = case.run.block_bytes or kept
    try:
        return function(*given, **keywords, impl=impl)
    finally:
        blocked.BLOCK_BYTES = kept


def _call_kernels(case: Case, found: Geometry | None, function: Callable[..., Any]) -> Any:
    run = case.run
    assert isinstance(run, KernelRun)
    more: dict[str, Any] = {"arch": run.arch}
    if case.operation != "conv_backprop_bias":
        more |= {"impl": kernel_plan(case, found), "precision": run.precision}
    with emulator.settings(**run.settings):
        return function(**more)


def implementation(case: Case, found: Geometry) -> str:
    """Return the NumPy method of a legal case, or the kernel family that just ran it."""
    if case.operation == "conv_backprop_bias":
        return "bias"
    if isinstance(case.run, KernelRun):
        return pool.ran if case.run.impl == "auto" else case.run.impl
    if case.run.method != "auto":
        return case.run.method
    return cupyconv.plan(problem_of(case, found), "cpu")[pass_of(case)].method


# -- judging ---------------------------------------------------------------------------------------


def layer_of(case: Case) -> Setting:
    """Return the data that a case shares with other operations on its layer.

    An illegal case has no oracle, and does not share its arrays.
    """
    try:
        found = geometry(case)
    except IllegalError:
        return Setting(None, places_of(case, case.operands))
    # An array that is not passed may have an impossible shape.
    shapes = {name: shape for name, shape in case.tensors.items() if min(shape) >= 0}
    places = places_of(case, shapes)
    arrays = {name: one.array for name, one in places.items()}
    if case.dtype in PART:
        return Setting(ComplexOracle(found, PART[case.dtype], arrays), places)
    return Setting(Oracle(found, case.dtype, arrays), places)


def check(case: Case, layer: Setting | None = None) -> None:
    """Check a case.

    Args:
        case: the case.
        layer: data shared with other cases.

    Raises:
        Fault: the result is wrong.
        NotTakenError: the implementation does not support the case.
    """
    layer = layer or layer_of(case)
    try:
        found = geometry(case)
    except IllegalError as error:
        _check_illegal(case, layer, str(error))
        return
    assert layer.oracle is not None
    before = {name: layer.places[name].memory.tobytes() for name in case.operands}
    out = out_place(case, found, layer.places)
    begun = time.thread_time()
    try:
        got = call(case, found, layer.places, out)
    except NotTakenError:
        raise
    except ConvError as error:
        if error.rule == NOT_TAKEN:
            raise NotTakenError(error.rule) from None
        raise fault(("refused", case.operation, error.rule), f"refused: {error}") from error
    except CheckerError as error:
        report = error.reports[0]
        kind = ("checker", report.kind, report.file, str(report.line))
        raise fault(kind, str(error)) from error
    except Exception as error:
        where = _innermost(error)
        kind = ("raised", type(error).__name__, where)
        raise fault(kind, f"raised {type(error).__name__} at {where}: {error}") from error
    kind = _kind(case, found)
    seconds = time.thread_time() - begun
    if isinstance(case.run, NumpyRun) and case.run.block_bytes is None and seconds > LONGEST_RUN:
        raise fault(("slow", *kind), f"took {seconds:.1f} s")
    changed = [name for name, kept in before.items() if layer.places[name].memory.tobytes() != kept]
    if changed:
        raise fault(("changed", *kind, *changed), f"changed {', '.join(changed)}")
    _check_result(case, kind, layer.oracle, got, out)


def _check_illegal(case: Case, layer: Setting, reason: str) -> None:
    legal = None
    if case.bad_out:
        legal = geometry(replace(case, bad_out=""))
    out = out_place(case, legal, layer.places)
    try:
        call(case, None, layer.places, out)
    except (ConvError, ConvTypeError):
        return
    except CheckerError as error:
        text = f"was run, though it needs {reason}: {error}"
        raise fault(("illegal", reason, "ran"), text) from error
    except NotTakenError:
        raise
    except Exception as error:
        where = _innermost(error)
        kind = ("illegal", reason, type(error).__name__, where)
        text = f"raised {type(error).__name__} at {where}, not ConvError, though it needs {reason}"
        raise fault(kind, f"{text}: {error}") from error
    raise fault(("illegal", reason), f"was taken, though it needs {reason}")


def _check_result(
    case: Case,
    kind: tuple[str, ...],
    oracle: Oracle | ComplexOracle,
    got: Any,
    out: Buffer | None,
) -> None:
    if out is not None and got is not out.given:
        raise fault(("not out", *kind), "did not return out")
    shape = result_shape(oracle.layer, case.operation)
    if got.shape != shape or got.dtype != dtype_of(case.dtype):
        text = f"gave {got.dtype} {got.shape}, expected {case.dtype} {shape}"
        raise fault(("shape", *kind), text)
    must_be = bounds(case, oracle)
    parts = np.stack([got.real, got.imag], -1) if case.dtype in PART else got
    wrong = must_be.wrong(parts)
    if wrong.any():
        index = tuple(int(i) for i in np.argwhere(wrong)[0])
        low, high = (float(edge[index]) for edge in (must_be.low, must_be.high))
        value = float(parts[index])
        wanted = repr(low) if low == high or low != low else f"{low!r} to {high!r}"
        text = f"{wrong.sum()} of {parts.size} wrong, the first at {index}: {value!r}, not {wanted}"
        raise fault(("wrong", *kind), text)
    if out is not None and not _untouched(out):
        raise fault(("outside", *kind), "wrote between or beside the elements of out")


def _untouched(out: Buffer) -> bool:
    """Return whether the memory outside the elements of ``out`` is unchanged; overwrite ``out``."""
    dtype = out.array.dtype
    out.array[...] = np.full(dtype.itemsize, FILLER, np.uint8).view(dtype)[0]
    return bool((out.memory == FILLER).all())


def _kind(case: Case, found: Geometry | None = None) -> tuple[str, ...]:
    """Return the implementation, the operation and the dtype of a case."""
    where = "kernels" if isinstance(case.run, KernelRun) else "numpy"
    name = implementation(case, found) if found else ""
    return (where, name, case.operation, case.dtype)


def _innermost(error: BaseException) -> str:
    """Return the file and line of the library where an error was raised."""
    frames = traceback.extract_tb(error.__traceback__)
    root = HERE.parent.parent
    ours = [
        frame
        for frame in frames
        if Path(frame.filename).is_relative_to(root) and ".venv" not in frame.filename
    ]
    frame = (ours or list(frames))[-1]
    return f"{Path(frame.filename).name}:{frame.lineno}"
