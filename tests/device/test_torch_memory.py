"""Memory of cupyconv.torch on a GPU comes from PyTorch's allocator, on PyTorch's stream.

PyTorch does not see the emulated devices.  A tensor here is a stand-in over CuPy's memory, and
``torch.empty`` a stand-in for PyTorch's caching allocator; the operators are the library's.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from types import SimpleNamespace

import cupy
import numpy as np
import pytest
from cuda.bindings import driver as bindings
from cupy.cuda import runtime

import cupyconv
from cupyconv.problem import PASSES
from tests.agreement import compute, require_equal
from tests.configurations import Data, integer_data
from tests.device import graphs, machine, memory
from tests.device.test_driver import MODES
from tests.device.test_order import ORDERS
from tests.operations.test_host_cost import entered

torch = pytest.importorskip("torch")

from cupyconv.torch import operators  # noqa: E402 (needs PyTorch)

WINDOW = ([1, 1], [0, 0, 0, 0], [1, 1], 1)
"""Stride, padding, dilation and groups of the operators."""


class Tensor:
    """A stand-in for a CUDA tensor, backed by a CuPy array."""

    requires_grad = False

    def __init__(self, array):
        self.array = array
        self.shape = torch.Size(array.shape)
        self.dtype = getattr(torch, array.dtype.name)
        self.device = torch.device("cuda", array.device.id)

    def dim(self):
        return self.array.ndim

    def stride(self, axis):
        return self.array.strides[axis] // self.array.itemsize

    def data_ptr(self):
        return self.array.data.ptr

    def is_complex(self):
        return self.dtype.is_complex

    def conj(self):
        return Tensor(separate_array(self.array.conj()))

    def detach(self):
        return self

    resolve_conj = resolve_neg = detach

    def __dlpack__(self, **keywords):
        return self.array.__dlpack__(**keywords)

    def __dlpack_device__(self):
        return self.array.__dlpack_device__()


def separate_array(values):
    """Return a CuPy array in a separate allocation, independent of CuPy's allocator."""
    with cupy.cuda.using_allocator(cupy.cuda.malloc_async):
        return cupy.asarray(values)


@dataclass(eq=False)
class Block:
    """Memory of the caching allocator's stand-in.

    Attributes:
        size, device, stream: as requested.
        address: its address.
        is_held: whether a tensor uses it.
    """

    size: int
    device: int
    stream: int
    address: int
    is_held: bool = True


@dataclass
class CachingAllocator:
    """A stand-in for PyTorch's caching allocator.

    A block is freed in the order of its stream, as soon as its tensor is dropped.  While a private
    pool is set, blocks belong to the pool, which keeps them for its graph.

    Attributes:
        stream: PyTorch's current stream.
        blocks: all requested blocks.
        private: blocks of the private pool of the current capture; None without a capture.
    """

    stream: cupy.cuda.Stream
    blocks: list[Block] = field(default_factory=list)
    private: list[Block] | None = None

    def empty(self, shape, *, dtype, device, memory_format=torch.contiguous_format):
        shape = (shape,) if isinstance(shape, int) else tuple(shape)
        assert memory_format is torch.contiguous_format
        kind = np.dtype(str(dtype).removeprefix("torch."))
        size = int(np.prod(shape)) * kind.itemsize
        with cupy.cuda.Device(device.index):
            block = self._take(size, device.index)
            self.blocks.append(block)
            owner = Owner(block, self.private is not None)
            unowned = cupy.cuda.UnownedMemory(block.address, size, owner, device.index)
            return Tensor(cupy.ndarray(shape, kind, cupy.cuda.MemoryPointer(unowned, 0)))

    def _take(self, size, device):
        """Return a block on the current device."""
        if self.private is None:
            address = runtime.mallocAsync(size, self.stream.ptr)
            return Block(size, device, self.stream.ptr, address)
        for block in self.private:
            if not block.is_held and block.size == size:
                block.is_held = True
                return block
        relaxed = bindings.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_RELAXED
        _, before = bindings.cuThreadExchangeStreamCaptureMode(relaxed)
        block = Block(size, device, self.stream.ptr, runtime.malloc(size))
        bindings.cuThreadExchangeStreamCaptureMode(before)
        self.private.append(block)
        return block


