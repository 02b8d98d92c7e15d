"""What a call costs the host: a repeated one is looked up, and only its launch is made.

The arrays are CuPy's own, over addresses that nothing reads, and the kernels do nothing, so that no
GPU is needed.  Functions of the library that are entered are counted; time is measured on a GPU,
by tests/gpu/test_cupy.py.
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvTypeError, arrays, backends
from cupyconv.gpu import launch, tensormaps
from cupyconv.gpu.launch import ROLES, Launch, Part
from cupyconv.gpu.tensormaps import TensorMaps, TiledMap
from cupyconv.planning import Device

cupy = pytest.importorskip("cupy")

FEW = 24
"""Functions that a repeated call may enter; 12 to 23, of kernels with tensor maps the most."""
CHECKS_OF_OUT = 8

OF_A_LAYER, OF_A_CORRELATION = 40, 25
"""And with NumPy's computation of a small layer: around its correlations, and in each."""

SOURCES = Path(cupyconv.__file__).parent
FAST = {"operations.py", "backends.py", "arrays.py", "launch.py", "tensormaps.py", "<string>"}
"""Where the functions of a repeated call are; "<string>" has the constructors of named tuples."""

FORMATS = {"data_format": "NHWC", "filter_format": "OHWI"}


class IdleRuntime(launch.CupyRuntime):
    """Kernels that are never run; what they were launched with is kept."""

    def __init__(self, architecture):
        super().__init__(architecture)
        self.launched = []
        self.encoded = []
        self.loaded = []

    def load(self, launches):
        self.loaded.append([one.entry for one in launches])

    def kernel(self, one):
        def launched(grid, block, arguments, shared_mem):
            self.launched.append((one.source, arguments))

        return launched

    def allow(self, kernel, shared_bytes):
        pass

    def encode(self, one, address):
        self.encoded.append((one.role, address))
        return bytes(tensormaps.MAP_BYTES)


