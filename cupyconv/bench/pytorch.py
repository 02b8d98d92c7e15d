"""PyTorch, with which a run compares cupyconv.

PyTorch uses as many threads as cupyconv, and may use TF32 only if cupyconv may.  On a GPU,
``torch.backends.cudnn.benchmark`` is set, so that cuDNN tries its algorithms on the first call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from cupyconv.arrays import numpy_dtype
from cupyconv.bench.places import Place
from cupyconv.bench.timing import Call
from cupyconv.checking import Operands
from cupyconv.problem import ConvProblem
from cupyconv.signals import import_whole

_FORWARDS = {1: "conv1d", 2: "conv2d", 3: "conv3d"}

ERRORS = (RuntimeError, NotImplementedError)
"""Exceptions that PyTorch raises for an unsupported problem."""


def find(place: Place) -> tuple[PyTorch | None, str]:
    """Return PyTorch and an empty string, or None and the reason why it is unavailable."""
    try:
        torch: Any = import_whole("torch")
    except ImportError:
        return None, "PyTorch is not installed"
    except Exception as error:  # of any type, for example if a shared library is missing
        why, _, _ = str(error).partition("\n")
        return None, f"PyTorch could not be imported: {why or type(error).__name__}"
    if place.name == "gpu" and not torch.cuda.is_available():
        return None, f"this PyTorch ({torch.__version__}) has no CUDA device"
    return PyTorch(place, torch), ""


class PyTorch:
    """PyTorch's convolutions on tensors that share the memory of a place's arrays."""

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
        """Return why a problem is unsupported; None if it is supported."""
        if any(before != after for before, after in problem.padding):
            return "PyTorch pads both sides equally"
        return None

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        """Return a function that runs a pass on the operand set with a given index.

        The function returns a tensor (N, C, *spatial) or (K, C / groups, *spatial).  On the CPU,
        the tensor is complete when the function returns.
        """
        return self._pass(problem, pass_, [self._operands(problem, one) for one in sets])

    def to_array(self, tensor: Any, problem: ConvProblem, pass_: str) -> Any:
        """Return an array in the problem's axis order that shares a result's memory."""
        positions = problem.filter_axes if pass_ == "backprop_filter" else problem.data_axes
        axes = np.argsort(positions)
        xp = self._place.xp
        if problem.dtype != "bfloat16":
            return xp.from_dlpack(tensor.resolve_conj()).transpose(*axes)
        # NumPy cannot import bfloat16 through DLPack, so the bits travel as 16-bit integers.
        array = xp.from_dlpack(tensor.view(self._torch.int16)).view(numpy_dtype(problem.dtype))
        return array.transpose(*axes)

    def workspace_bytes(self, call: Call) -> int | None:
        """Return the peak device memory of a call without its result; None on the CPU."""
        if self._place.name == "cpu":
            return None
        cuda = self._torch.cuda
        self._place.synchronize()
        before = cuda.memory_allocated()
        cuda.reset_peak_memory_stats()
        result = call(0)
        self._place.synchronize()
        used = cuda.max_memory_allocated() - before
        return max(used - result.numel() * result.element_size(), 0)

    def release(self) -> None:
        """Free memory that is cached for later tensors."""
        if self._place.name == "gpu":
            self._torch.cuda.empty_cache()

    def _operands(self, problem: ConvProblem, operands: Operands) -> tuple[Any, Any, Any]:
        """Return x, w and dy as views with PyTorch's axis order."""
        data, filters = problem.data_axes, problem.filter_axes
        return (
            self.tensor(operands.x).permute(data),
            self.tensor(operands.w).permute(filters),
            self.tensor(operands.dy).permute(data),
        )

    def tensor(self, array: Any) -> Any:
        """Return a tensor that shares the memory of an array."""
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