class Owner:
    """Owner of a tensor's block; frees the block when the tensor is dropped."""

    def __init__(self, block, is_private):
        self.block, self.is_private = block, is_private

    def __del__(self):
        self.block.is_held = False
        if not self.is_private:
            runtime.freeAsync(self.block.address, self.block.stream)


@pytest.fixture
def pytorch(monkeypatch, allocator):
    """Stand-in for PyTorch's allocator and stream; any use of CuPy's allocator fails the test."""
    stream = cupy.cuda.Stream(non_blocking=True)
    stand_in = CachingAllocator(stream)
    monkeypatch.setattr(torch, "empty", stand_in.empty)
    monkeypatch.setattr(
        torch.cuda, "current_stream", lambda _: SimpleNamespace(cuda_stream=stand_in.stream.ptr)
    )

    def refuse(size):
        raise AssertionError(f"CuPy's allocator is asked for {size} bytes")

    allocator(refuse)
    return stand_in


SHAPES = {
    "forward": ((1, 64, 4, 4), (8, 64, 3, 3)),
    "backprop_input": ((1, 8, 4, 4), (64, 8, 3, 3)),
    "backprop_filter": ((4, 8, 8, 8), (8, 8, 3, 3)),
}
"""Input and filter shapes of small layers with a workspace on both devices, by pass."""


def layer(pass_="forward"):
    problem = cupyconv.ConvProblem(*SHAPES[pass_], dtype="float16")
    return problem, integer_data(problem)


def run(pass_, x, w, dy, bias):
    if pass_ == "forward":
        return operators._run_forward(x, w, bias, *WINDOW)
    if pass_ == "backprop_input":
        return operators._run_backprop_input(list(x.shape), w, dy, None, *WINDOW)
    return operators._run_backprop_filter(x, list(w.shape), dy, *WINDOW)


def tensors(data):
    return [Tensor(separate_array(array)) for array in (data.x, data.w, data.dy, data.bias)]


def host(tensor, stream):
    return cupy.asnumpy(tensor.array, stream=stream)


@pytest.mark.parametrize("ordinal", [0, 1])
@pytest.mark.parametrize("order", ["", *ORDERS])
@pytest.mark.parametrize("pass_", PASSES)
def test_workspace_comes_from_pytorch_stream(pass_, order, ordinal, pytorch):
    problem, data = layer(pass_)
    with cupy.cuda.Device(ordinal):
        pytorch.stream = cupy.cuda.Stream(non_blocking=True)
        size = cupyconv.plan(problem)[pass_].workspace_bytes
        assert size
        with machine.order(machine.named(order)):
            with pytorch.stream:
                operands = tensors(data)
            result = run(pass_, *operands)
            first, *workspaces = pytorch.blocks
            assert (first.size, first.is_held) == (result.array.nbytes, True)
            assert [(block.size, block.is_held) for block in workspaces] == [(size, False)]
            for block in pytorch.blocks:
                assert (block.device, block.stream) == (ordinal, pytorch.stream.ptr)
            expected = compute(cupyconv, pass_, problem, data, impl="reference")
            require_equal(host(result, pytorch.stream), expected, pass_)


def test_operand_copies_come_from_pytorch(pytorch):
    """A transposed convolution with a bias conjugates and copies the filter."""
    problem = cupyconv.ConvProblem((2, 3, 8, 8), (4, 3, 3, 3), dtype="complex64")
    data = integer_data(problem)
    bias = np.arange(3).astype("complex64")
    with pytorch.stream:
        w, dy, b = (Tensor(separate_array(array)) for array in (data.w, data.dy, bias))
    result = operators._run_backprop_input(list(problem.input_shape), w, dy, b, *WINDOW)
    expected = cupyconv.conv_transpose(data.dy, data.w.conj(), bias, impl="reference")
    require_equal(host(result, pytorch.stream), expected, "transposed")
    assert data.w.nbytes in [block.size for block in pytorch.blocks[1:]]
    assert [block.is_held for block in pytorch.blocks] == [True] + [False] * len(pytorch.blocks[1:])


