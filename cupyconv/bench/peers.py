"""Libraries to compare with, if installed: PyTorch, and on the CPU also JAX and TensorFlow.

Each library runs in its fastest configuration: compiled before timing starts, one gradient at a
time, with as many threads as cupyconv.  On a GPU, ``torch.backends.cudnn.benchmark`` is set, so
that cuDNN tries its algorithms on the first call.  PyTorch may use TF32 only in runs in which
cupyconv may use TF32.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from importlib import import_module
from typing import Any, Protocol

import numpy as np

from cupyconv.bench.places import Place
from cupyconv.bench.timing import Call
from cupyconv.checking import Operands
from cupyconv.problem import ConvProblem

PEERS = {"torch": "PyTorch", "jax": "JAX", "tensorflow": "TensorFlow"}
"""Labels of the libraries, keyed by their name in rows."""

NAMES = {"cpu": tuple(PEERS), "gpu": ("torch",)}
"""Libraries that a run measures by default, by place."""

_FORWARDS = {1: "conv1d", 2: "conv2d", 3: "conv3d"}

_MOST_PLAIN = 1e9
"""FLOP limit of a strided 3-D pass on XLA, whose gradient is very slow (chosen)."""


class Peer(Protocol):
    """Interface of a library that a run compares with cupyconv."""

    name: str
    """Name of the library, a key of PEERS."""

    copies: bool
    """Whether the library needs copies of the operands, which take extra memory."""

    errors: tuple[type[Exception], ...]
    """Exceptions that the library raises for an unsupported problem."""

    def settings(
        self, precision: str, threads: int | None = None
    ) -> AbstractContextManager[None]: ...

    def refuses(self, problem: ConvProblem) -> str | None:
        """Return why a problem is unsupported; None if it is supported."""
        ...

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        """Return a function that runs a pass on the operand set with a given index.

        The function returns an array of the library.  On the CPU, the array is complete when the
        function returns.
        """
        ...

    def to_array(self, result: Any, problem: ConvProblem, pass_: str) -> Any:
        """Convert a result to an array of the place's library, with the problem's axis order."""
        ...

    def workspace_bytes(self, call: Call) -> int | None:
        """Return the peak device memory of a call without its result; None on the CPU."""
        ...

    def release(self) -> None:
        """Free memory that is cached for later tensors."""
        ...


def find(place: Place, name: str = "torch") -> tuple[Peer | None, str]:
    """Return the library and an empty string, or None and the reason why it is unavailable."""
    label = PEERS[name]
    if name not in NAMES[place.name]:
        return None, f"{label} is measured on the CPU only"
    if name == "tensorflow":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # keep the log off standard error
    try:
        library: Any = import_module(name)
    except ImportError:
        return None, f"{label} is not installed"
    except Exception as error:  # of any type, for example if a shared library is missing
        why, _, _ = str(error).partition("\n")
        return None, f"{label} could not be imported: {why or type(error).__name__}"
    if name != "torch":
        return (JaxPeer if name == "jax" else TensorFlowPeer)(library), ""
    if place.name == "gpu" and not library.cuda.is_available():
        return None, f"this PyTorch ({library.__version__}) has no CUDA device"
    return TorchPeer(place, library), ""


class TorchPeer:
    """PyTorch's convolutions on tensors that share the memory of a place's arrays."""

    name = "torch"
    copies = False
    errors: tuple[type[Exception], ...] = (RuntimeError, NotImplementedError)

    def __init__(self, place: Place, torch: Any) -> None:
        self._place, self._torch = place, torch

    @contextmanager
    def settings(self, precision: str, threads: int | None = None) -> Iterator[None]:
        """Enter the settings for measuring PyTorch, and restore them afterwards.

        Args:
            precision: "tf32" permits tensor cores to round float32 operands.
            threads: thread count of PyTorch on the CPU; None leaves it unchanged.
        """
        torch = self._torch
        new_values = [
            (torch.backends.cudnn, "benchmark", True),
            (torch.backends.cudnn, "allow_tf32", precision == "tf32"),
            (torch.backends.cuda.matmul, "allow_tf32", precision == "tf32"),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in new_values]
        threads_before = torch.get_num_threads()
        try:
            for owner, name, value in new_values:
                setattr(owner, name, value)
            if threads is not None:
                torch.set_num_threads(threads)
            with torch.inference_mode(), self._current_stream():
                yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)
            torch.set_num_threads(threads_before)

    @contextmanager
    def _current_stream(self) -> Iterator[None]:
        """Make PyTorch use the stream on which CuPy records its events."""
        if self._place.name == "cpu":
            yield
            return
        cuda = self._torch.cuda
        pointer = self._place.xp.cuda.get_current_stream().ptr
        if pointer == cuda.current_stream().cuda_stream:
            yield
            return
        with cuda.stream(cuda.ExternalStream(pointer)):
            yield

    def refuses(self, problem: ConvProblem) -> str | None:
        if any(before != after for before, after in problem.padding):
            return "PyTorch pads both sides equally"
        return None

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        """Return a function that returns a tensor (N, C, *spatial) or (K, C / groups, *spatial)."""
        tensors = [self._operands(problem, operands) for operands in sets]
        return self._pass(problem, pass_, tensors)

    def to_array(self, tensor: Any, problem: ConvProblem, pass_: str) -> Any:
        """Return an array that shares a tensor's memory."""
        axes = np.argsort(_axes(problem, pass_))
        xp = self._place.xp
        if problem.dtype != "bfloat16":
            return xp.from_dlpack(tensor.resolve_conj()).transpose(*axes)
        from cupyconv.arrays import numpy_dtype

        # NumPy cannot import bfloat16 through DLPack, so the bits travel as 16-bit integers.
        array = xp.from_dlpack(tensor.view(self._torch.int16)).view(numpy_dtype(problem.dtype))
        return array.transpose(*axes)

    def workspace_bytes(self, call: Call) -> int | None:
        if self._place.name == "cpu":
            return None
        cuda = self._torch.cuda
        self._place.clock.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        result = call(0)
        self._place.clock.synchronize()
        used = cuda.max_memory_allocated() - before
        return max(used - result.numel() * result.element_size(), 0)

    def release(self) -> None:
        if self._place.name == "gpu":
            self._torch.cuda.empty_cache()

    def product(self, size: int, dtype: str) -> Call:
        """Return a function that multiplies two random square matrices."""
        torch = self._torch
        device = "cuda" if self._place.name == "gpu" else "cpu"
        kind = getattr(torch, dtype)
        a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        return lambda _: a @ b

    def copy(self, size: int) -> Call:
        """Return a function that copies ``size`` bytes."""
        torch = self._torch
        device = "cuda" if self._place.name == "gpu" else "cpu"
        source = torch.randn(size // 4, device=device)
        target = torch.empty_like(source)
        return lambda _: target.copy_(source)

    def _operands(self, problem: ConvProblem, operands: Operands) -> tuple[Any, Any, Any]:
        """Return x, w and dy as views with PyTorch's axis order."""
        data, filters = problem.data_axes, problem.filter_axes
        return (
            self._tensor(operands.x).permute(data),
            self._tensor(operands.w).permute(filters),
            self._tensor(operands.dy).permute(data),
        )

    def _tensor(self, array: Any) -> Any:
        torch = self._torch
        if array.dtype.name != "bfloat16":
            return torch.from_dlpack(array)
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)

    def _pass(
        self, problem: ConvProblem, pass_: str, operands: Sequence[tuple[Any, Any, Any]]
    ) -> Callable[[int], Any]:
        torch = self._torch
        stride, dilation = list(problem.stride), list(problem.dilation)
        padding = [before for before, _ in problem.padding]
        groups, rank = problem.groups, problem.spatial_rank
        if pass_ == "forward":
            convolution = getattr(torch, _FORWARDS[rank])
            pairs = [(x, w) for x, w, _ in operands]
            return lambda i: convolution(*pairs[i], None, stride, padding, dilation, groups)
        if problem.is_complex:
            return self._complex_gradient(problem, pass_, operands)
        backward = torch.ops.aten.convolution_backward.default
        operand = 0 if pass_ == "backprop_input" else 1
        mask = [operand == 0, operand == 1, False]
        zeros = [0] * rank
        return lambda i: backward(
            operands[i][2], operands[i][0], operands[i][1],
            None, stride, padding, dilation, False, zeros, groups, mask,
        )[operand]  # fmt: skip

    def _complex_gradient(
        self, problem: ConvProblem, pass_: str, operands: Sequence[tuple[Any, Any, Any]]
    ) -> Callable[[int], Any]:
        """Return a function that computes a complex gradient by autograd.

        PyTorch has no operator for complex gradients.
        """
        torch = self._torch
        forward = getattr(torch, _FORWARDS[problem.spatial_rank])
        rules = (None, problem.stride, [before for before, _ in problem.padding])
        recorded = []
        with torch.inference_mode(False), torch.enable_grad():
            for x, w, dy in operands:
                # Copy: autograd cannot record tensors that were made in inference mode.
                x, w, dy = x.clone(), w.clone(), dy.clone()
                leaf = (x if pass_ == "backprop_input" else w).requires_grad_()
                recorded.append((forward(x, w, *rules, problem.dilation, problem.groups), leaf, dy))

        def gradient(i: int) -> Any:
            y, leaf, dy = recorded[i]
            with torch.inference_mode(False):
                return torch.autograd.grad(y, leaf, dy, retain_graph=True)[0]

        return gradient