class Memory:
    """Hands out addresses, as CuPy's allocator does."""

    def __init__(self):
        self.next = 1 << 40

    def array(self, shape, dtype="float16", device=0, offset=0):
        memory = cupy.cuda.UnownedMemory(self.next + offset, 1 << 32, None, device)
        made = cupy.ndarray(shape, arrays.numpy_dtype(dtype), cupy.cuda.MemoryPointer(memory, 0))
        self.next += -(-max(made.nbytes, 1) // 512) * 512
        return made


@pytest.fixture
def memory():
    return Memory()


@pytest.fixture
def gpu(monkeypatch, memory):
    """Makes a GPU of an architecture the current device; gives its runtime."""
    chosen = []
    monkeypatch.setattr(arrays, "device_count", lambda: 1)
    monkeypatch.setattr(cupy.cuda.runtime, "getDevice", lambda: 0)
    monkeypatch.setattr(backends, "_gpu", lambda ordinal: chosen[-1])

    def choose(architecture):
        runtime = IdleRuntime(architecture)
        backend = backends.GpuBackend(Device("Imaginary", architecture, 132), runtime, 0)
        backend.empty = cache(memory.array)  # a freed result's memory is given out again
        chosen.append(backend)
        return runtime

    return choose


def entered(call):
    """Functions of the library, and of what it generates, that a call enters."""
    found = []

    def profile(frame, event, _):
        name = frame.f_code.co_filename
        if event == "call" and (name == "<string>" or SOURCES in Path(name).parents):
            found.append((Path(name).name, frame.f_code.co_name))

    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
    return found


def calls(memory, batch, channels):
    """Each operation on a 3x3 layer, by name."""
    shape, filters = (batch, 28, 28, channels), (channels, 3, 3, channels)
    x, w, dy = (memory.array(size) for size in (shape, filters, shape))
    bias, out = memory.array((channels,)), memory.array(shape)
    rules = {"padding": 1, **FORMATS}
    pairs = {"padding": ((1, 1), (1, 1)), "stride": (1, 1), **FORMATS}
    return {
        "forward": lambda: cupyconv.conv_forward(x, w, **rules),
        "bias": lambda: cupyconv.conv_forward(x, w, bias, activation="relu", **rules),
        "pairs": lambda: cupyconv.conv_forward(x, w, **pairs),
        "out": lambda: cupyconv.conv_forward(x, w, out=out, **rules),
        "backprop_input": lambda: cupyconv.conv_backprop_input(shape, w, dy, **rules),
        "backprop_filter": lambda: cupyconv.conv_backprop_filter(x, filters, dy, **rules),
        "transpose": lambda: cupyconv.conv_transpose(dy, w, **rules),
        "bias gradient": lambda: cupyconv.conv_backprop_bias(dy, data_format="NHWC"),
    }


@pytest.mark.parametrize(
    ("architecture", "size"), [("sm_80", (8, 64)), ("sm_90a", (32, 512))], ids=["gather", "hopper"]
)
def test_a_repeated_call_enters_few_functions(gpu, memory, architecture, size):
    runtime = gpu(architecture)
    for name, call in calls(memory, *size).items():
        call()
        found = entered(call)
        assert {file for file, _ in found} <= FAST, name
        assert len(found) <= FEW + (CHECKS_OF_OUT if name == "out" else 0), (name, found)
    sources = {source for source, _ in runtime.launched}
    assert ("conv_hopper.cu" in sources) == (architecture == "sm_90a")


def test_a_repeated_call_on_numpy_arrays_enters_few_functions(monkeypatch):
    monkeypatch.setattr(backends.CpuBackend, "run", lambda *_: None)
    x, w = np.ones((1, 4, 8, 8), np.float32), np.ones((4, 4, 3, 3), np.float32)
    cupyconv.conv_forward(x, w, padding=1)
    found = entered(lambda: cupyconv.conv_forward(x, w, padding=1))
    assert {file for file, _ in found} <= FAST
    assert len(found) <= FEW


@pytest.mark.parametrize("rules", [{}, {"stride": 2}, {"data_format": "NHWC"}], ids=str)
def test_a_small_layer_on_numpy_arrays_enters_few_functions(rules):
    """Those of the computation too, which takes as long as the Python around it."""
    x, w = np.ones((1, 8, 8, 8), np.float32), np.ones((8, 8, 3, 3), np.float32)
    rules = {"padding": 1, "filter_format": "OIHW", **rules}
    y = cupyconv.conv_forward(x, w, **rules)
    phases = rules.get("stride", 1) ** 2
    for call, correlations in (
        (lambda: cupyconv.conv_forward(x, w, **rules), 1),
        (lambda: cupyconv.conv_backprop_input(x.shape, w, y, **rules), phases),
        (lambda: cupyconv.conv_backprop_filter(x, w.shape, y, **rules), 1),
    ):
        call()
        assert len(entered(call)) <= OF_A_LAYER + OF_A_CORRELATION * correlations


def test_equal_calls_that_are_written_differently_are_not_mistaken(gpu, memory):
    gpu("sm_80")
    x, w = memory.array((2, 9, 9, 8)), memory.array((8, 3, 3, 8))
    dy = memory.array((2, 7, 7, 8))
    for good, bad in ((1, 1.0), ((1, 1), (1, 1.0))):
        cupyconv.conv_forward(x, w, stride=good, **FORMATS)
        with pytest.raises(ConvTypeError, match="must be made of integers"):
            cupyconv.conv_forward(x, w, stride=bad, **FORMATS)
    cupyconv.conv_backprop_input((2, 9, 9, 8), w, dy, **FORMATS)
    with pytest.raises(ConvTypeError, match="must be made of integers"):
        cupyconv.conv_backprop_input((2, 9, 9.0, 8), w, dy, **FORMATS)


def test_what_a_number_means_is_asked_at_every_call():
    """Equal arguments are the same call, unless they can change in the meantime."""

    class Number:
        def __init__(self, value):
            self.value = value

        def __index__(self):
            return self.value

    x, w = np.ones((1, 1, 9), np.float32), np.ones((1, 1, 3), np.float32)
    for number in (Number(1), np.array([1]), np.array(1)):
        sizes = []
        for value in (1, 2):
            if isinstance(number, Number):
                number.value = value
            else:
                number[...] = value
            for stride in (number, (number,)) if np.shape(number) == () else (number,):
                sizes.append(cupyconv.conv_forward(x, w, stride=stride).shape[-1])
        assert sorted(set(sizes), reverse=True) == [7, 4]
        assert sizes == sorted(sizes, reverse=True)
    for one in (np.int64(2), 2, np.int32(2)):
        assert cupyconv.conv_forward(x, w, stride=(one,)).shape == (1, 1, 4)
    for one in (True, np.True_):
        cupyconv.conv_forward(x, w, stride=1)
        with pytest.raises(ConvTypeError, match="stride must be made of integers: got "):
            cupyconv.conv_forward(x, w, stride=one)


def test_arrays_of_another_device_are_refused_at_every_call(gpu, memory, monkeypatch):
    runtime = gpu("sm_80")
    x, w, bias, dy = ((2, 9, 9, 8), (8, 3, 3, 8), (8,), (2, 7, 7, 8))
    here = [memory.array(shape) for shape in (x, w, bias)]
    out = memory.array(dy, device=1)
    for _ in range(2):
        cupyconv.conv_forward(*here, **FORMATS)
        for position, name in enumerate(("x", "w", "bias")):
            given = list(here)
            given[position] = memory.array(given[position].shape, device=1)
            with pytest.raises(ConvTypeError, match=rf"{name} is on device 1, current is 0\. "):
                cupyconv.conv_forward(*given, **FORMATS)
        with pytest.raises(ConvTypeError, match="out is on device 1, current is 0"):
            cupyconv.conv_forward(*here, out=out, **FORMATS)
        with pytest.raises(ConvTypeError, match="dy is on device 1"):
            cupyconv.conv_backprop_bias(out)
        with pytest.raises(ConvTypeError, match="dy is on device 1"):
            cupyconv.conv_backward(here[0], here[1], out, needs=(), **FORMATS)
    assert len(runtime.launched) == 2


def test_an_out_whose_elements_overlap_is_refused_and_others_are_not(gpu, memory):
    runtime = gpu("sm_80")
    x, w = memory.array((2, 9, 9, 8)), memory.array((8, 3, 3, 8))
    room = memory.array((4, 7, 7, 16))
    for out in (room[::2, :, :, ::2], room[::-1][:2, ::-1, ::-1, 8:]):
        cupyconv.conv_forward(x, w, out=out, **FORMATS)
    assert len(runtime.launched) == 2
    for strides in ((0, 112, 16, 2), (784, 112, 16, 1), (98, 14, 2, 2)):
        out = cupy.ndarray((2, 7, 7, 8), room.dtype, room.data, strides=strides)
        for _ in range(2):
            with pytest.raises(ConvError, match="out must have memory of its own"):
                cupyconv.conv_forward(x, w, out=out, **FORMATS)
    assert len(runtime.launched) == 2


def test_a_plan_is_made_for_the_alignment_of_the_addresses(gpu, memory):
    gpu("sm_80")
    backend = backends.of(arrays.Home.GPU)
    for offset, alignment in ((0, 16), (2, 2), (8, 8), (24, 8), (32, 16), (36, 4)):
        given = memory.array((4,)), memory.array((4,), offset=offset)
        assert backend.alignment(given) == alignment


def test_a_runs_tensors_are_in_the_order_that_launches_know():
    assert (*backends.Tensors._fields, "workspace") == ROLES


def test_a_backward_pass_has_all_its_kernels_loaded_at_once(gpu, memory):
    """So that those of three calls are compiled side by side."""
    runtime = gpu("sm_90a")
    shape = (2, 64, 14, 14)
    x, w, dy = memory.array(shape), memory.array((64, 64, 3, 3)), memory.array(shape)
    for _ in range(2):
        runtime.launched.clear()
        cupyconv.conv_backward(x, w, dy, padding=1)
    together, *singly = runtime.loaded
    assert len(singly) == 3, "each finds its own there, and only once"
    assert together == [entry for loaded in singly for entry in loaded]
    assert {"conv_hopper", "conv_backprop_bias"} <= set(together)
    assert len(runtime.launched) == len(together)


def test_arguments_are_bound_to_the_arrays_of_each_run(gpu, memory):
    runtime = gpu("sm_90a")
    number = np.int32(7)
    maps = TensorMaps(
        tuple(
            TiledMap(role, 2, (64, 100), (128,), (64, 64), offset)
            for role, offset in (("w", 0), ("x", 32))
        )
    )
    arguments = ("y", "bias", number, Part("workspace", 48), maps, "x", "workspace")
    one = Launch("conv_hopper.cu", "conv_hopper", (), (1,), (32,), 0, arguments)
    nothing = Launch("conv_planes.cu", "conv_planes", (), (0,), (32,), 0, ("x",))
    series = launch.Series((nothing, one), runtime)
    for _ in range(2):
        x, w, y, bias, workspace = (memory.array((8,)) for _ in ROLES)
        for b in (bias, None, bias):
            runtime.launched.clear()
            series((x, w, y, b, workspace))
            (((_, got)),) = runtime.launched
            assert got[0] is y
            assert got[1] is b if b is not None else got[1] == 0
            assert got[2] is number
            assert got[3] == np.uint64(workspace.data.ptr + 48)
            assert got[4].nbytes == 2 * tensormaps.MAP_BYTES
            assert got[5] is x
            assert got[6] is workspace
        assert runtime.encoded[-2:] == [("w", w.data.ptr), ("x", x.data.ptr + 32)]
    assert len(runtime.encoded) == 4  # once for each pair of addresses
    runtime.launched.clear()
    series_without = launch.Series(
        (Launch("conv_forward.cu", "sum", (), (1,), (32,), 0, ("y", "workspace")),), runtime
    )
    series_without((None, None, y, bias))
    assert runtime.launched[0][1] == (y, 0)
