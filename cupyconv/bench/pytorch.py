"""PyTorch's convolutions, with which a run compares cupyconv's.

PyTorch and cupyconv use the same number of threads and the same precision.  The flag
``torch.backends.cudnn.benchmark`` is set, so that cuDNN tries its algorithms on the first call.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import numpy as np

from cupyconv.arrays import numpy_dtype
from cupyconv.bench.environment import first_line
from cupyconv.bench.places import Place
from cupyconv.bench.timing import Call
from cupyconv.checking import Operands
from cupyconv.errors import ConvError
from cupyconv.problem import ConvProblem
from cupyconv.signals import import_whole

ERRORS = (RuntimeError, NotImplementedError)
"""Exceptions that PyTorch raises for an unsupported problem."""


def find(place: Place) -> tuple[PyTorch | None, str]:
    """Return PyTorch and an empty string, or None and the reason why it is unavailable."""
    try:
        torch: Any = import_whole("torch")
    except ImportError:
        return None, "PyTorch is not installed"
    except Exception as error:  # of any type, for example if a shared library is missing
        return None, f"PyTorch could not be imported: {first_line(error)}"
    if place.name == "gpu" and not torch.cuda.is_available():
        return None, f"this PyTorch ({torch.__version__}) has no CUDA device"
    return PyTorch(place, torch), ""


class PyTorch:
    """PyTorch's convolutions on tensors that share the memory of a place's arrays."""

    def __init__(self, place: Place, torch: Any) -> None:
        self._place, self._torch = place, torch

    @contextmanager
    def settings(self, precision: str, threads: int | None = None) -> Iterator[None]:
        """Set PyTorch's flags, threads and stream for measurements; restore them afterwards.

        Args:
            precision: "tf32" permits tensor cores to round float32 operands to TF32; any other
                value forbids it.
            threads: number of CPU threads; None to leave it unchanged.
        """
        torch = self._torch
        values = [
            (torch.backends.cudnn, "benchmark", True),
            (torch.backends.cudnn, "allow_tf32", precision == "tf32"),
            (torch.backends.cuda.matmul, "allow_tf32", precision == "tf32"),
        ]
        with ExitStack() as stack:
            for owner, name, value in values:
                stack.callback(setattr, owner, name, getattr(owner, name))
                setattr(owner, name, value)
            stack.callback(torch.set_num_threads, torch.get_num_threads())
            if threads is not None:
                torch.set_num_threads(threads)
            stack.enter_context(torch.inference_mode())
            if self._place.name == "gpu":  # use the stream on which CuPy records its events
                pointer = self._place.xp.cuda.get_current_stream().ptr
                if pointer != torch.cuda.current_stream().cuda_stream:
                    external = torch.cuda.ExternalStream(pointer)
                    stack.enter_context(torch.cuda.stream(external))
            yield

    def refuses(self, problem: ConvProblem, pass_: str) -> str | None:
        """Return why PyTorch does not support a pass of a problem; None if it does."""
        if any(before != after for before, after in problem.padding):
            return "PyTorch pads both sides equally"
        if problem.is_complex and pass_ != "forward":
            return "PyTorch has no operator for complex gradients"
        return None

    def call(self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]) -> Call:
        """Return a function that takes the index of an operand set and runs a pass on this set.

        Raises:
            ConvError: PyTorch does not support the pass.
        """
        if refusal := self.refuses(problem, pass_):
            raise ConvError("the pass must be one that PyTorch supports", refusal)
        torch, groups, rank = self._torch, problem.groups, problem.spatial_rank
        stride, dilation = list(problem.stride), list(problem.dilation)
        padding = [before for before, _ in problem.padding]
        axes = problem.data_axes, problem.filter_axes, problem.data_axes
        tensors = [
            tuple(self.tensor(array).permute(a) for array, a in zip(operands, axes, strict=True))
            for operands in sets
        ]
        if pass_ == "forward":
            convolution = (torch.conv1d, torch.conv2d, torch.conv3d)[rank - 1]
            pairs = [(x, w) for x, w, _ in tensors]
            return lambda i: convolution(*pairs[i], None, stride, padding, dilation, groups)
        backward = torch.ops.aten.convolution_backward.default
        operand = 0 if pass_ == "backprop_input" else 1
        mask = [operand == 0, operand == 1, False]
        zeros = [0] * rank
        return lambda i: backward(
            tensors[i][2], tensors[i][0], tensors[i][1],
            None, stride, padding, dilation, False, zeros, groups, mask,
        )[operand]  # fmt: skip

    def to_array(self, tensor: Any, problem: ConvProblem, pass_: str) -> Any:
        """Return a result of ``call`` as an array in the problem's axis order, without a copy."""
        is_filter = pass_ == "backprop_filter"
        axes = np.argsort(problem.filter_axes if is_filter else problem.data_axes)
        xp = self._place.xp
        if problem.dtype != "bfloat16":
            return xp.from_dlpack(tensor.resolve_conj()).transpose(*axes)
        # NumPy cannot import bfloat16 through DLPack, so the bits are passed as 16-bit integers.
        array = xp.from_dlpack(tensor.view(self._torch.int16)).view(numpy_dtype(problem.dtype))
        return array.transpose(*axes)

    def release(self) -> None:
        """Free memory that is cached for later tensors."""
        if self._place.name == "gpu":
            self._torch.cuda.empty_cache()

    def tensor(self, array: Any) -> Any:
        """Return a tensor that shares the memory of an array."""
        torch = self._torch
        if array.dtype.name != "bfloat16":
            return torch.from_dlpack(array)
        return torch.from_dlpack(array.view("int16")).view(torch.bfloat16)