class _CompilingPeer:
    """Base class for JAX and TensorFlow, which compile a function per problem."""

    copies = True
    errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, NotImplementedError)

    def workspace_bytes(self, _call: Call) -> int | None:
        return None

    def release(self) -> None:
        """Do nothing: neither library caches memory for long."""


class JaxPeer(_CompilingPeer):
    """JAX's convolution, compiled by XLA, on copies of NumPy arrays in the same memory order."""

    name = "jax"

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._precision = "highest"

    @contextmanager
    def settings(self, precision: str, threads: int | None = None) -> Iterator[None]:
        """Enter the settings for measuring JAX: on the CPU, with float64 enabled.

        Args:
            precision: "ieee" asks XLA for full float32 precision.
            threads: thread count of XLA, whose pool is created on first use and never resized.
        """
        config = self._jax.config
        self._precision = "highest" if precision == "ieee" else "default"
        before, variable = config.jax_enable_x64, os.environ.get("NPROC")
        if threads is not None:
            os.environ["NPROC"] = str(threads)  # XLA's pool reads it, and the affinity
        try:
            config.update("jax_enable_x64", True)
            with self._jax.default_device(self._jax.devices("cpu")[0]):
                yield
        finally:
            config.update("jax_enable_x64", before)
            if threads is not None:
                os.environ.pop("NPROC")
            if variable is not None:
                os.environ["NPROC"] = variable

    def refuses(self, problem: ConvProblem) -> str | None:
        if problem.is_complex:
            return "JAX does not conjugate the gradients of complex numbers"
        if any(
            max(pair) >= axis.effective_filter
            for pair, axis in zip(problem.padding, problem.axes, strict=True)
        ):
            # The gradient then crops, and XLA 0.10.2 reads out of bounds.
            return "XLA's gradients may crash where padding is larger than the filter"
        if problem.spatial_rank == 3 and max(problem.stride) > 1 and problem.flops > _MOST_PLAIN:
            # Version 0.10.2 did not finish in twelve minutes, and signals cannot interrupt it.
            return "a call of XLA's gradient of strided volumes takes minutes on a CPU"
        return None

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        jax = self._jax
        rules = {
            "window_strides": problem.stride,
            "padding": problem.padding,
            "rhs_dilation": problem.dilation,
            "dimension_numbers": (problem.data_format, problem.filter_format, problem.data_format),
            "feature_group_count": problem.groups,
            "precision": self._precision,
        }

        def forward(x: Any, w: Any) -> Any:
            return jax.lax.conv_general_dilated(x, w, **rules)

        def backprop_input(w: Any, dy: Any) -> Any:
            x = jax.ShapeDtypeStruct(problem.input_shape, dy.dtype)
            return jax.linear_transpose(lambda x: forward(x, w), x)(dy)[0]

        def backprop_filter(x: Any, dy: Any) -> Any:
            w = jax.ShapeDtypeStruct(problem.filter_shape, dy.dtype)
            return jax.linear_transpose(lambda w: forward(x, w), w)(dy)[0]

        function, names = {
            "forward": (forward, ("x", "w")),
            "backprop_input": (backprop_input, ("w", "dy")),
            "backprop_filter": (backprop_filter, ("x", "dy")),
        }[pass_]
        operands = [[jax.device_put(getattr(one_set, name)) for name in names] for one_set in sets]
        compiled = jax.jit(function)
        return lambda i: compiled(*operands[i]).block_until_ready()

    def to_array(self, result: Any, _problem: ConvProblem, _pass: str) -> Any:
        return np.asarray(result)