def test_measurement_uses_pytorch_memory(pytorch, own_cache, monkeypatch):
    monkeypatch.setattr(cupyconv, "benchmark", True)
    problem, data = layer()
    with pytorch.stream:
        operands = tensors(data)
    result = run("forward", *operands)
    expected = compute(cupyconv, "forward", problem, data, impl="reference")
    require_equal(host(result, pytorch.stream), expected, "forward")
    assert len(pytorch.blocks) > 2
    assert sum(block.is_held for block in pytorch.blocks) == 1


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("pass_", PASSES)
def test_captured_call_uses_private_pool(pass_, mode, pytorch, nothing_loaded):
    """PyTorch keeps that pool for the graph, so no node of the graph allocates memory."""
    problem, data = layer(pass_)
    with pytorch.stream:
        operands = tensors(data)
    pytorch.stream.synchronize()
    pytorch.private = []
    with pytorch.stream as stream:
        stream.begin_capture(MODES[mode])
        result = run(pass_, *operands)
        (recording,) = graphs._captures
        assert not recording.graph.memory
        again = run(pass_, *operands)
        graph = stream.end_capture()
    sizes = [block.size for block in pytorch.private]
    assert len(sizes) == 3, "expected two results and one reused workspace"
    pytorch.private = None
    values = [np.flip(array).copy() for array in vars(data).values()]
    for tensor, array in zip(operands, values, strict=True):
        tensor.array.set(array, stream=stream)
    expected = compute(cupyconv, pass_, problem, Data(*values), impl="reference")
    for _ in range(2):
        graph.launch(stream)
        for output in (result, again):
            require_equal(host(output, stream), expected, f"{pass_}, replayed")


def test_pytorch_memory_error_is_raised(pytorch):
    _, data = layer()
    with pytorch.stream:
        operands = tensors(data)
    run("forward", *operands)
    with memory.allocations_left(1), pytest.raises(runtime.CUDARuntimeError, match="Memory"):
        run("forward", *operands)
    assert sum(block.is_held for block in pytorch.blocks) == 0


def test_call_restores_cupy_allocator_and_stream(pytorch):
    before = cupy.cuda.get_allocator(), cupy.cuda.get_current_stream()
    _, data = layer()
    with pytorch.stream:
        operands = tensors(data)
    run("forward", *operands)
    assert (cupy.cuda.get_allocator(), cupy.cuda.get_current_stream()) == before


@pytest.mark.parametrize(("dtype", "blocks"), [("float16", 2), ("float64", 1)])
def test_repeated_call_allocates_each_array_once(dtype, blocks, pytorch):
    """CuPy's stream and allocator are cached; without a workspace no capture check is needed."""
    problem = layer("forward" if blocks == 2 else "backprop_input")[0].replace(dtype=dtype)
    assert bool(cupyconv.plan(problem)["forward"].workspace_bytes) == (blocks == 2)
    with pytorch.stream:
        operands = tensors(integer_data(problem))
    run("forward", *operands)
    count = len(pytorch.blocks)
    functions = entered(lambda: run("forward", *operands))
    assert len(pytorch.blocks) == count + blocks
    assert [name for file, name in functions if file.endswith("capture.py")] == (
        ["allocate", "__call__"] if blocks == 2 else []
    )
    assert not {"_stream", "_allocator", "is_active"} & {name for _, name in functions}


@pytest.mark.parametrize("size", [0, 1, 4096])
def test_allocate_returns_bytes(size):
    buffer = operators.allocate(size, torch.device("cpu"))
    assert (buffer.dtype, buffer.numel(), buffer.device.type) == (torch.uint8, size, "cpu")
