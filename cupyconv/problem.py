"""Configuration of a convolution, and all rules about its shapes, sizes and channels.

Letters, as in the literature: N is the batch size, C the number of input channels, K the number of
output channels and G the number of groups.  The spatial axes are D, H, W for the input, T, R, S for
the filter and Z, P, Q for the output.  All convolutions are cross-correlations (no filter flip), as
in every framework.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import product
from math import gcd, prod
from typing import Any, Literal, NamedTuple, Protocol, TypedDict, TypeVar, Unpack, cast

from cupyconv import formats
from cupyconv.errors import (
    OWNERS,
    ConvError,
    ConvTypeError,
    Fix,
    Names,
    Phrase,
    naming_arguments,
    require_word,
    shortened,
    shown,
    unknown_word,
)
from cupyconv.formats import DataFormat, FilterFormat

_T = TypeVar("_T")

PASSES = ("forward", "backprop_input", "backprop_filter")
"""The passes of a layer, which compute y, the input gradient dx and the filter gradient dw."""

RESULT = {"forward": "y", "backprop_input": "dx", "backprop_filter": "dw"}
"""Name of the tensor that a pass computes, keyed by pass."""

DtypeName = Literal["float16", "bfloat16", "float32", "float64", "complex64", "complex128"]
"""Names of the supported dtypes, for type checkers."""

REAL_PART: Mapping[str, DtypeName] = {"complex64": "float32", "complex128": "float64"}
"""Dtype of the real and imaginary parts, keyed by complex dtype."""

REAL_ITEMSIZE: Mapping[str, int] = {"float16": 2, "bfloat16": 2, "float32": 4, "float64": 8}
"""Bytes per element, keyed by real dtype."""

ITEMSIZE: Mapping[str, int] = {**REAL_ITEMSIZE, "complex64": 8, "complex128": 16}
"""Bytes per element, keyed by supported dtype."""

PADDING_WORDS = ("valid", "same", "same_lower")

LARGEST = 2**63 - 1
"""Largest absolute value of an integer in a configuration: the largest signed 64-bit integer."""

MOST_LISTED = 100_000
"""Largest number of stride phases, terms, positions or layers that are listed one by one
(hand-set)."""

PaddingWord = Literal["valid", "same", "same_lower", "VALID", "SAME", "SAME_LOWER"]
"""Names of padding modes, for type checkers; at run time, case does not matter."""

Size = int | Sequence[int]
Padding = PaddingWord | int | Sequence[int | Sequence[int]]


class _NamedDtype(Protocol):
    """Protocol of NumPy dtypes: objects with a name."""

    @property
    def name(self) -> str: ...


Dtype = DtypeName | type[Any] | _NamedDtype
"""A dtype name, a NumPy dtype, or a scalar type such as ``numpy.float32``."""


class Rules(TypedDict, total=False):
    """Keyword arguments that describe a layer, with their types."""

    stride: Size
    padding: Padding
    dilation: Size
    groups: int
    data_format: DataFormat | None
    filter_format: FilterFormat | None


class _Changes(Rules, total=False):
    input_shape: Iterable[int]
    filter_shape: Iterable[int]
    dtype: Dtype


class ConvOptions(NamedTuple):
    """Stride, padding, dilation, groups and formats of a layer.

    The values have the form in which the user passed them, or that of ConvProblem's attributes.
    """

    stride: Any = 1
    padding: Any = 0
    dilation: Any = 1
    groups: Any = 1
    data_format: Any = None
    filter_format: Any = None


class GemmView(NamedTuple):
    """One pass as matrix products, one per group: (gemm_m, gemm_k) by (gemm_k, gemm_n) each."""

    gemm_m: int
    gemm_n: int
    gemm_k: int
    groups: int


TRANSPOSED = Names(x="the result", y="x", x_shape="output_shape")
"""Names that messages use for the tensors of a transposed convolution."""


@dataclass(frozen=True)
class ConvAxis:
    """One spatial axis of a convolution: its sizes, stride, dilation and padding.

    Output o reads input ``o * stride - pad_before + r * dilation`` for tap r, or zero if that
    position is outside the input.

    Attributes:
        name: "D", "H" or "W".
        input, filter: number of inputs and of taps.
        stride, dilation: distance in inputs from one window to the next, and from one tap to the
            next.
        pad_before, pad_after: number of zeros before and after the input.
        padding_mode: "same", "same_lower", "valid" or "explicit".

    >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
    >>> axis = problem.axes[0]
    >>> axis.name, axis.formula, axis.valid_input_sizes
    ('H', 'floor((7 + 0 + 0 - 3)/2) + 1 = 3', range(7, 9))
    >>> axis.effective_filter, axis.padded_input, axis.output, axis.unread_after
    (3, 7, 3, 0)
    """

    name: str
    input: int
    filter: int
    stride: int
    dilation: int
    pad_before: int
    pad_after: int
    padding_mode: str

    @property
    def effective_filter(self) -> int:
        """Length of a window, from its first to its last tap: (filter - 1) * dilation + 1."""
        return (self.filter - 1) * self.dilation + 1

    @property
    def padded_input(self) -> int:
        """Input size plus the padding on both sides."""
        return self.input + self.pad_before + self.pad_after

    @property
    def output(self) -> int:
        """Output size: ceil(input / stride) for SAME, else the number of windows that fit."""
        if self.padding_mode.startswith("same"):
            return -(-self.input // self.stride)
        return (self.padded_input - self.effective_filter) // self.stride + 1

    @property
    def formula(self) -> str:
        """The formula of the output size as text, with this axis's values and the result."""
        if self.padding_mode.startswith("same"):
            return f"ceil({self.input}/{self.stride}) = {self.output}"
        numbers = f"{self.input} + {self.pad_before} + {self.pad_after} - {self.effective_filter}"
        return f"floor(({numbers})/{self.stride}) + 1 = {self.output}"

    def input_sizes_for(self, output: int) -> range:
        """Return the input sizes whose output size is ``output``: ``stride`` consecutive integers.

        The smallest is (output - 1) * stride + 1 for SAME, else (output - 1) * stride +
        effective_filter - pad_before - pad_after.  Sizes below 1 are left out.  The range is empty
        if ``output`` is below 1.

        >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
        >>> problem.axes[0].input_sizes_for(3)
        range(7, 9)
        """
        if output < 1:
            return range(0)
        first = self.first_input_size_for(output)
        return range(max(first, 1), max(first + self.stride, 1))

    def first_input_size_for(self, output: int) -> int:
        """Return the smallest input size with this output size.

        The result is below 1 if the padding alone is long enough for all windows.

        >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
        >>> problem.axes[0].first_input_size_for(3)
        7
        """
        first = (output - 1) * self.stride + 1
        if not self.padding_mode.startswith("same"):
            first += self.effective_filter - 1 - self.pad_before - self.pad_after
        return first

    @property
    def valid_input_sizes(self) -> range:
        """All input sizes that have this axis's output size, including ``input``."""
        return self.input_sizes_for(self.output)

    def of_input(self, size: int) -> ConvAxis:
        """Return this axis with another input size; SAME padding is computed for that size.

        >>> problem = cupyconv.ConvProblem((1, 2, 7), (4, 2, 3), stride=2, padding="same")
        >>> axis = problem.axes[0].of_input(8)
        >>> axis.pad_before, axis.pad_after, axis.output
        (0, 1, 4)
        """
        before, after = self.pad_before, self.pad_after
        if self.padding_mode.startswith("same"):
            rule = self.filter, self.stride, self.dilation
            before, after = _same_padding(self.padding_mode, size, *rule)
        return replace(self, input=size, pad_before=before, pad_after=after)

    @property
    def unread_after(self) -> int:
        """Number of inputs after the last window; their gradient is zero."""
        last_read = (self.output - 1) * self.stride + self.effective_filter - 1 - self.pad_before
        return min(max(self.input - 1 - last_read, 0), self.input)

    @property
    def pairs(self) -> int:
        """Number of pairs of an output and a tap that read an input instead of padding."""
        return self._count_pairs(self.output, self.filter, self.pad_before)

    def _count_pairs(self, outputs: int, taps: int, low: int) -> int:
        """Return how many of these pairs read an input; input 0 has the position ``low``."""
        return count_pairs(outputs, taps, self.stride, self.dilation, low, low + self.input)

    @property
    def unread_inputs(self) -> int:
        """Number of inputs that no tap reads: between taps, between windows or at the end."""
        # The pairs (output o, tap r) and (o + across, r - along) read the same input; the second is
        # the neighbour of the first.  Of the pairs that read the same input, exactly one has no
        # neighbour.  So there are as many pairs without a neighbour as inputs that are read.
        common = gcd(self.stride, self.dilation)
        across, along = self.dilation // common, self.stride // common
        low = self.pad_before - along * self.dilation
        repeated = self._count_pairs(self.output - across, self.filter - along, low)
        return self.input - (self.pairs - repeated)

    @property
    def stride_phases(self) -> tuple[tuple[range, range], ...]:
        """The inputs and the taps of each stride phase; there are ``stride`` phases.

        Phase f has the inputs h with (h + pad_before) mod stride = f.  Only the taps r with
        r * dilation mod stride = f read these inputs.

        Raises:
            ConvError: the axis has more than MOST_LISTED phases.
        """
        _require_listable(self.stride)
        phases = range(self.stride)
        return tuple((self.inputs_of_phase(phase), self.taps_of_phase(phase)) for phase in phases)

    def inputs_of_phase(self, phase: int) -> range:
        """Return the inputs of one stride phase.

        >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
        >>> list(problem.axes[0].inputs_of_phase(1))
        [1, 3, 5]
        """
        return range((phase - self.pad_before) % self.stride, self.input, self.stride)

    def taps_of_phase(self, phase: int) -> range:
        """Return the taps of one stride phase.

        >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
        >>> axis = problem.axes[0]
        >>> list(axis.taps_of_phase(0)), list(axis.taps_of_phase(1))
        ([0, 2], [1])
        """
        common = gcd(self.stride, self.dilation)
        step = self.stride // common
        if phase % common:
            return range(self.filter, self.filter, step)
        first = phase // common * pow(self.dilation // common, -1, step) % step
        return range(first, self.filter, step)

    def outputs_of_phase(self, inputs: range, taps: range) -> tuple[int, int]:
        """Return the outputs that read the first input of a stride phase.

        Output (h + pad_before - r * dilation) / stride reads input h with tap r.  From one tap of
        the phase to the next, this output decreases by a constant distance.  From one input of the
        phase to the next, this output increases by 1.

        Args:
            inputs, taps: inputs and taps of the phase.

        Returns:
            The output of the last tap, which may be outside the axis, and the distance.

        >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
        >>> axis = problem.axes[0]
        >>> axis.outputs_of_phase(axis.inputs_of_phase(0), axis.taps_of_phase(0))
        (-1, 1)
        """
        last = taps[-1] if taps else 0
        first = (inputs.start + self.pad_before - last * self.dilation) // self.stride
        return first, taps.step * self.dilation // self.stride

    def outputs_of_tap(self, tap: int) -> range:
        """Return the outputs for which tap number ``tap`` reads the input, not padding.

        >>> problem = cupyconv.ConvProblem((1, 2, 5), (4, 2, 3), padding=1)
        >>> [list(problem.axes[0].outputs_of_tap(tap)) for tap in range(3)]
        [[1, 2, 3, 4], [0, 1, 2, 3, 4], [0, 1, 2, 3]]
        """
        shift = tap * self.dilation - self.pad_before
        first = max(-(-(0 - shift) // self.stride), 0)
        last = min((self.input - 1 - shift) // self.stride, self.output - 1)
        return range(first, max(last + 1, first))

    def inputs_of_tap(self, tap: int) -> range:
        """Return the inputs that tap number ``tap`` reads, one per output of ``outputs_of_tap``.

        >>> problem = cupyconv.ConvProblem((1, 2, 5), (4, 2, 3), padding=1)
        >>> [list(problem.axes[0].inputs_of_tap(tap)) for tap in range(3)]
        [[0, 1, 2, 3], [0, 1, 2, 3, 4], [1, 2, 3, 4]]
        """
        outputs = self.outputs_of_tap(tap)
        first = outputs.start * self.stride - self.pad_before + tap * self.dilation
        return range(first, first + len(outputs) * self.stride, self.stride)


@dataclass(frozen=True, init=False, repr=False)
class ConvProblem:
    """Configuration of a convolution, with the shapes, sizes and costs that follow from it.

    Args:
        input_shape: shape of x, in ``data_format`` order; the batch size may be 0.
        filter_shape: shape of w, in ``filter_format`` order; the size of its I axis is C / groups.
        stride: step between windows; an int, or an int per spatial axis.
        dilation: distance between neighbouring taps; an int, or an int per spatial axis.
        padding: an int, an int per spatial axis, a (before, after) pair per spatial axis,
            "valid" (no padding), "same" (TensorFlow's SAME and ONNX's SAME_UPPER: an odd total has
            one more after than before) or "same_lower" (one more before than after).
        groups: number of independent convolutions into which C and K are split; C for a depthwise
            convolution.
        data_format: one of NCW NWC NCHW NHWC NCDHW NDHWC, "channels_first" or "channels_last";
            channels first by default.
        filter_format: OI + spatial, spatial + IO, or O + spatial + I, with the spatial letters of
            ``data_format``; by default OI + spatial for channels first and spatial + IO for
            channels last.
        dtype: "float16", "bfloat16", "float32", "float64", "complex64" or "complex128", or the
            NumPy dtype of that name.

    Attributes:
        padding: (before, after) per spatial axis, for every form of the argument.
        padding_mode: "same", "same_lower", "valid" or "explicit".

    Raises:
        ConvError: the convolution is invalid; the message states the rule and the values, and
            suggests fixes.
        ConvTypeError: an argument has a type that is not described above.

    >>> problem = cupyconv.ConvProblem((1, 5, 100, 100), (10, 5, 5, 5), stride=2)
    >>> problem.output_shape, problem.bias_shape, problem.valid_input_sizes
    ((1, 10, 48, 48), (10,), (range(99, 101), range(99, 101)))
    >>> problem.flops, problem.bytes
    (5760000, 297160)
    """

    input_shape: tuple[int, ...]
    filter_shape: tuple[int, ...]
    stride: tuple[int, ...]
    padding: tuple[tuple[int, int], ...]
    dilation: tuple[int, ...]
    groups: int
    data_format: DataFormat
    filter_format: FilterFormat
    dtype: DtypeName
    padding_mode: str

    @naming_arguments
    def __init__(
        self,
        input_shape: Iterable[int],
        filter_shape: Iterable[int],
        *,
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        groups: int = 1,
        data_format: DataFormat | None = None,
        filter_format: FilterFormat | None = None,
        dtype: Dtype = "float32",
    ) -> None:
        options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
        shapes = {"input_shape": input_shape, "filter_shape": filter_shape}
        arguments = {**shapes, **options._asdict(), "dtype": dtype}
        problem = offering(partial(named_problem, Names()), Names(), arguments)
        vars(self).update(vars(problem))

    # -- sizes ------------------------------------------------------------------------------

    @property
    def spatial_rank(self) -> int:
        """Number of spatial axes: 1, 2 or 3."""
        return len(self.input_shape) - 2

    @cached_property
    def data_axes(self) -> tuple[int, ...]:
        """Positions of N, C and the spatial axes in x, y and their gradients."""
        return formats.data_axes(self.data_format)

    @cached_property
    def filter_axes(self) -> tuple[int, ...]:
        """Positions of O, I and the spatial axes in w and its gradient."""
        return formats.filter_axes(self.filter_format)

    @cached_property
    def N(self) -> int:
        """Batch size."""
        return self.input_shape[self.data_axes[0]]

    @cached_property
    def C(self) -> int:
        """Number of input channels of all groups together."""
        return self.input_shape[self.data_axes[1]]

    @cached_property
    def K(self) -> int:
        """Number of output channels of all groups together."""
        return self.filter_shape[self.filter_axes[0]]

    @property
    def G(self) -> int:
        """Number of groups."""
        return self.groups

    @cached_property
    def input_sizes(self) -> tuple[int, ...]:
        """Spatial sizes of x: (W,), (H, W) or (D, H, W)."""
        return tuple(self.input_shape[axis] for axis in self.data_axes[2:])

    @cached_property
    def filter_sizes(self) -> tuple[int, ...]:
        """Spatial sizes of w: (S,), (R, S) or (T, R, S)."""
        return tuple(self.filter_shape[axis] for axis in self.filter_axes[2:])

    @cached_property
    def output_sizes(self) -> tuple[int, ...]:
        """Spatial sizes of y: (Q,), (P, Q) or (Z, P, Q)."""
        return tuple(axis.output for axis in self.axes)

    @cached_property
    def axes(self) -> tuple[ConvAxis, ...]:
        """The spatial axes, each with its sizes, stride, dilation and padding."""
        names = formats.SPATIAL_AXES[self.spatial_rank]
        rules = (self.input_sizes, self.filter_sizes, self.stride, self.dilation)
        return tuple(
            ConvAxis(name, size, taps, stride, dilation, before, after, self.padding_mode)
            for name, (before, after), size, taps, stride, dilation in zip(
                names, self.padding, *rules, strict=True
            )
        )

    @cached_property
    def output_shape(self) -> tuple[int, ...]:
        """Shape of y and of dy, in ``data_format`` order."""
        return formats.ordered(self.data_axes, (self.N, self.K, *self.output_sizes))

    @property
    def input_gradient_shape(self) -> tuple[int, ...]:
        """Shape of dx, which has one partial derivative per element of x: the shape of x."""
        return self.input_shape

    @property
    def filter_gradient_shape(self) -> tuple[int, ...]:
        """Shape of dw, which has one partial derivative per element of w: the shape of w."""
        return self.filter_shape

    @property
    def bias_shape(self) -> tuple[int]:
        """Shape of the bias and of its gradient: one value per output channel."""
        return (self.K,)

    @property
    def valid_input_sizes(self) -> tuple[range, ...]:
        """All input sizes that have this problem's output size, per spatial axis.

        Each range has ``stride`` consecutive integers, or fewer if some are below 1.  With a stride
        above 1, dy and w therefore do not determine the size of dx, and the caller must pass it.
        """
        return tuple(axis.valid_input_sizes for axis in self.axes)

    @property
    def reduced(self) -> ConvProblem:
        """The equivalent problem with the smallest dilation and stride, which kernels compute.

        On an axis with a single tap, the dilation becomes 1.  On an axis with a single output, the
        stride becomes the smallest one that leaves no room for a second output.
        """
        stride = tuple(
            min(axis.stride, axis.padded_input - axis.effective_filter + 1)
            if axis.output == 1
            else axis.stride
            for axis in self.axes
        )
        dilation = tuple(axis.dilation if axis.filter > 1 else 1 for axis in self.axes)
        if (stride, dilation) == (self.stride, self.dilation):
            return self
        return derived(self, stride=stride, dilation=dilation, padding_mode="explicit")

    # -- cost -------------------------------------------------------------------------------

    @property
    def flops(self) -> int:
        """Floating-point operations of one pass, with padding counted like data.

        The number is the same for all passes.  Each pass does one multiplication and one addition
        for every combination of image, output pixel, output channel, input channel of the group,
        and tap.  Complex dtypes need four of each.
        """
        pairs = prod(self.output_sizes) * prod(self.filter_sizes)
        return self.flops_of_product * self.N * self.K * (self.C // self.groups) * pairs

    @property
    def useful_flops(self) -> int:
        """Floating-point operations of one pass, without the products with padding."""
        pairs = prod(axis.pairs for axis in self.axes)
        return self.flops_of_product * self.N * self.K * (self.C // self.groups) * pairs

    @property
    def is_complex(self) -> bool:
        """Whether the dtype is complex."""
        return self.dtype in REAL_PART

    @property
    def flops_of_product(self) -> int:
        """Number of floating-point operations of one multiply-add: 2, or 8 for complex dtypes."""
        return flops_of_product(self.dtype)

    @cached_property
    def bytes(self) -> int:
        """Bytes of x, w and y together, which a pass moves if it moves each tensor once.

        A pass may move fewer bytes, because inputs between windows need not be read.  It moves more
        if it reads elements repeatedly.
        """
        tensors = (self.input_shape, self.filter_shape, self.output_shape)
        return ITEMSIZE[self.dtype] * sum(map(prod, tensors))

    @property
    def arithmetic_intensity(self) -> float:
        """FLOPs of a pass per byte that it moves, if it moves each tensor once.

        The pass is memory-bound on a device whose ratio of FLOP/s to bytes/s is higher.
        """
        return self.flops / self.bytes

    @property
    def needs_64bit_indexing(self) -> bool:
        """Whether x, w or y has more elements than a signed 32-bit integer can count."""
        tensors = (self.input_shape, self.filter_shape, self.output_shape)
        return max(map(prod, tensors)) > 2**31 - 1

    def gemm(self, pass_: str) -> GemmView:
        """Return a pass as matrix products, one per group (implicit GEMM).

        The formulas are those of CUTLASS's implicit_gemm_convolution.md.  For backprop_input, the
        product includes the zeros that a stride inserts between the elements of dy;
        ``phase_gemms`` leaves them out.

        >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
        >>> problem.gemm("backprop_filter")
        GemmView(gemm_m=4, gemm_n=18, gemm_k=9, groups=1)
        """
        require_word("pass", pass_, PASSES)
        return self._gemms[pass_]

    @cached_property
    def _gemms(self) -> dict[str, GemmView]:
        outputs, taps = self.N * prod(self.output_sizes), prod(self.filter_sizes)
        inputs = self.N * prod(self.input_sizes)
        channels, filters = self.C // self.groups, self.K // self.groups
        return {
            "forward": GemmView(outputs, filters, channels * taps, self.groups),
            "backprop_input": GemmView(inputs, channels, filters * taps, self.groups),
            "backprop_filter": GemmView(filters, channels * taps, outputs, self.groups),
        }

    @cached_property
    def phase_gemms(self) -> tuple[GemmView, ...]:
        """Matrix products of backprop_input, a GemmView per stride phase of all spatial axes.

        The phase of the last spatial axis varies fastest.  Together the products have the rows of
        ``gemm("backprop_input")``.  Each product contains only the taps that contribute to its
        rows.  A phase without taps has gemm_k = 0, and its gradient is zero.

        Raises:
            ConvError: there are more than MOST_LISTED stride phases.
        """
        _require_listable(prod(self.stride))
        phases = product(*(axis.stride_phases for axis in self.axes))
        return tuple(map(self.phase_gemm, phases))

    def phase_gemm(self, phase: Sequence[tuple[range, range]]) -> GemmView:
        """Return backprop_input of some pixels, to which some taps contribute, as a product.

        Args:
            phase: pixels and taps along each spatial axis, one of the axis's ``stride_phases``.

        Example:
            >>> from cupyconv import ConvProblem
            >>> problem = ConvProblem((1, 8, 5), (16, 8, 3), stride=2)
            >>> first, second = problem.axes[0].stride_phases
            >>> first
            (range(0, 5, 2), range(0, 3, 2))
            >>> problem.phase_gemm([first])
            GemmView(gemm_m=3, gemm_n=8, gemm_k=32, groups=1)
        """
        return GemmView(
            self.N * prod(len(inputs) for inputs, _ in phase),
            self.C // self.groups,
            self.K // self.groups * prod(len(taps) for _, taps in phase),
            self.groups,
        )

    # -- relations --------------------------------------------------------------------------

    @classmethod
    @naming_arguments
    def from_output(
        cls,
        output_shape: Iterable[int],
        filter_shape: Iterable[int],
        *,
        input_shape: Iterable[int] | None = None,
        output_padding: Size | None = None,
        stride: Size = 1,
        padding: Padding = 0,
        dilation: Size = 1,
        groups: int = 1,
        data_format: DataFormat | None = None,
        filter_format: FilterFormat | None = None,
        dtype: Dtype = "float32",
    ) -> ConvProblem:
        """Return the convolution with this output shape.

        The corresponding transposed convolution maps an array of ``output_shape`` to an array of
        the convolution's input shape.

        Args:
            output_shape: shape of the convolution's output.
            input_shape: shape of the convolution's input; None to use ``output_padding``.
            output_padding: alternative to ``input_shape``: input size minus the smallest input size
                with this output size, per spatial axis.  The default is 0, as in PyTorch.  With
                padding "same" or "same_lower", the default is stride - 1, which makes the input
                size ``stride`` times the output size, as in Keras and JAX.  output_padding must be
                less than the stride or the dilation; with these two paddings, it must be less than
                the stride.  If output_padding is at least the stride, the input has more windows,
                and the output is larger than ``output_shape``.

        Raises:
            ConvError: no such convolution exists.  If ``input_shape`` gives another output shape,
                the message states the valid input sizes.

        >>> problem = cupyconv.ConvProblem.from_output((1, 4, 3), (4, 2, 3), stride=2)
        >>> problem.input_shape
        (1, 2, 7)
        >>> cupyconv.ConvProblem.from_output(
        ...     (1, 4, 3), (4, 2, 3), stride=2, output_padding=1
        ... ).input_shape
        (1, 2, 8)
        """
        options = ConvOptions(stride, padding, dilation, groups, data_format, filter_format)
        names = Names(y="the output")
        arguments = {
            "output_shape": output_shape,
            "filter_shape": filter_shape,
            "input_shape": input_shape,
            "output_padding": output_padding,
            **options._asdict(),
            "dtype": dtype,
        }
        return offering(partial(transposed_problem, names), names, arguments)

    def replace(self, **changes: Unpack[_Changes]) -> ConvProblem:
        """Return this problem with some arguments of the constructor changed.

        >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
        >>> problem.replace(stride=1, dtype="float16").output_shape
        (1, 4, 5, 5)
        """
        return ConvProblem(**{**self._arguments, **changes})

    @property
    def _arguments(self) -> dict[str, Any]:
        """Arguments of the constructor for this problem."""
        shapes = {"input_shape": self.input_shape, "filter_shape": self.filter_shape}
        return {**shapes, **self.keywords, "dtype": self.dtype}

    @property
    def options(self) -> ConvOptions:
        """Stride, padding, dilation, groups and formats of the layer."""
        padding = self.padding if self.padding_mode == "explicit" else self.padding_mode
        return ConvOptions(
            self.stride, padding, self.dilation, self.groups, self.data_format, self.filter_format
        )

    @property
    def keywords(self) -> dict[str, Any]:
        """Stride, padding, dilation, groups and formats, as keyword arguments of functions."""
        return self.options._asdict()

    def require_output_gradient(self, shape: Iterable[int]) -> None:
        """Check that an array of this shape can be dy.

        Raises:
            ConvError: the shape is not ``output_shape``; the message suggests sizes, paddings and
                strides that would fit.

        >>> problem = cupyconv.ConvProblem((1, 2, 7, 7), (4, 2, 3, 3), stride=2)
        >>> problem.require_output_gradient((1, 4, 3, 3))
        >>> try:
        ...     problem.require_output_gradient((1, 4, 4, 4))
        ... except cupyconv.ConvError as error:
        ...     print(error.rule)
        dy must have the output size that follows from the input
        """

        def require(output_shape: Iterable[int], **layer: Any) -> None:
            require_output(Names(), ConvProblem(**layer), output_shape)

        offering(require, Names(), {**self._arguments, "output_shape": shape}, ())

    def __repr__(self) -> str:
        def compact(values: tuple) -> str:
            return str(values[0]) if len(set(values)) == 1 else str(values).replace(" ", "")

        pairs = compact(self.padding)
        padding = pairs if self.padding_mode == "explicit" else f"{self.padding_mode} {pairs}"
        return (
            f"ConvProblem({shape_text(self.input_shape)} {self.data_format} * "
            f"{shape_text(self.filter_shape)} {self.filter_format} -> "
            f"{shape_text(self.output_shape)}, stride={compact(self.stride)}, padding={padding}, "
            f"dilation={compact(self.dilation)}, groups={self.groups}, dtype={self.dtype})"
        )

    def _repr_html_(self) -> str:
        """Return the shapes, axes and cost as a table, for Jupyter."""
        tensors = (
            ("x, dx", self.input_shape, self.data_format),
            ("w, dw", self.filter_shape, self.filter_format),
            ("y, dy", self.output_shape, self.data_format),
        )
        shapes = tuple((name, shape_text(shape), order) for name, shape, order in tensors)
        axes = tuple(
            (
                *(axis.name, f"({axis.pad_before}, {axis.pad_after})", f"{axis.stride}"),
                *(f"{axis.dilation}", axis.formula, interval_text(axis.valid_input_sizes)),
            )
            for axis in self.axes
        )
        heads = ("axis", "padding", "stride", "dilation", "output size", "valid input sizes")
        cost = f"{self.flops:,} FLOP in each pass, {self.bytes:,} bytes in x, w and y together"
        head = f"{self.dtype}, padding {self.padding_mode}, groups {self.groups}; {cost}"
        from cupyconv import markup  # imported when a problem is shown

        blocks = (
            markup.Paragraph(head),
            markup.Table(("tensor", "shape", "order"), shapes),
            markup.Table(heads, axes),
        )
        return markup.Document("ConvProblem", (markup.Section("", blocks),)).html()


def offering(
    require: Callable[..., _T],
    names: Names,
    given: Mapping[str, Any],
    sizes: Iterable[str] = tuple(OWNERS),
    require_result: Callable[[_T], None] = lambda _: None,
) -> _T:
    """Return ``require(**given)``; if it raises an error, add suggested fixes to the error.

    The fixes are changes of ``given`` that ``require`` and ``require_result`` accept.

    Args:
        require: function that takes arguments of ConvProblem by name and raises ConvError if they
            are invalid.
        names, given, sizes: as for ``remedies.Call``.
        require_result: function that takes the result of ``require`` for a possible fix, and raises
            ConvError or ConvTypeError if the fix does not work.

    Raises:
        ConvError: the error of ``require``, with the fixes that work.
    """
    try:
        return require(**given)
    except ConvError as error:
        if error.candidates is not None:
            from cupyconv import remedies  # imported only for errors

            def check(fix: Fix) -> None:
                require_result(require(**{**given, **fix.changes}))

            call = remedies.Call(names, given, frozenset(sizes), error.axis)
            remedies.offer(error, call, check)
        raise


def derived(problem: ConvProblem, **fields: Any) -> ConvProblem:
    """Return a problem with other values of its dataclass fields, without checks.

    The values must be those of a valid problem, such as the same tensors in another order.
    """
    found, own = object.__new__(ConvProblem), vars(problem)
    vars(found).update({name: own[name] for name in ConvProblem.__match_args__}, **fields)
    return found


def count_pairs(outputs: int, taps: int, stride: int, dilation: int, low: int, high: int) -> int:
    """Count pairs of an output o and a tap r with low <= o * stride + r * dilation < high.

    The count takes logarithmic time, because no loop visits the pairs.

    Args:
        outputs, taps: numbers of outputs and taps; a negative number counts as 0.
        stride, dilation: distance in positions between neighbouring outputs, and between taps.
        low, high: bounds of the positions.
    """
    sizes = outputs, taps, stride, dilation
    return _pairs_below(*sizes, high) - _pairs_below(*sizes, low)


def _pairs_below(outputs: int, taps: int, stride: int, dilation: int, bound: int) -> int:
    if min(outputs, taps, bound) <= 0:
        return 0
    # Numbers of taps whose positions are below the bound for all outputs (always), and for at least
    # one output (sometimes).  The last output has the highest positions, the first the lowest.
    always = (bound - 1 - (outputs - 1) * stride) // dilation + 1
    always = min(max(always, 0), taps)
    sometimes = min((bound - 1) // dilation + 1, taps)
    # For the first output, the distance from the tap ``sometimes - 1`` to the last position below
    # the bound.  For each earlier tap, the distance is larger by one dilation.
    distance = bound - 1 - (sometimes - 1) * dilation
    count = sometimes - always
    return always * outputs + count + _sum_of_quotients(count, distance, dilation, stride)


def _sum_of_quotients(count: int, start: int, step: int, divisor: int) -> int:
    """Return the sum of (start + i * step) // divisor over i < count, in logarithmic time."""
    total = 0
    while True:
        total += count * (count - 1) // 2 * (step // divisor) + count * (start // divisor)
        step, start = step % divisor, start % divisor
        end = step * count + start
        if end < divisor:
            return total
        count, start = divmod(end, divisor)
        step, divisor = divisor, step


def shape_text(shape: Iterable[int]) -> str:
    """Return a shape in the notation of the command line: ``1x5x5x3``, shortened if it is long."""
    return shortened("x".join(map(str, shape)))


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return a count with its noun, such as ``1 image`` or ``3 images``.

    Args:
        number: the count.
        noun: singular of the noun.
        plural: plural of the noun; by default, the singular with an s.
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def count_text(number: int, rank: int, noun: str = "value", plural: str = "") -> str:
    """Return a wrong number of values as text, such as ``got 1 value for 2 spatial axes``.

    Args:
        number: number of values.
        rank: number of spatial axes.
        noun, plural: what the values are called, as for ``counted``.
    """
    axes = counted(rank, "spatial axis", "spatial axes")
    return f"got {counted(number, noun, plural)} for {axes}"


def bytes_text(size: float) -> str:
    """Return a number of bytes as text, in binary units: ``1.5 GiB``."""
    if size < 1024:
        return f"{size} bytes"
    *smaller, largest = ("KiB", "MiB", "GiB", "TiB", "PiB")
    size /= 1024
    for unit in smaller:
        if size < 1024:
            return f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:,.1f} {largest}"


def flops_of_product(dtype: str) -> int:
    """Return the number of floating-point operations of one multiply-add of a dtype."""
    return 8 if dtype in REAL_PART else 2


def interval_text(sizes: range) -> str:
    """Return a range of sizes as text: ``9`` or ``9 to 10``."""
    return str(sizes[0]) if len(sizes) == 1 else f"{sizes[0]} to {sizes[-1]}"


def dtype_name(dtype: Any, remedy: str = "") -> DtypeName:
    """Return the name of a dtype given as a name, a NumPy dtype or a scalar type.

    Args:
        remedy: last sentence of the error message, which suggests a fix.

    Raises:
        ConvTypeError: the dtype is not supported.
    """
    name = dtype if isinstance(dtype, str) else getattr(dtype, "name", None)
    name = getattr(dtype, "__name__", None) if name is None else name
    if not isinstance(name, str) or name not in ITEMSIZE:
        text = shown(name).strip("'") if isinstance(name, str) else shown(dtype)
        rule = f"dtype must be one of {', '.join(ITEMSIZE)}"
        raise ConvTypeError(f"{rule}: got {text}. {remedy}".rstrip(". "))
    return cast(DtypeName, name)


def _astype(name: str, dtype: str) -> str:
    return f"{name}.astype({dtype!r})"


def shared_dtype(
    dtypes: Mapping[str, Any], convert: Callable[[str, str], str] = _astype
) -> DtypeName:
    """Return the common dtype of several arrays.

    Args:
        dtypes: dtype of each array, keyed by the array's name.
        convert: function that takes an array's name and a dtype's name, and returns Python code for
            error messages that converts the array to the dtype.

    Raises:
        ConvTypeError: a dtype is unsupported, or the dtypes differ.
    """
    words: dict[str, Any] = {name: getattr(dtype, "name", None) for name, dtype in dtypes.items()}
    known = [word for word in words.values() if word in ITEMSIZE]
    if len(known) == len(words) and len(set(known)) == 1:
        return cast(DtypeName, known[0])
    is_complex = any(getattr(dtype, "kind", "") == "c" for dtype in dtypes.values())
    default = "complex128" if is_complex else known[0] if known else "float32"
    target = next((word for word in known if word in REAL_PART), default)
    steps = [convert(name, target) for name, word in words.items() if word != target]
    way_out = f"for example {' and '.join(steps)}"
    for name, word in words.items():
        if word not in ITEMSIZE:
            remedy = _view_of_bytes(name, dtypes[name]) or f"Convert it, {way_out}"
            raise ConvTypeError(
                f"{name}: dtype must be one of {', '.join(ITEMSIZE)}: got "
                f"{word or shown(dtypes[name])}. {remedy}"
            )
    (first_name, first), *others = words.items()
    name, word = next(entry for entry in others if entry[1] != first)
    raise ConvTypeError(
        f"all arrays must have one dtype: {first_name} is {first}, {name} is {word}. "
        f"Convert one of them, {way_out}"
    )


def _view_of_bytes(name: str, dtype: Any) -> str:
    """Return the suggested fix for a structured dtype or raw bytes; "" for other dtypes."""
    if getattr(dtype, "names", None):
        return f"Pass one of its fields, for example {name}[{dtype.names[0]!r}]"
    if getattr(dtype, "kind", "") != "V" or not hasattr(dtype, "itemsize"):
        return ""
    # The float8 dtypes of ml_dtypes also have the kind "V", but they are not raw bytes.
    if dtype.type.__module__ != "numpy":
        return ""
    if dtype.itemsize == 2:
        return f"If these are bfloat16 from a file, pass {name}.view(ml_dtypes.bfloat16)"
    return f"View its bytes as a supported dtype, for example {name}.view('float32')"


# -- functions that use other names for the tensors ----------------------------------------------


def named_problem(
    names: Names,
    input_shape: Iterable[int],
    filter_shape: Iterable[int],
    *,
    dtype: Any,
    **options: Any,
) -> ConvProblem:
    """Return a ConvProblem with these shapes, dtype and options; error messages use ``names``."""
    problem, given = object.__new__(ConvProblem), ConvOptions(**options)
    x_shape = integers(names.x_shape, input_shape)
    w_shape = integers(names.w_shape, filter_shape)
    rank = spatial_rank(names, x_shape, w_shape)
    layout = formats.resolve_data_format(given.data_format, rank)
    filter_layout = formats.resolve_filter_format(given.filter_format, rank, layout)
    vars(problem).update(
        input_shape=x_shape,
        filter_shape=w_shape,
        data_format=layout,
        filter_format=filter_layout,
        stride=_per_axis(names.stride, given.stride, rank),
        dilation=_per_axis(names.dilation, given.dilation, rank),
        groups=_positive(names.groups, given.groups, candidates=()),
        dtype=dtype_name(dtype, "Pass, for example, dtype='float32'"),
    )
    _require_sizes(names, problem)
    _require_channels(names, problem)
    rules = (problem.filter_sizes, problem.stride, problem.dilation)
    spans = [(taps - 1) * dilation for taps, _, dilation in zip(*rules, strict=True)]
    mode, pairs = _padding(names, given.padding, layout, spans)
    if mode.startswith("same"):
        axes = zip(problem.input_sizes, *rules, strict=True)
        pairs = tuple(_same_padding(mode, *sizes) for sizes in axes)
    vars(problem).update(padding_mode=mode, padding=pairs)
    for axis in problem.axes:
        _require_countable(names, axis)
        _require_window(names, axis)
    return problem


def transposed_problem(
    names: Names,
    output_shape: Iterable[int],
    filter_shape: Iterable[int],
    input_shape: Iterable[int] | None,
    output_padding: Size | None,
    *,
    dtype: Any,
    **options: Any,
) -> ConvProblem:
    """Return the result of ``ConvProblem.from_output``; error messages use ``names``."""
    y_shape = integers(names.y_shape, output_shape)
    w_shape = integers(names.w_shape, filter_shape)
    rank = spatial_rank(names._replace(x=names.y), y_shape, w_shape)
    layer = ConvOptions(**options)
    layout = formats.resolve_data_format(layer.data_format, rank)
    filter_layout = formats.resolve_filter_format(layer.filter_format, rank, layout)
    layer = layer._replace(data_format=layout, filter_format=filter_layout)
    _require_batch(names.y, y_shape[formats.data_axes(layout)[0]])
    padding = _padding(names, layer.padding, layout)
    if input_shape is None:
        input_shape, y_shape = _shapes_for(names, y_shape, w_shape, layer, padding, output_padding)
    elif output_padding is not None:
        raise ConvError(
            f"{names.x_shape} and output_padding must not both be passed",
            f"got {shape_text(integers(names.x_shape, input_shape))} and {output_padding}",
            "Pass one of them",
        )
    problem = named_problem(names, input_shape, w_shape, dtype=dtype, **layer._asdict())
    _require_origin(names, problem, y_shape)
    require_output(names, problem, y_shape)
    return problem


def require_problem(function: str, given: object) -> None:
    """Check that an argument is a ConvProblem.

    Raises:
        ConvTypeError: the argument has another type.
    """
    if not isinstance(given, ConvProblem):
        raise ConvTypeError(
            f"{function} takes a ConvProblem: got {type(given).__name__}. Make one with "
            "cupyconv.ConvProblem(x.shape, w.shape, stride=...)"
        )


def require_output(names: Names, problem: ConvProblem, shape: Iterable[int]) -> None:
    """Check the shape of dy; error messages use ``names``.

    Raises:
        ConvError: as for ``ConvProblem.require_output_gradient``.
    """
    x, w, y = names[:3]
    given = integers(f"{y}.shape", shape)
    expected = f"pass {names.one(y)} of shape {shape_text(problem.output_shape)}"
    expected += f" ({problem.data_format})"
    fix = Fix({"output_shape": problem.output_shape}, (expected,))
    remedy = expected[0].upper() + expected[1:]

    def mismatch(rule: str, values: str, axis: str | None = None) -> ConvError:
        return ConvError(rule, values, remedy, axis=axis, candidates=[fix])

    if len(given) != len(problem.output_shape):
        raise mismatch(
            f"{y} must have as many axes as {x}",
            f"{y} is {shape_text(given)}, {x} is {shape_text(problem.input_shape)}",
        )
    n, k, *spatial = (given[axis] for axis in problem.data_axes)
    if n != problem.N:
        values = f"{y} has {n}, {x} has {problem.N}"
        raise mismatch(f"{y} and {x} must have the same batch size", values)
    if k != problem.K:
        values = f"{y} has {counted(k, 'channel')}, {w} has O = {problem.K}"
        raise mismatch(f"{y} must have one channel for each filter", values)
    for axis, size in zip(problem.axes, spatial, strict=True):
        if size == axis.output:
            continue
        sizes = axis.input_sizes_for(size)
        name = names.bare(x)
        plural = "sizes" if len(sizes) > 1 else "size"
        fitting = f"{name} {plural} {interval_text(sizes)}" if sizes else f"no {name} size"
        raise mismatch(
            f"{y} must have the output size that follows from {x}",
            f"{names.any(x)} of {axis.input} gives {axis.formula}, {y} has {size}; "
            f"{fitting} would give {size}",
            axis.name,
        )


def integer(what: str, value: object) -> int:
    """Return an argument as a 64-bit integer; ``what`` is its name in messages."""
    try:
        if isinstance(value, bool):  # operator.index rejects only NumPy's booleans
            raise TypeError
        number = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise ConvTypeError(
            f"{what} must be made of integers: got {shown(value)} of type "
            f"{type(value).__name__}. Pass an int, or a tuple of ints"
        ) from None
    if abs(number) > LARGEST:
        raise ConvError(
            f"{what} must be made of 64-bit integers",
            "got a larger integer" if number > 0 else "got a smaller integer",
            "Use integers from -(2^63 - 1) to 2^63 - 1",
        )
    return number


def integers(what: str, value: Iterable[int]) -> tuple[int, ...]:
    """Return an argument as a tuple of 64-bit integers; ``what`` is its name in messages."""
    if not is_sequence(value):
        raise ConvTypeError(
            f"{what} must be a tuple of integers: got {shown(value)}. "
            "Pass, for example, (1, 3, 32, 32)"
        )
    return tuple(integer(what, size) for size in value)


def spatial_rank(names: Names, input_shape: tuple[int, ...], filter_shape: tuple[int, ...]) -> int:
    """Return the number of spatial axes of tensors with these shapes."""
    rank = len(input_shape) - 2
    if rank not in formats.SPATIAL_AXES:
        raise ConvError(
            f"{names.x} must have a batch axis, a channel axis and 1 to 3 spatial axes",
            f"{names.bare(names.x)} {shape_text(input_shape) or '()'} has "
            f"{counted(len(input_shape), 'axis', 'axes')}",
            "Pass 3 axes for a 1-D, 4 for a 2-D, 5 for a 3-D convolution",
            candidates=(),
        )
    if len(filter_shape) != len(input_shape):
        no_batch = len(input_shape) + 1 == len(filter_shape) and rank + 1 in formats.SPATIAL_AXES
        raise ConvError(
            f"{names.x} must have as many axes as {names.w}, with a batch axis and a channel axis"
            if no_batch
            else f"{names.w} must have as many axes as {names.x}",
            f"{names.x} {shape_text(input_shape)} has {len(input_shape)}, {names.w} "
            f"{shape_text(filter_shape) or '()'} has {len(filter_shape)}",
            f"Pass {names.any(names.w)} with {len(input_shape)} axes, or {names.any(names.x)} with "
            f"{len(filter_shape)}",
            candidates=(),
        )
    return rank


# -- reading the constructor's arguments ---------------------------------------------------------


def is_sequence(value: object) -> bool:
    """Return whether a value is an ordered sequence other than a text or bytes.

    Arrays with at least one axis are sequences.
    """
    unordered = isinstance(value, (str, bytes, bytearray, Mapping, Set))
    return hasattr(value, "__iter__") and not unordered and getattr(value, "ndim", 1) != 0


def _per_axis(what: str, value: Size, rank: int) -> tuple[int, ...]:
    if not is_sequence(value):
        return (_positive(what, value),) * rank
    values = tuple(value)  # type: ignore[arg-type]
    if len(values) != rank:
        raise ConvError(
            f"{what} must be one integer, or one for each spatial axis",
            count_text(len(values), rank),
            f"Pass one integer, or a sequence of {rank}",
            candidates=(),
        )
    names = formats.SPATIAL_AXES[rank]
    return tuple(_positive(what, v, name) for v, name in zip(values, names, strict=True))


def _shapes_for(
    names: Names,
    y_shape: tuple[int, ...],
    w_shape: tuple[int, ...],
    options: ConvOptions,
    padding: tuple[str, tuple[tuple[int, int], ...]],
    output_padding: Size | None,
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return the shapes of the convolution's input and output that follow from output_padding."""
    rank = len(y_shape) - 2
    _, c_axis, *spatial_axes = formats.data_axes(options.data_format)
    _, i_axis, *filter_axes = formats.filter_axes(options.filter_format)
    mode, pairs = padding
    same = mode.startswith("same")
    strides = _per_axis(names.stride, options.stride, rank)
    if output_padding is None:
        extra = tuple(stride - 1 if same else 0 for stride in strides)
    elif is_sequence(output_padding):
        extra = tuple(integer("output_padding", v) for v in output_padding)  # type: ignore[union-attr]
    else:
        extra = (integer("output_padding", output_padding),) * rank
    if len(extra) != rank:
        raise ConvError(
            "output_padding must be one integer, or one for each spatial axis",
            count_text(len(extra), rank),
            f"Pass one integer, or a sequence of {rank}",
        )
    dilations = _per_axis(names.dilation, options.dilation, rank)
    limits = [step - 1 for step in (strides if same else map(max, strides, dilations))]
    fixes = _output_padding_fixes(names, extra, strides, limits)
    shape, outputs = list(y_shape), list(y_shape)
    shape[c_axis] = w_shape[i_axis] * _positive(names.groups, options.groups, candidates=())
    letters = formats.SPATIAL_AXES[rank]
    rules = zip(letters, spatial_axes, filter_axes, strides, dilations, pairs, extra, strict=True)
    for name, axis, filter_axis, stride, dilation, (before, after), added in rules:
        rule = ConvAxis(name, 0, w_shape[filter_axis], stride, dilation, before, after, mode)
        shape[axis] = _result_size(names, rule, y_shape[axis], added, fixes)
        outputs[axis] += added // stride
    return tuple(shape), tuple(outputs)


def _result_size(
    names: Names, rule: ConvAxis, size: int, added: int, fixes: Sequence[Fix] | None
) -> int:
    """Return the size of a transposed convolution's result along an axis.

    Args:
        names: names that messages use.
        rule: the axis, whose input size is not read.
        size: size of the transposed convolution's input.
        added: output_padding.
        fixes: fixes to try if output_padding is invalid.
    """
    is_same = rule.padding_mode.startswith("same")
    most = (rule.stride if is_same else max(rule.stride, rule.dilation)) - 1
    if not 0 <= added <= most:
        interval = interval_text(range(most + 1))
        raise ConvError(
            "output_padding must be at least 0 and less than the stride"
            + ("" if is_same else " or the dilation"),
            f"got {added} with stride {rule.stride}"
            + ("" if is_same else f" and dilation {rule.dilation}")
            + f"; {interval} would fit",
            f"Use {interval}",
            axis=rule.name,
            candidates=fixes,
        )
    result = rule.first_input_size_for(size) + added
    removed = rule.pad_before + rule.pad_after
    if result < 1 <= min(size, rule.filter) and removed > 0:
        largest = removed - (1 - result)
        raise ConvError(
            f"{names.x} of a transposed convolution must have a size of at least 1",
            f"{names.y} of {size} gives {result + removed}, and {names.padding} "
            f"({rule.pad_before}, {rule.pad_after}) removes {removed}",
            f"Pad by at most {largest} in total" if largest >= 0 else "",
            axis=rule.name,
        )
    return result


def _output_padding_fixes(
    names: Names, extra: Sequence[int], strides: Sequence[int], most: Sequence[int]
) -> list[Fix]:
    """Return fixes of an invalid output_padding: its nearest valid value, or a larger stride.

    The larger stride is only suggested if all strides are 1.

    Args:
        extra, strides: output_padding and stride per spatial axis.
        most: largest output_padding per spatial axis.
    """

    def written(values: Sequence[int]) -> Any:
        if names.entries == "spatial":
            return list(values)
        return values[0] if len(set(values)) == 1 else tuple(values)

    limited = [min(max(pixels, 0), limit) for pixels, limit in zip(extra, most, strict=True)]
    nearest = written(limited)
    fixes = [Fix({"output_padding": nearest}, (("output_padding", nearest),))]
    if max(strides) == 1 and min(extra) >= 0:
        steps = written([max(pixels + 1, 2) for pixels in extra])
        fixes.append(Fix({"stride": steps}, ((names.stride, steps),)))
    return fixes


def _positive(
    what: str, value: object, axis: str | None = None, candidates: Sequence[Fix] | None = None
) -> int:
    number = integer(what, value)
    if number < 1:
        rule, values = f"{what} must be at least 1", f"got {number}"
        raise ConvError(rule, values, "Use 1 or more", axis=axis, candidates=candidates)
    return number


def _padding(
    names: Names, padding: Padding, layout: str, spans: Sequence[int] = ()
) -> tuple[str, tuple[tuple[int, int], ...]]:
    """Return the padding's mode and its (before, after) pairs; the pairs of SAME are zeros.

    Args:
        names: names that messages use.
        padding: the argument.
        layout: data format of the layer.
        spans: as for ``unknown_padding``.
    """
    rank, what = len(layout) - 2, names.padding
    if isinstance(padding, str):
        mode = padding.lower()
        if mode not in PADDING_WORDS:
            raise unknown_padding(names, padding, PADDING_WORDS, spans)
        return mode, ((0, 0),) * rank
    if not is_sequence(padding):
        amount = integer(what, padding)
        sides: tuple = ((amount, amount),) * rank
    else:
        entries = tuple(padding)  # type: ignore[arg-type]
        sides = tuple(_pair(what, side) for side in entries)
        if len(sides) != rank:
            error = ConvError(
                f"{what} must be one integer, or an integer or a (before, after) pair for each "
                "spatial axis",
                count_text(len(sides), rank, "entry", "entries"),
                f"Pass {counted(rank, 'entry', 'entries')}",
            )
            if readings := _padding_readings(sides, any(map(is_sequence, entries)), layout):
                error.offer([((what, pairs),) for pairs in readings])
            raise error
    _require_sides(what, sides, formats.SPATIAL_AXES[rank])
    return "explicit", sides


def _require_sides(what: str, sides: Iterable[tuple[int, int]], letters: str) -> None:
    for (before, after), axis in zip(sides, letters, strict=True):
        if min(before, after) < 0:
            raise ConvError(
                f"{what} must not be negative",
                f"got ({before}, {after})",
                "Crop the input instead, and pad by 0",
                axis=axis,
            )


def _padding_readings(
    sides: Sequence[tuple[int, int]], has_pairs: bool, layout: str
) -> list[tuple[tuple[int, int], ...]]:
    """Return what a wrong number of padding entries may mean, as pairs per spatial axis.

    Args:
        sides: the entries as pairs; an integer is a pair of equal numbers.
        has_pairs: whether an entry is a pair.
        layout: data format of the layer.
    """
    rank, amounts = len(layout) - 2, [before for before, _ in sides]
    readings: list[Iterable[tuple[int, int]]] = []
    if len(sides) == 1:
        readings = [list(sides) * rank]
    elif has_pairs and len(sides) == len(layout):  # an entry per axis of x, as for numpy.pad
        axes = formats.data_axes(layout)
        if not any(map(any, (sides[axis] for axis in axes[:2]))):
            readings = [[sides[axis] for axis in axes[2:]]]
    elif not has_pairs and len(sides) == 2 * rank:  # pairs without brackets, and ONNX's order
        orders = (amounts[::2], amounts[1::2]), (amounts[:rank], amounts[rank:])
        readings = [list(zip(*order, strict=True)) for order in orders]
    positive = (tuple(pairs) for pairs in readings if min(map(min, pairs)) >= 0)
    return list(dict.fromkeys(positive))


def numpy_pad(mode: str) -> str | None:
    """Return code that pads x with its own values; None unless ``mode`` is a name for that."""
    own = _OWN_VALUES.get(mode.lower())
    return own and f"numpy.pad(x, ..., mode={own!r})"


_OWN_VALUES = {name: name for name in ("wrap", "reflect", "symmetric", "edge")}
_OWN_VALUES |= {"circular": "wrap", "replicate": "edge"}
"""Modes of numpy.pad, keyed by the names that libraries have for padding with the input's values.
"""


def unknown_padding(
    names: Names,
    padding: str,
    known: Sequence[str],
    spans: Sequence[int] = (),
    pad: Callable[[str], str | None] = numpy_pad,
) -> ConvError:
    """Return the error for a padding mode that a function does not have.

    Args:
        names: names that messages use.
        padding: the padding mode.
        known: modes that the function has.
        spans: distance from the first to the last tap on each spatial axis; empty if no remedy is
            known, as for a transposed convolution, which crops.
        pad: function that takes a mode, and returns code that pads x in this mode; None if it does
            not pad x with its own values.
    """
    what, mode = names.padding, re.sub("[^a-z]", "", padding.lower())
    if code := pad(mode):
        remedy = f"Pad with {code} and convolve with {what} 0" if spans else ""
        return ConvError(
            f"{what} must be zeros, not values of the input", f"got {padding!r}", remedy
        )
    causal = tuple((taps, 0) for taps in spans)
    by_hand = f"pad {names.x} with {causal} zeros and use {what} 0"
    choices: dict[str, Phrase | None] = {"sameupper": (what, "same")}
    if spans:
        choices["causal"] = by_hand if "padding" in names.absent else (what, causal)
        choices["full"] = names.pad(tuple(spans))
    error = unknown_word(what, padding, known, (*PADDING_WORDS, *choices))
    if choice := choices.get(mode):
        error.offer([(choice,)])
    return error


def _pair(what: str, side: object) -> tuple[int, int]:
    if not is_sequence(side):
        amount = integer(what, side)
        return amount, amount
    values = tuple(integer(what, v) for v in side)  # type: ignore[attr-defined]
    if len(values) != 2:
        raise ConvError(
            f"the {what} of an axis must be one integer or a (before, after) pair",
            f"got {values}",
            "Pass, for example, (0, 1)",
        )
    return values


def _same_padding(mode: str, size: int, taps: int, stride: int, dilation: int) -> tuple[int, int]:
    """Return the least (before, after) padding with which ceil(size / stride) windows fit."""
    output = -(-size // stride)
    total = max((output - 1) * stride + (taps - 1) * dilation + 1 - size, 0)
    smaller, larger = total // 2, total - total // 2
    return (smaller, larger) if mode == "same" else (larger, smaller)


# -- rules between the arguments -----------------------------------------------------------------


def _require_batch(owner: str, batch: int) -> None:
    if batch < 0:
        raise ConvError("the batch must not be negative", f"{owner} has {batch}", "Use 0 or more")


def _require_sizes(names: Names, problem: ConvProblem) -> None:
    _require_batch(names.x, problem.N)
    letters = formats.SPATIAL_AXES[problem.spatial_rank]
    named = [
        ("C", names.x, problem.C),
        ("O", names.w, problem.K),
        ("I", names.w, problem.filter_shape[problem.filter_axes[1]]),
        *((a, names.x, size) for a, size in zip(letters, problem.input_sizes, strict=True)),
        *((a, names.w, size) for a, size in zip(letters, problem.filter_sizes, strict=True)),
    ]
    for letter, owner, size in named:
        if size < 1:
            raise ConvError(
                "every size but the batch must be at least 1",
                f"{owner} has {letter} = {size}",
                f"Use positive sizes: {names.bare(names.x)} {shape_text(problem.input_shape)} was "
                f"read as {problem.data_format}, {names.bare(names.w)} "
                f"{shape_text(problem.filter_shape)} as {problem.filter_format}",
            )


def _require_channels(names: Names, problem: ConvProblem) -> None:
    C, K, G = problem.C, problem.K, problem.groups
    per_group = problem.filter_shape[problem.filter_axes[1]]
    output = "the output" if names.y == "dy" else names.y
    order = f"{shape_text(problem.filter_shape)} ({problem.filter_format})"
    for owner, count, read in (
        (names.x, C, ""),
        (output, K, f"; {names.bare(names.w)} {order} has O = {K}"),
    ):
        if count % G:
            raise ConvError(
                f"{names.groups} must divide {names.of(owner)} channels",
                f"{owner} has {count}, {names.groups}={G}{read}",
                candidates=(),
            )
    if per_group != C // G:
        raise ConvError(
            f"{names.w}'s input channels must be {names.x}'s channels divided by {names.groups}",
            f"{names.bare(names.x)} {shape_text(problem.input_shape)} ({problem.data_format}) has "
            f"C = {C}, {names.groups}={G}, so {C // G} per filter; {names.bare(names.w)} "
            f"{shape_text(problem.filter_shape)} ({problem.filter_format}) has I = {per_group}",
            candidates=(),
        )


def _require_origin(names: Names, problem: ConvProblem, y_shape: tuple[int, ...]) -> None:
    """Check that a problem has the output shape ``y_shape``.

    Error messages are about the transposed convolution, which maps y to x.
    """
    n, k = (y_shape[axis] for axis in problem.data_axes[:2])
    if n != problem.N:
        raise ConvError(
            "a transposed convolution must keep the batch size",
            f"{names.y} has {n}, {names.x} has {problem.N}",
            f"Use a batch of {n}",
            candidates=(),
        )
    if k != problem.K:
        raise ConvError(
            f"{names.y} must have one channel for each filter",
            f"{names.y} has {counted(k, 'channel')}, and {names.w} has O = {problem.K} "
            f"({shape_text(problem.filter_shape)}, {problem.filter_format})",
            f"Use {names.y} with {problem.K} channels"
            + (f", or {names.w} with O = {k}" if k > 0 else ""),
            candidates=(),
        )
    for axis, position in zip(problem.axes, problem.data_axes[2:], strict=True):
        size = y_shape[position]
        sizes = axis.input_sizes_for(size)
        if size != axis.output and sizes:
            raise ConvError(
                f"the convolution of {names.x} must have the size of {names.y}",
                f"{names.any(names.x)} of {axis.input} has {axis.formula}, {names.y} has {size}",
                axis=axis.name,
                candidates=(),
            )


def _require_countable(names: Names, axis: ConvAxis) -> None:
    if axis.padded_input > LARGEST:
        raise ConvError(
            f"the padded {names.bare(names.x)} must have at most 2^63 - 1 positions",
            f"{names.x} of {axis.input} with padding ({axis.pad_before}, {axis.pad_after}) has "
            f"{axis.padded_input}",
            f"Use smaller {names.padding}"
            if axis.padding_mode == "explicit"
            else "Use fewer taps, or a smaller dilation",
            axis=axis.name,
        )


def _require_listable(phases: int) -> None:
    if phases > MOST_LISTED:
        raise ConvError(
            f"the number of stride phases to list must be at most {MOST_LISTED:,}",
            f"there are {phases:,}",
            "Use ConvAxis.taps_of_phase for single phases",
        )


def _require_window(names: Names, axis: ConvAxis) -> None:
    if axis.output >= 1:
        return
    raise ConvError(
        f"{names.w} must fit into the padded {names.bare(names.x)}",
        f"{names.any(names.w)} of {axis.filter} with dilation {axis.dilation} spans "
        f"{axis.effective_filter}, "
        f"{names.x} of {axis.input} with padding ({axis.pad_before}, {axis.pad_after}) has "
        f"{axis.padded_input}",
        axis=axis.name,
        candidates=(),
    )