class TensorFlowPeer(_CompilingPeer):
    """TensorFlow's convolutions in a graph, on copies of NumPy arrays in the same memory order.

    Filters are transposed to TensorFlow's order before timing starts.
    """

    name = "tensorflow"

    def __init__(self, tensorflow: Any) -> None:
        self._tf = tensorflow
        self.errors = (*self.errors, tensorflow.errors.OpError)

    @contextmanager
    def settings(self, _precision: str, threads: int | None = None) -> Iterator[None]:
        """Enter the settings for measuring TensorFlow, which creates its threads on first use."""
        if threads is not None:
            with suppress(RuntimeError):  # the threads exist already
                self._tf.config.threading.set_intra_op_parallelism_threads(threads)
                self._tf.config.threading.set_inter_op_parallelism_threads(threads)
        with self._tf.device("/CPU:0"):
            yield

    def refuses(self, problem: ConvProblem) -> str | None:
        if problem.is_complex:
            return "TensorFlow has no convolution of complex numbers"
        if not problem.data_format.endswith("C"):
            return "TensorFlow takes channels last on a CPU"
        if max(problem.filter_sizes) == 1 and any(axis.unread_inputs for axis in problem.axes):
            # Version 2.21 computes these gradients with oneDNN.
            return "TensorFlow's gradients of strided filters of one tap may crash"
        return None

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        tf, forward = self._tf, self._forward(problem)
        filters = _tensorflows_filter_axes(problem)
        operands = [
            tuple(tf.constant(array) for array in (ours.x, ours.w.transpose(filters), ours.dy))
            for ours in sets
        ]

        def gradient(x: Any, w: Any, dy: Any) -> Any:
            leaf = x if pass_ == "backprop_input" else w
            with tf.GradientTape() as tape:
                tape.watch(leaf)
                y = forward(x, w)
            return tape.gradient(y, leaf, dy)

        # The graph of a gradient is pruned, so it does not compute the forward pass.
        graph = tf.function(
            gradient if pass_ != "forward" else lambda x, w, dy: forward(x, w), autograph=False
        )
        return lambda i: graph(*operands[i])

    def to_array(self, result: Any, problem: ConvProblem, pass_: str) -> Any:
        array = result.numpy()
        if pass_ == "backprop_filter":
            return array.transpose(*np.argsort(_tensorflows_filter_axes(problem)))
        return array

    def _forward(self, problem: ConvProblem) -> Callable[[Any, Any], Any]:
        """Return a forward function of x and w, where w has TensorFlow's axis order."""
        tf, rank = self._tf, problem.spatial_rank
        pads = [list(pair) for pair in problem.padding]
        strides, dilations = list(problem.stride), list(problem.dilation)
        if rank == 1:  # TensorFlow computes 1-D as 2-D with one row
            pads, strides, dilations = [[0, 0], *pads], strides * 2, [1, *dilations]

        rules: dict[str, Any] = {"strides": [1, *strides, 1], "padding": "VALID"}
        function, pad_widths = tf.nn.conv3d, [[0, 0], *pads, [0, 0]]
        if not any(map(any, pads)):
            pad_widths = []
        elif problem.padding == problem.replace(padding="same").padding:
            rules["padding"], pad_widths = "SAME", []
        elif rank < 3 and max(dilations) == 1:
            rules["padding"], pad_widths = pad_widths, []
        depthwise = rank < 3 and 1 < problem.groups == problem.C
        if rank < 3:
            function = tf.nn.depthwise_conv2d if depthwise else tf.nn.conv2d
        rules["dilations"] = dilations if depthwise else [1, *dilations, 1]

        def forward(x: Any, w: Any) -> Any:
            if rank == 1:
                x, w = tf.expand_dims(x, 1), tf.expand_dims(w, 0)
            if depthwise:
                w = tf.reshape(w, [*w.shape[:2], problem.C, problem.K // problem.C])
            y = function(tf.pad(x, pad_widths) if pad_widths else x, w, **rules)
            return tf.squeeze(y, 1) if rank == 1 else y

        return forward


def _axes(problem: ConvProblem, pass_: str) -> tuple[int, ...]:
    """Return the positions of N, C and spatial axes in a result, or of O, I, spatial in dw."""
    return problem.filter_axes if pass_ == "backprop_filter" else problem.data_axes


def _tensorflows_filter_axes(problem: ConvProblem) -> tuple[int, ...]:
    """Return the positions of a filter's axes in the order spatial, I, O."""
    outputs, inputs, *spatial = problem.filter_axes
    return (*spatial, inputs, outputs)
