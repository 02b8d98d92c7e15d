"""PyTorch, where it is installed: what every layer is compared with.

On a GPU it is called as fast as it goes: cudnn.benchmark on, so that cuDNN's algorithms are tried
on the first call; TF32 only where the run permits it to us too; and each gradient alone.  Operands
share memory with our arrays.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib import import_module
from typing import Any

from cupyconv.bench.places import Place
from cupyconv.bench.timing import Call
from cupyconv.checking import Operands
from cupyconv.problem import ConvProblem

NAME = "torch"

_FORWARDS = {1: "conv1d", 2: "conv2d", 3: "conv3d"}


def find(place: Place) -> tuple[TorchPeer | None, str]:
    """PyTorch for this place, and if it cannot be had, why."""
    try:
        torch: Any = import_module("torch")
    except ImportError:
        return None, "PyTorch is not installed"
    except OSError as error:  # a library of its own that does not load
        return None, f"PyTorch could not be imported: {error}"
    if place.name == "gpu" and not torch.cuda.is_available():
        return None, f"this PyTorch ({torch.__version__}) has no CUDA device"
    return TorchPeer(place, torch), ""


class TorchPeer:
    """PyTorch's convolutions on the arrays of a place."""

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
        """Why PyTorch cannot do a problem; None if it can."""
        if any(before != after for before, after in problem.padding):
            return "PyTorch pads both sides alike"
        return None

    def call(
        self, problem: ConvProblem, pass_: str, sets: Sequence[Operands]
    ) -> Callable[[int], Any]:
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
            return self.to_array(self._pass(problem, pass_, [operands])(0), problem.dtype)
        finally:
            cudnn.benchmark = before

    def to_array(self, tensor: Any, dtype: str) -> Any:
        """An array of the place over a tensor's memory."""
        xp = self._place.xp
        if dtype != "bfloat16":
            return xp.from_dlpack(tensor.resolve_conj())
        from cupyconv.arrays import numpy_dtype

        # bfloat16 is not among the dtypes that NumPy exchanges, 16-bit integers are.
        return xp.from_dlpack(tensor.view(self._torch.int16)).view(numpy_dtype(dtype))

    def workspace_bytes(self, call: Call) -> int | None:
        """Device memory that a call takes at its peak beside its result; None on the CPU."""
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
        """Give back memory that PyTorch keeps for later tensors."""
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
