"""Calls: validated and planned convolutions that run on any arrays of the same layout.

``compute``, which the library's functions use, finds the call of its arguments by one look-up.
``bind`` hands a call to the user.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from copy import copy
from functools import cache, partial
from numbers import Integral
from typing import Any

from cupyconv import arrays, backends, binding, operands, settings
from cupyconv.backends import DESCRIBE, Backend, Run
from cupyconv.binding import ARGUMENT_NAMES, OPERATIONS, ArgumentNames, Bound, Options
from cupyconv.errors import ConvError, ConvTypeError, require_word, shown
from cupyconv.formats import DataFormat, FilterFormat
from cupyconv.kernels.device import CPU
from cupyconv.launch import FilterForm
from cupyconv.operands import Layout
from cupyconv.planning import Activation, Impl, PassPlan, Plan, Precision
from cupyconv.prepared import PreparedFilter, require_use
from cupyconv.problem import ConvProblem, Padding, Size, counted, dtype_name, integers, shape_text

Given = tuple[Any, Any, Any, Any, Any]
"""Arrays of a call: first and second operand, bias, addend and ``out``; None for missing arrays."""

MOST_CALLS = 4096
"""Largest number of calls that the process remembers (hand-set)."""

_calls: dict[Any, Call] = {}
"""Calls by everything that they depend on, except the addresses of arrays."""


class Call:
    """A validated and planned convolution, for arrays of one layout.

    Called with such arrays, it launches the kernels and returns the result.  It keeps no array
    alive, except the filter of ``with_filter``.  ``cupyconv.bind`` creates it.

    Attributes:
        operation: "forward", "backprop_input", "backprop_filter", "backprop_bias" or "transpose".
        problem: the layer; for a transposed convolution, the underlying convolution.
        plan: plan of the pass, with its kernel and workspace; None for the bias gradient.
        shape: shape of the result.

    >>> x, w = np.ones((1, 2, 4, 4)), np.ones((3, 2, 3, 3))
    >>> call = cupyconv.bind("forward", x, w, padding=1)
    >>> call.plan.pass_, call.shape, call(x, w).shape
    ('forward', (1, 3, 4, 4), (1, 3, 4, 4))
    """

    def __init__(
        self,
        operation: str,
        bound: Bound,
        prepare: Callable[[PassPlan | None], Run],
        layouts: dict[str, Layout],
        alignment: int,
        backend: Backend,
        impl: str | Plan,
    ) -> None:
        """
        Args:
            operation: key of OPERATIONS.
            bound: the validated call.
            prepare: function that returns the function that runs a plan.
            layouts: layouts of the arrays, keyed by their names in ``Operation.arrays``, and of the
                array for the result as ``out``, if it is passed.
            alignment: largest power of two, up to 16, that divides the arrays' addresses in bytes.
            backend: backend of the arrays' device.
            impl: name or plan from which the plan was chosen.
        """
        self.operation, self.problem, self.shape = operation, bound.problem, bound.shape
        self.plan = bound.planned
        self._bound, self._prepare, self._impl = bound, prepare, impl
        self._backend, self._empty, self._address = backend, backend.empty, backend.address
        self._dtype = arrays.numpy_dtype(bound.problem.dtype)
        result = layouts.get("out", Layout.contiguous(bound.shape, self._dtype))
        self._layouts = {**layouts, "out": result}
        operand_layouts = list(map(layouts.get, _slots(operation)))
        self._described = backends.described(operand_layouts, alignment, backend.ordinal)
        device = () if backend.ordinal is None else (backend.ordinal,)
        self._described_out = (*result, *device)
        # Bytes around the addresses in which the arrays' elements are, by position in Described.
        self._spans = [
            (position, *layout.span)
            for position, layout in zip((0, 1, 3, 4), operand_layouts, strict=True)
            if layout is not None
        ]
        self._out_span = result.span
        # Arrays that the pass cannot read directly are copied in each call.
        on_gpu, add = backend.device.is_gpu, layouts.get("add")
        self._conjugates = bound.problem.is_complex and not OPERATIONS[operation].conjugates
        copies_add = add is not None and not (on_gpu and arrays.have_same_steps(add, result))
        self._copies = bound.extends or (on_gpu and self._conjugates) or copies_add
        self._done_measuring: Callable[[], None] | None = None
        self._is_indirect, self._is_direct = self._copies, on_gpu and not self._copies
        self._swaps = OPERATIONS[operation].is_transposed  # users pass x first
        self._run = prepare(bound.planned)

    def __repr__(self) -> str:
        kernel = "" if self.plan is None else f" with {self.plan.kernel}"
        return f"<Call of {self.operation}{kernel}: {self.problem}>"

    def __call__(
        self, first: Any, second: Any = None, bias: Any = None, *, add: Any = None, out: Any = None
    ) -> Any:
        """Compute the result for arrays of the layouts, dtypes and device of the call.

        Args:
            first, second: operands in the order of the function: x and w for "forward" and
                "transpose", w and dy for "backprop_input", x and dy for "backprop_filter", dy alone
                for "backprop_bias".
            bias, add: as in the function, if the call was bound with them.
            out: array for the result.

        Returns:
            The result; ``out``, if passed.

        Raises:
            ConvError: the arrays have another layout, dtype, device or alignment.
            ConvTypeError: an argument is not an array.
        """
        if self._swaps:
            first, second = second, first
        describe = DESCRIBE.get(first.__class__)
        described = describe and describe(first, second, bias, add, out)
        if described is None or described[0] != self._described:
            return self._call_others(first, second, bias, add, out)
        if out is not None and described[1] != self._described_out:
            return self._call_others(first, second, bias, add, out)
        if out is None and self._is_direct:  # as ``_compute`` does, with a function less
            result = self._empty(self.shape, self._dtype)
            a, b, _, c, d = described[2]
            self._run((a, b, self._address(result), c, d))
            return result
        return self._compute((first, second, bias, add, out), described[2])

    def _compute(
        self, given: Given, addresses: tuple[int, ...], argument_names: ArgumentNames | None = None
    ) -> Any:
        """Return the result for arrays that fit the call.

        Args:
            given: the arrays.
            addresses: their addresses, as in ``backends.Described``; empty on the CPU.
            argument_names: names of the arrays in errors.

        Raises:
            ConvError: ``out`` is read-only or shares memory with an operand.
        """
        first, second, bias, add, out = given
        if out is None:
            result = self._empty(self.shape, self._dtype)
        else:
            result = out
            if not addresses:
                require_writable(self.operation, given, self._backend, argument_names)
            else:
                low, high = addresses[2] + self._out_span[0], addresses[2] + self._out_span[1]
                for position, start, end in self._spans:
                    address = addresses[position]
                    if address + start < high and low < address + end:
                        # Perhaps the addend, which may be ``out`` itself.
                        require_writable(self.operation, given, self._backend, argument_names)
                        break
        if self._is_indirect:
            self._run_indirectly(given, result)
        elif addresses:
            a, b, _, c, d = addresses
            self._run((a, b, self._address(result), c, d))
        else:
            self._run((first, second, bias, add, result))
        return result

    def _run_indirectly(self, given: Given, result: Any) -> None:
        try:
            if self._done_measuring is not None and self._backend.is_capturing():
                self._choose_stored()
            readable = self._readable(given, result)
            if self._done_measuring is not None:
                self._choose(given, readable, result)
            self._execute(self._run, readable, result)
        except BaseException as error:
            # The error's traceback keeps this call's frames, which keep the copies.  Copies made
            # during a graph capture must be freed before the capture ends.
            readable = None
            traceback.clear_frames(error.__traceback__)
            raise

    def _readable(self, given: Given, result: Any) -> tuple[Any, ...]:
        """Return operands, bias and addend, with copies of arrays that the pass cannot read."""
        first, second, bias, add, _ = given
        if self._conjugates:
            conjugate = self._backend.conjugate(first)
            first = first if conjugate is None else conjugate
        if self._bound.extends:
            # output_padding adds windows that have no element of x; they get zeros.
            second = self._backend.extended(second, self.problem.output_shape)
        if add is not None:
            add = self._backend.addend(add, result)
        return first, second, bias, add

    def _execute(self, run: Run, readable: tuple[Any, ...], result: Any) -> None:
        """Run a pass on operands, bias and addend that it can read."""
        if self._address is None:
            run((*readable, result))
            return
        first, second, bias, add = (0 if one is None else self._address(one) for one in readable)
        run((first, second, self._address(result), bias, add))

    @property
    def is_loaded(self) -> bool:
        """Whether the kernels are loaded; True on the CPU."""
        return getattr(self._run, "is_loaded", True)

    def load(self) -> Call:
        """Compile and load the kernels, so that the first call takes no longer than the others.

        Returns:
            The call itself.

        Raises:
            KernelCompileError: a kernel does not compile.

        >>> cupyconv.bind("forward", (1, 2, 4), (3, 2, 3), device="cpu").load().shape
        (1, 3, 2)
        """
        self._require_device(backends.of(self._backend.home))
        _load([self])
        return self

    def fastest(
        self,
        first: Any = None,
        second: Any = None,
        bias: Any = None,
        *,
        add: Any = None,
        out: Any = None,
    ) -> Call:
        """Return the call with the kernels that are fastest on the current GPU.

        The candidates are timed once per GPU, driver and layer; the choice is stored.  On the CPU,
        and if the call was bound with a plan, the result is the call itself.

        Args:
            first, second, bias, add, out: arrays for the measurement, as for a call; ``out`` is
                overwritten.  By default, new arrays are allocated.

        Raises:
            ConvError: a graph is being captured, and the candidates have not been measured.

        >>> call = cupyconv.bind("forward", (1, 2, 4), (3, 2, 3), device="cpu")
        >>> call.fastest() is call  # nothing is measured on the CPU
        True
        """
        if not self.is_measurable:
            return self
        self._require_device(backends.of(self._backend.home))
        changed = copy(self)
        if self._backend.is_capturing():
            changed._choose_stored()
            return changed
        if first is None:
            new = {name: self._backend.like(one) for name, one in self._layouts.items()}
            for array in new.values():
                array.fill(1)
            first, second, bias, add, out = map(new.get, (*_slots(self.operation), "out"))
        elif self._swaps:
            first, second = second, first
        result = self._empty(self.shape, self._dtype) if out is None else out
        given = (first, second, bias, add, out)
        changed._choose(given, self._readable(given, result), result)
        return changed

    @property
    def is_measurable(self) -> bool:
        """Whether there are candidates to time: on a GPU, unless the call was bound with a plan."""
        is_planned = isinstance(self._impl, Plan) or self.plan is None
        return self._backend.device.is_gpu and not is_planned

    def _measure_at_first_run(self, done: Callable[[], None]) -> None:
        """Choose the fastest kernels in the first run, on its arrays, and then call ``done``."""
        self._done_measuring, self._is_indirect, self._is_direct = done, True, False

    def _choose(self, given: Given, readable: tuple[Any, ...], result: Any) -> None:
        """Change the plan to the fastest on these arrays."""
        planned = self._fastest(given, readable, result)
        self.plan, self._run = planned, self._prepare(planned)
        done, self._done_measuring = self._done_measuring, None
        self._is_indirect, self._is_direct = self._copies, not self._copies
        if done is not None:
            done()

    def _fastest(self, given: Given, readable: tuple[Any, ...], result: Any) -> PassPlan:
        """Return the plan that is fastest on arrays of the call; without a result, a stored one."""
        from cupyconv import measuring  # imported for the first measurement

        backend, add = self._backend, given[3]
        run_of = cache(self._prepare)

        def run(planned: PassPlan) -> None:
            self._execute(run_of(planned), readable, result)

        def load(candidates: Sequence[PassPlan]) -> None:
            backend.load(map(run_of, candidates))

        original = None
        if add is not None and result is not None and arrays.are_same(add, result, backend.home):
            # The timed calls overwrite the addend.
            original = backend.empty(result.shape, self._dtype)
            backend.copy(original, result)
        try:
            assert isinstance(self._impl, str)
            assert self._bound.request is not None
            return measuring.fastest(self._bound.request, self._impl, run, load)
        finally:
            if original is not None:
                backend.copy(result, original)

    def _choose_stored(self) -> None:
        """Change the plan to the stored choice, as nothing can be measured in a capture.

        Raises:
            ConvError: no choice is stored.
        """
        self._choose((None,) * 5, (None,) * 4, None)

    @property
    def filter_form(self) -> FilterForm | None:
        """Memory order to which the call copies w; None if its kernels read w itself."""
        assert self._bound.request is not None
        assert self.plan is not None
        return self._backend.filter_form(self._bound.request, self.plan)

    def with_filter(self, w: Any) -> FilterCall:
        """Return the call of this filter, which is copied once to the order that its kernels read.

        Call the result without the filter: ``call(x, bias)`` for "forward" and "transpose",
        ``call(dy)`` for "backprop_input".  It refers to w; do not change w while it is in use.

        Args:
            w: filter with the layout of the call's filter.

        Raises:
            ConvError: the call reads no filter, w has another layout, or a graph is being captured.

        >>> w, x = np.ones((3, 2, 3), "float32"), np.ones((1, 2, 4), "float32")
        >>> cupyconv.bind("forward", x, w).with_filter(w)(x).shape
        (1, 3, 2)
        """
        if "w" not in OPERATIONS[self.operation].arrays:
            raise ConvError(
                "only a call that reads a filter can be bound to one",
                f"the call computes {self.operation}",
                "Bind 'forward', 'backprop_input' or 'transpose'",
            )
        (array,), backend = operands.take(("w",), (w,))
        self._require_device(backend)
        self._require_layout("w", array)
        require_no_capture(backend, "Call.with_filter")
        result = copy(self)
        result.__class__ = FilterCall
        assert isinstance(result, FilterCall)
        result.filter = array
        form = self.filter_form
        if form is not None and not self._conjugates:
            forms = {form.name: backend.arrange(form, array)}
            result._prepare = _preparer(self.operation, self._bound, backend, forms)
            result._run = result._prepare(self.plan)
        return result

    def _call_others(self, *given: Any) -> Any:
        """Call with arrays that were not recognised: of another library, or of another layout."""
        names = _slots(self.operation)
        present = {
            name: array
            for name, array in zip(names, given, strict=False)
            if name and (array is not None or name in self._layouts)
        }
        taken, backend = operands.take(tuple(present), tuple(present.values()))
        self._require_device(backend)
        converted = dict(zip(present, taken, strict=True))
        out = given[4]
        result = None if out is None else operands.take_out("out", out, backend)
        for name in dict.fromkeys((*self._layouts, *converted)):
            if name != "out":
                self._require_layout(name, converted.get(name))
        if result is not None:
            self._require_layout("out", result)
        first, second, bias, add = map(converted.get, names)
        described = DESCRIBE[type(first)](first, second, bias, add, result)
        assert described is not None
        self._require_alignment(described[0])
        computed = self._compute((first, second, bias, add, result), described[2])
        return computed if out is None or out is result else operands.written_to(out)

    def _require_device(self, backend: Backend) -> None:
        """Check that ``backend``, of the current device, is the backend of the call."""
        places = [(one.home, one.ordinal) for one in (backend, self._backend)]
        if places[0] != places[1]:
            texts = [home.value if n is None else f"GPU {n}" for home, n in places]
            raise ConvError(
                "a bound call must run on the device for which it was bound",
                f"it was bound for {texts[1]}, and is used for {texts[0]}",
                "Bind a call for this device, or call the function, such as cupyconv.conv_forward",
            )

    def _require_layout(self, name: str, array: Any) -> None:
        """Check that an array of the call has the layout of the call."""
        expected = self._layouts.get(name)
        if array is not None and expected is not None and expected.fits(array):
            return
        texts = []
        for one in (array, expected):
            if one is None:
                texts.append(f"no {name}")
                continue
            strides = "" if one.shape == () else f" with strides of {one.strides} bytes"
            texts.append(f"{shape_text(one.shape) or 'a scalar'} {one.dtype}{strides}")
        raise ConvError(
            "a bound call takes arrays of the layout with which it was bound",
            f"{name}: got {texts[0]}, bound with {texts[1]}",
            "Bind a call for these arrays, or call the function, such as cupyconv.conv_forward",
        )

    def _require_alignment(self, layouts: tuple[Any, ...]) -> None:
        if self._backend.ordinal is not None and layouts[-2] < self._described[-2]:
            raise ConvError(
                "a bound call takes arrays of the alignment with which it was bound",
                f"the addresses are multiples of {layouts[-2]} bytes, the call was bound with "
                f"multiples of {self._described[-2]}",
                "Bind a call for these arrays, or pass copies of them",
            )


class FilterCall(Call):
    """A call of one filter, from ``Call.with_filter``.

    Attributes:
        filter: the filter.

    >>> x, w = np.ones((1, 2, 4, 4)), np.ones((3, 2, 3, 3))
    >>> call = cupyconv.bind("forward", x, w).with_filter(w)
    >>> call(x).shape
    (1, 3, 2, 2)
    """

    filter: Any

    def __call__(  # type: ignore[override]  # the filter is not an argument
        self, first: Any, bias: Any = None, *, add: Any = None, out: Any = None
    ) -> Any:
        """Compute the result; arguments are as for ``Call``, without the filter."""
        if self.operation == "backprop_input":
            return Call.__call__(self, self.filter, first, bias, add=add, out=out)
        return Call.__call__(self, first, self.filter, bias, add=add, out=out)


def _load(calls: Iterable[Call]) -> None:
    """Load the kernels of several calls on one device, compiling missing kernels in parallel."""
    new = [call for call in calls if not call.is_loaded]
    if new:
        new[0]._backend.load([call._run for call in new])


def run_together(found: Sequence[tuple[Call, Given, tuple[int, ...]]]) -> list[Any]:
    """Return the results of several calls that ``compute`` deferred, after loading all kernels."""
    _load(call for call, _, _ in found)
    return [call._compute(given, addresses) for call, given, addresses in found]


def forget() -> None:
    """Forget all calls of this process, except those of prepared filters."""
    _calls.clear()


# -- finding calls ---------------------------------------------------------------------------------


def compute(
    operation: str,
    first: Any,
    second: Any,
    bias: Any,
    add: Any,
    out: Any,
    options: tuple[Any, ...],
    argument_names: ArgumentNames | None = None,
    measure: bool | None = None,
    deferred: bool = False,
) -> Any:
    """Run an operation, for this library's functions and interfaces such as ``raw_ops``.

    Most calls repeat an earlier call with other data.  To keep the Python code of such a call
    short, everything slow happens in ``_new_call``, and the call is remembered.

    Args:
        operation: key of OPERATIONS.
        first, second: operands, in the order of ``Operation.arrays``; second is None if there is
            only one.
        bias, add, out: as for ``conv_forward``.
        options: fields of an Options.
        argument_names: names of the arrays in errors; by default those of the public functions.
        measure: whether to time the candidate kernels on a GPU and use the fastest; by default
            ``cupyconv.benchmark``.
        deferred: whether to return the call, its arrays and their addresses, for ``run_together``,
            instead of the result.
    """
    calls, prepared = _calls, None
    if second.__class__ is PreparedFilter and operation == "forward":
        prepared, second, calls = second, second.array, second.calls
    elif first.__class__ is PreparedFilter and OPERATIONS[operation].arrays[0] == "w":
        prepared, first, calls = first, first.array, first.calls
    describe = DESCRIBE.get(first.__class__)
    described = describe and describe(first, second, bias, add, out)
    given = (first, second, bias, add, out)
    if described is None:
        how = argument_names or ARGUMENT_NAMES[operation], measure, deferred
        return _compute_converted(operation, given, options, *how, prepared)
    layouts, out_layout, addresses = described
    kinds = tuple(map(type, options))
    if tuple in kinds:
        kinds = _types(options)
    limit = settings.workspace_limit
    measure = bool(settings.benchmark) if measure is None else measure
    key = (operation, options, kinds, layouts, out_layout, measure, limit, limit.__class__)
    try:
        call = calls.get(key)
    except TypeError:  # an argument is not hashable, such as a list
        call = None
    if call is None:
        call = _new_call(calls, key, given, argument_names or ARGUMENT_NAMES[operation], prepared)
    return (call, given, addresses) if deferred else call._compute(given, addresses, argument_names)


def _types(options: tuple[Any, ...]) -> tuple[type, ...]:
    """Return the types of values, and of the items of tuples.

    In the key of a call, these types distinguish True, which is rejected, from 1, which equals it.
    """
    values = list(options)
    for value in values:
        if type(value) is tuple:
            values += value
    return tuple(map(type, values))


def _compute_converted(
    operation: str,
    given: Given,
    options: tuple[Any, ...],
    argument_names: ArgumentNames,
    measure: bool | None,
    deferred: bool,
    prepared: PreparedFilter[Any] | None,
) -> Any:
    """Run ``compute`` with the arguments converted to NumPy or CuPy arrays."""
    present, out = _present(operation, given), given[4]
    names = binding.error_names(operation, argument_names)
    given_names = tuple(names[name] for name in present)
    taken, backend = operands.take(given_names, tuple(present.values()))
    converted = dict(zip(present, taken, strict=True))
    result = None if out is None else operands.take_out(argument_names.out, out, backend)
    if prepared is not None:
        converted["w"] = prepared
    first, second, bias, add = map(converted.get, _slots(operation))
    how = options, argument_names, measure, deferred
    found = compute(operation, first, second, bias, add, result, *how)
    return found if deferred or out is None else operands.written_to(out)


def _slots(operation: str) -> tuple[str, ...]:
    """Return the names of first and second operand, bias and addend; "" for a missing operand."""
    first, second = (*OPERATIONS[operation].arrays, "")[:2]
    return first, second, "bias", "add"


def _present(operation: str, given: Given) -> dict[str, Any]:
    """Return the arrays of a call without ``out``, keyed by their names in ``Operation.arrays``."""
    return {
        name: array
        for name, array in zip(_slots(operation), given, strict=False)
        if name and (array is not None or name not in ("bias", "add"))
    }


def _new_call(
    calls: dict[Any, Call],
    key: tuple[Any, ...],
    given: Given,
    argument_names: ArgumentNames,
    prepared: PreparedFilter[Any] | None,
) -> Call:
    """Validate and plan a call, and remember it.

    Args:
        calls: dictionary that remembers the call.
        key: the call's key, as ``compute`` makes it.
        given: NumPy or CuPy arrays.
        argument_names, prepared: as in ``compute``.
    """
    operation, options, kinds, layouts, *_ = key
    measure, limit, limit_kind = key[5:]
    can_keep = _is_immutable(limit_kind)
    is_kept = can_keep and all(map(_is_immutable, kinds))
    if can_keep and not is_kept:
        frozen = tuple(map(_frozen, options))
        frozen_kinds = _types(frozen)
        if all(map(_is_immutable, frozen_kinds)):
            # An error below shows the lists, as the user wrote them.
            with suppress(ConvError, ConvTypeError):
                other = (operation, frozen, frozen_kinds, *key[3:])
                return calls.get(other) or _new_call(calls, other, given, argument_names, prepared)
    present, names = _present(operation, given), binding.error_names(operation, argument_names)
    backend = backends.of(arrays.take(names[next(iter(present))], given[0])[1])
    if backend.ordinal is not None:
        error_names = [names[name] for name in present]
        operands.require_current_device(error_names, tuple(present.values()), backend.ordinal)
    described = {name: Layout.of(array) for name, array in present.items()}
    if given[4] is not None:
        require_writable(operation, given, backend, argument_names)
        described["out"] = Layout.of(given[4])
    alignment = backends.ALIGNMENT if backend.address is None else layouts[-2]
    every = Options._make(options)
    call = _make(operation, described, every, alignment, backend, limit, argument_names, prepared)

    def remember() -> None:
        if is_kept:
            if len(calls) >= MOST_CALLS:
                calls.clear()
            calls[key] = call

    if measure and call.is_measurable:
        call._measure_at_first_run(remember)
        if backend.is_capturing():
            call._choose_stored()
    else:
        remember()
    return call


def _is_immutable(kind: type) -> bool:
    """Return whether values of a type, an option's or an item's, can be part of a key."""
    return kind in _IMMUTABLE or issubclass(kind, Integral)


_IMMUTABLE = (int, str, type(None), tuple, Plan)


def _frozen(value: Any, depth: int = 3) -> Any:
    """Return a value with its lists and special tuples replaced by tuples, down to a depth."""
    if depth and isinstance(value, list | tuple):
        return tuple([_frozen(item, depth - 1) for item in value])
    return value


def _make(
    operation: str,
    layouts: dict[str, Layout],
    options: Options,
    alignment: int,
    backend: Backend,
    workspace_limit: int | None,
    argument_names: ArgumentNames,
    prepared: PreparedFilter[Any] | None = None,
) -> Call:
    """Validate and plan a call; arguments are as for ``binding.bound``."""
    place = alignment, backend.device, workspace_limit, argument_names
    if operation == "backprop_bias":
        bound, strides = binding.bound_sum(layouts, options.data_format, *place)
        run = backend.prepare_bias(bound.problem, strides, workspace_limit)
        return Call(operation, bound, lambda _: run, layouts, alignment, backend, options.impl)
    require = None if prepared is None else partial(require_use, prepared)
    bound = binding.bound(operation, layouts, options, *place, require)
    forms = {} if prepared is None else prepared.forms
    if bound.problem.is_complex and not OPERATIONS[operation].conjugates:
        forms = {}  # the pass gets the conjugate of w
    prepare = _preparer(operation, bound, backend, forms)
    return Call(operation, bound, prepare, layouts, alignment, backend, options.impl)


def _preparer(
    operation: str, bound: Bound, backend: Backend, forms: Mapping[str, Any]
) -> Callable[[Any], Run]:
    """Return the function that returns the function that runs a plan.

    Args:
        operation, bound, backend: as for ``Call``.
        forms: copies of w that the plans read instead of w, keyed by the name of their order.
    """
    of, request = OPERATIONS[operation], bound.request
    assert request is not None

    def prepare(planned: PassPlan) -> Run:
        form = backend.filter_form(request, planned) if forms else None
        copied = None
        if form is not None and form.name in forms:
            copied = form, forms[form.name].data
        return backend.prepare(request, planned, of.roles, bound.epilogue, copied, of.conjugates)

    return prepare


def require_writable(
    operation: str, given: Given, backend: Backend, argument_names: ArgumentNames | None = None
) -> None:
    """Check that ``out`` is writable and shares no memory with operands, or is the addend itself.

    Raises:
        ConvError: it is read-only or shares memory.
        ConvTypeError: it is on another device.
    """
    argument_names = argument_names or ARGUMENT_NAMES[operation]
    names, present = binding.error_names(operation, argument_names), _present(operation, given)
    add, out = present.pop("add", None), given[4]
    inputs = {names[name]: array for name, array in present.items()}
    operands.take_out(argument_names.out, out, backend)
    operands.require_apart(argument_names.out, out, inputs, backend.home)
    if add is not None:
        operands.require_add_apart(names["add"], add, argument_names.out, out, backend.home)


def require_no_capture(backend: Backend, function: str) -> None:
    """Check that the current stream captures no graph, before ``function`` copies a filter.

    Raises:
        ConvError: it does.
    """
    if backend.is_capturing():
        raise ConvError(
            "a filter must be prepared before a graph is captured",
            "the current stream is capturing a graph, which copies the filter only when launched",
            f"Call {function} before the capture, and keep its result while the graph exists",
        )


# -- binding ---------------------------------------------------------------------------------------


def bind(
    operation: str,
    *given: Any,
    add: Any = None,
    out: Any = None,
    stride: Size = 1,
    padding: Padding = 0,
    dilation: Size = 1,
    groups: int = 1,
    data_format: DataFormat | None = None,
    filter_format: FilterFormat | None = None,
    activation: Activation | None = None,
    output_shape: Iterable[int] | None = None,
    output_padding: Size | None = None,
    precision: Precision = "ieee",
    impl: Impl | Plan = "auto",
    dtype: str = "float32",
    device: str | None = None,
) -> Call:
    """Validate and plan a convolution once, for many calls with arrays of the same layout.

    A bound call costs less host time than the function, and shows its plan.  The arguments are
    those of the function, with arrays or with their shapes.

    Args:
        operation: "forward", "backprop_input", "backprop_filter", "backprop_bias" or "transpose".
        given: arguments of ``conv_forward``, ``conv_backprop_input``, ``conv_backprop_filter``,
            ``conv_backprop_bias`` or ``conv_transpose``, in their order.  A shape in place of an
            array stands for a contiguous, aligned array.
        add, out: array or shape, as for ``conv_forward``.  Without ``out``, the call may still get
            one that is contiguous.
        stride, padding, dilation, groups, data_format, filter_format, activation, precision, impl:
            as for ``conv_forward``.
        output_shape, output_padding: as for ``conv_transpose``.
        dtype: dtype of the arrays, if all are passed as shapes.
        device: "cpu" to bind shapes for NumPy arrays; by default they are bound for CuPy arrays on
            the current GPU, or for NumPy arrays if there is no GPU.

    Returns:
        The Call; call it with the arrays, without the shapes.

    Raises:
        ConvError, ConvTypeError, DeviceError: as for the function.

    >>> shapes = (1, 2, 4, 4), (3, 2, 3, 3), (1, 3, 2, 2)
    >>> call = cupyconv.bind("backprop_input", *shapes, device="cpu")
    >>> call.problem.stride, call.shape
    ((1, 1), (1, 2, 4, 4))
    >>> w, dy = np.ones((3, 2, 3, 3), "float32"), np.ones((1, 3, 2, 2), "float32")
    >>> call(w, dy)[0, 0, 0].tolist()
    [3.0, 6.0, 6.0, 3.0]
    """
    require_word("operation", operation, tuple(_ARGUMENTS))
    names, of = _ARGUMENTS[operation], OPERATIONS[operation]
    needed = len(names) - names.count("bias")
    if not needed <= len(given) <= len(names):
        raise ConvTypeError(
            f"bind({operation!r}) takes {', '.join(names)}: got {counted(len(given), 'argument')}"
        )
    present = dict(zip(names, given, strict=False)) | {"add": add, "out": out}
    present = {name: value for name, value in present.items() if value is not None}
    shape: Any = next((present.pop(name) for name in of.sizes if name in present), None)
    if of.is_transposed:
        shape = (output_shape, output_padding)
    elif activation is not None and "bias" not in of.arrays:
        raise ConvError(
            "a gradient must have no activation",
            f"got activation {shown(activation)} for {operation!r}",
            "Multiply dy by the activation's derivative",
        )
    options = Options(
        *(shape, stride, padding, dilation, groups, data_format, filter_format),
        *(activation, precision, impl),
    )
    if not any(isinstance(value, list | tuple) for value in present.values()):
        if isinstance(present.get("w"), PreparedFilter):
            raise ConvTypeError(
                "a call is bound to an array: w is a PreparedFilter. "
                "Pass the filter itself, and then use Call.with_filter"
            )
        first, second, bias, _ = map(present.get, _slots(operation))
        return compute(operation, first, second, bias, add, out, tuple(options), deferred=True)[0]
    kind, layouts = arrays.numpy_dtype(dtype_name(dtype)), {}
    for name, value in present.items():
        if not isinstance(value, list | tuple):
            raise ConvTypeError(
                f"bind takes arrays or shapes, not both: {name} is an array. Pass its shape"
            )
        layouts[name] = Layout.contiguous(integers(name, value), kind)
    require_word("device", device, (None, CPU.name))
    on_cpu = device is not None or not arrays.device_count()
    backend = backends.of(arrays.Home.CPU if on_cpu else arrays.Home.GPU)
    place = backends.ALIGNMENT, backend, settings.workspace_limit
    return _make(operation, layouts, options, *place, ARGUMENT_NAMES[operation])


_ARGUMENTS = {
    "forward": ("x", "w", "bias"),
    "backprop_input": ("input_shape", "w", "dy"),
    "backprop_filter": ("x", "filter_shape", "dy"),
    "backprop_bias": ("dy",),
    "transpose": ("x", "w", "bias"),
}
"""Arguments of ``bind``, keyed by operation."""


def of_problem(
    pass_: str,
    problem: ConvProblem,
    backend: Backend,
    impl: str | Plan,
    precision: str,
    workspace_limit: int | None,
    w: Any = None,
) -> Call:
    """Return the call of a pass for contiguous, aligned arrays, except ``w`` if it is passed."""
    shapes = {"x": problem.input_shape, "w": problem.filter_shape, "dy": problem.output_shape}
    kind, of = arrays.numpy_dtype(problem.dtype), OPERATIONS[pass_]
    layouts = {name: Layout.contiguous(shapes[name], kind) for name in of.arrays if name in shapes}
    alignment = backends.ALIGNMENT
    if w is not None:
        layouts["w"] = Layout.of(w)
        if backend.address is not None:
            address = backend.address(w) | alignment
            alignment = address & -address
    shape = next((getattr(problem, name) for name in of.sizes), None)
    options = Options(shape, *problem.options, None, precision, impl)
    place = alignment, backend, workspace_limit
    return _make(pass_, layouts, options, *place, ARGUMENT_NAMES[pass_])
