"""PyTorch, and on the CPU JAX and TensorFlow, where they are installed: what ours is compared with.

Each is called as fast as it goes: compiled, if it compiles, before anything is timed; each gradient
alone; on as many threads as ours.  On a GPU, PyTorch has cudnn.benchmark on, so that cuDNN's
algorithms are tried on the first call, and TF32 only where the run permits it to us too.
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
"""What is measured beside cupyconv, by the names that rows have for it."""

NAMES = {"cpu": tuple(PEERS), "gpu": ("torch",)}
"""Of those that are measured where nothing else is asked for, by place."""

_FORWARDS = {1: "conv1d", 2: "conv2d", 3: "conv3d"}

_MOST_PLAIN = 1e9
"""Operations of a pass that XLA may compute one by one."""


class Peer(Protocol):
    """What a run needs of a library that it measures beside cupyconv."""

    name: str
    """One of PEERS."""

    copies: bool
    """Whether its operands take memory of their own."""

    errors: tuple[type[Exception], ...]
    """What it raises where it cannot do a problem."""

    def settings(
        self, precision: str, threads: int | None = None
    ) -> AbstractContextManager[None]: ...

    def refuses(self, problem: ConvProblem) -> str | None:
        """Why it cannot do a problem; None if it can."""
        ...

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        """One pass on the set of this number, with a result of its own kind, ready."""
        ...

    def to_array(self, result: Any, problem: ConvProblem, pass_: str) -> Any:
        """A result as an array of the place, with the axes that the problem says."""
        ...

    def workspace_bytes(self, call: Call) -> int | None:
        """Device memory that a call takes at its peak beside its result; None on the CPU."""
        ...

    def release(self) -> None:
        """Give back memory that is kept for later tensors."""
        ...


def find(place: Place, name: str = "torch") -> tuple[Peer | None, str]:
    """One of PEERS for this place, and if it cannot be had, why."""
    label = PEERS[name]
    if name not in NAMES[place.name]:
        return None, f"{label} is measured on the CPU only"
    if name == "tensorflow":
        os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")  # standard error is not its own
    try:
        library: Any = import_module(name)
    except ImportError:
        return None, f"{label} is not installed"
    except Exception as error:  # of its own: a library that does not load, a version too new
        why, _, _ = str(error).partition("\n")
        return None, f"{label} could not be imported: {why or type(error).__name__}"
    if name != "torch":
        return (JaxPeer if name == "jax" else TensorFlowPeer)(library), ""
    if place.name == "gpu" and not library.cuda.is_available():
        return None, f"this PyTorch ({library.__version__}) has no CUDA device"
    return TorchPeer(place, library), ""


class TorchPeer:
    """PyTorch's convolutions on the arrays of a place, whose memory its tensors share."""

    name = "torch"
    copies = False
    errors: tuple[type[Exception], ...] = (RuntimeError, NotImplementedError)

    def __init__(self, place: Place, torch: Any) -> None:
        self._place, self._torch = place, torch

    @contextmanager
    def settings(self, precision: str, threads: int | None = None) -> Iterator[None]:
        """PyTorch as it is measured; its settings are put back afterwards.

        Args:
            precision: "tf32" permits tensor cores to round float32 operands.
            threads: of PyTorch on the CPU.
        """
        torch = self._torch
        wanted = [
            (torch.backends.cudnn, "benchmark", True),
            (torch.backends.cudnn, "allow_tf32", precision == "tf32"),
            (torch.backends.cuda.matmul, "allow_tf32", precision == "tf32"),
        ]
        before = [(owner, name, getattr(owner, name)) for owner, name, _ in wanted]
        threads_before = torch.get_num_threads()
        try:
            for owner, name, value in wanted:
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
        """PyTorch on the stream that CuPy's events are recorded on."""
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
            return "PyTorch pads both sides alike"
        return None

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        """One pass on the set of this number; results are tensors of (N, C, spatial) or OI axes."""
        tensors = [self._operands(problem, one) for one in sets]
        return self._pass(problem, pass_, tensors)

    def exact(self, problem: ConvProblem, pass_: str, x: Any, w: Any, dy: Any) -> Any:
        """One pass of float64 or complex128 arrays, channels first, as an array of the place."""
        torch = self._torch
        cudnn = torch.backends.cudnn
        before, cudnn.benchmark = cudnn.benchmark, False  # one call: not worth trying algorithms
        try:
            operands = tuple(self._tensor(array) for array in (x, w, dy))
            return self.to_array(self._pass(problem, pass_, [operands])(0), problem, pass_)
        finally:
            cudnn.benchmark = before

    def to_array(self, tensor: Any, problem: ConvProblem, pass_: str) -> Any:
        """An array over a tensor's memory."""
        axes = np.argsort(_axes(problem, pass_))
        xp = self._place.xp
        if problem.dtype != "bfloat16":
            return xp.from_dlpack(tensor.resolve_conj()).transpose(*axes)
        from cupyconv.arrays import numpy_dtype

        # bfloat16 is not among the dtypes that NumPy exchanges, 16-bit integers are.
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
        """A square matrix product of random numbers."""
        torch = self._torch
        device = "cuda" if self._place.name == "gpu" else "cpu"
        kind = getattr(torch, dtype)
        a, b = (torch.randn(size, size, device=device).to(kind) for _ in range(2))
        return lambda _: a @ b

    def copy(self, size: int) -> Call:
        """A copy of this many bytes."""
        torch = self._torch
        device = "cuda" if self._place.name == "gpu" else "cpu"
        source = torch.randn(size // 4, device=device)
        target = torch.empty_like(source)
        return lambda _: target.copy_(source)

    def _operands(self, problem: ConvProblem, one: Operands) -> tuple[Any, Any, Any]:
        """x, w and dy with their axes in PyTorch's order, in the memory that they have."""
        data, filters = problem.data_axes, problem.filter_axes
        return (
            self._tensor(one.x).permute(data),
            self._tensor(one.w).permute(filters),
            self._tensor(one.dy).permute(data),
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
        wanted = 0 if pass_ == "backprop_input" else 1
        mask = [wanted == 0, wanted == 1, False]
        zeros = [0] * rank
        return lambda i: backward(
            operands[i][2], operands[i][0], operands[i][1],
            None, stride, padding, dilation, False, zeros, groups, mask,
        )[wanted]  # fmt: skip

    def _complex_gradient(
        self, problem: ConvProblem, pass_: str, operands: Sequence[tuple[Any, Any, Any]]
    ) -> Callable[[int], Any]:
        """One gradient of complex numbers, of which PyTorch has no operator: by its autograd."""
        torch = self._torch
        forward = getattr(torch, _FORWARDS[problem.spatial_rank])
        rules = (None, problem.stride, [before for before, _ in problem.padding])
        recorded = []
        with torch.inference_mode(False), torch.enable_grad():
            for x, w, dy in operands:
                # Of their own: what is made in inference mode cannot be recorded.
                x, w, dy = x.clone(), w.clone(), dy.clone()
                leaf = (x if pass_ == "backprop_input" else w).requires_grad_()
                recorded.append((forward(x, w, *rules, problem.dilation, problem.groups), leaf, dy))

        def gradient(i: int) -> Any:
            y, leaf, dy = recorded[i]
            with torch.inference_mode(False):
                return torch.autograd.grad(y, leaf, dy, retain_graph=True)[0]

        return gradient


class _CompilingPeer:
    """What JAX and TensorFlow have in common: functions that are compiled for a problem."""

    copies = True
    errors: tuple[type[Exception], ...] = (RuntimeError, ValueError, NotImplementedError)

    def workspace_bytes(self, _call: Call) -> int | None:
        return None

    def release(self) -> None:
        """They keep none for long."""


class JaxPeer(_CompilingPeer):
    """JAX's convolution, compiled by XLA, on copies of NumPy arrays in their memory order."""

    name = "jax"

    def __init__(self, jax: Any) -> None:
        self._jax = jax
        self._precision = "highest"

    @contextmanager
    def settings(self, precision: str, threads: int | None = None) -> Iterator[None]:
        """JAX as it is measured, on the CPU, with float64.

        Args:
            precision: "ieee" asks XLA for float32 that is float32.
            threads: of XLA, whose pool is made when it is first used and stays as it is.
        """
        config = self._jax.config
        self._precision = "highest" if precision == "ieee" else "default"
        before, variable = config.jax_enable_x64, os.environ.get("NPROC")
        if threads is not None:
            os.environ["NPROC"] = str(threads)  # all that XLA's pool looks at, beside the affinity
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
            # Its gradient crops then, and XLA 0.10.2 reads memory that is not its own.
            return "padding reaches beyond the filter, where XLA's gradients may crash"
        if problem.spatial_rank == 3 and max(problem.stride) > 1 and problem.flops > _MOST_PLAIN:
            # 0.10.2 was ended after twelve of them; no signal comes through such a call.
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
        operands = [[jax.device_put(getattr(one, name)) for name in names] for one in sets]
        compiled = jax.jit(function)
        return lambda i: compiled(*operands[i]).block_until_ready()

    def to_array(self, result: Any, _problem: ConvProblem, _pass: str) -> Any:
        return np.asarray(result)


class TensorFlowPeer(_CompilingPeer):
    """TensorFlow's convolutions in a graph, on copies of NumPy arrays in their memory order.

    Filters are in TensorFlow's own order before anything is timed.
    """

    name = "tensorflow"

    def __init__(self, tensorflow: Any) -> None:
        self._tf = tensorflow
        self.errors = (*self.errors, tensorflow.errors.OpError)

    @contextmanager
    def settings(self, _precision: str, threads: int | None = None) -> Iterator[None]:
        """TensorFlow as it is measured; its threads are made when it is first used."""
        if threads is not None:
            with suppress(RuntimeError):  # they have been
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
            # Those of oneDNN in 2.21.
            return "TensorFlow's gradients of strided filters of one tap may crash"
        return None

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        tf, forward = self._tf, self._forward(problem)
        filters = _tensorflows_filter_axes(problem)
        operands = [
            tuple(tf.constant(array) for array in (one.x, one.w.transpose(filters), one.dy))
            for one in sets
        ]

        def gradient(x: Any, w: Any, dy: Any) -> Any:
            leaf = x if pass_ == "backprop_input" else w
            with tf.GradientTape() as tape:
                tape.watch(leaf)
                y = forward(x, w)
            return tape.gradient(y, leaf, dy)

        # The graph leaves out what its result does not need: forward, of a gradient.
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
        """y of x, and w in TensorFlow's order."""
        tf, rank = self._tf, problem.spatial_rank
        pads = [list(pair) for pair in problem.padding]
        strides, dilations = list(problem.stride), list(problem.dilation)
        if rank == 1:  # which TensorFlow computes as rows of one
            pads, strides, dilations = [[0, 0], *pads], strides * 2, [1, *dilations]

        rules: dict[str, Any] = {"strides": [1, *strides, 1], "padding": "VALID"}
        function, before = tf.nn.conv3d, [[0, 0], *pads, [0, 0]]
        if not any(map(any, pads)):
            before = []
        elif problem.padding == problem.replace(padding="same").padding:
            rules["padding"], before = "SAME", []
        elif rank < 3 and max(dilations) == 1:
            rules["padding"], before = before, []
        depthwise = rank < 3 and 1 < problem.groups == problem.C
        if rank < 3:
            function = tf.nn.depthwise_conv2d if depthwise else tf.nn.conv2d
        rules["dilations"] = dilations if depthwise else [1, *dilations, 1]

        def forward(x: Any, w: Any) -> Any:
            if rank == 1:
                x, w = tf.expand_dims(x, 1), tf.expand_dims(w, 0)
            if depthwise:
                w = tf.reshape(w, [*w.shape[:2], problem.C, problem.K // problem.C])
            y = function(tf.pad(x, before) if before else x, w, **rules)
            return tf.squeeze(y, 1) if rank == 1 else y

        return forward


def _axes(problem: ConvProblem, pass_: str) -> tuple[int, ...]:
    """Where a result has (N, C, spatial), or the axes of filters, O I + spatial."""
    return problem.filter_axes if pass_ == "backprop_filter" else problem.data_axes


def _tensorflows_filter_axes(problem: ConvProblem) -> tuple[int, ...]:
    """Where a filter has the axes spatial + I O."""
    outputs, inputs, *spatial = problem.filter_axes
    return (*spatial, inputs, outputs)
