"""Golden cases: inputs, launch and output of each wrapper in ptx.cuh.

``python -m tests.gpu golden`` runs the cases on the current GPU through CuPy, and ``report`` writes
their inputs and outputs to ``golden-<chip>.npz``.  The tests run the same cases on the CPU emulator
and compare it with such a file in ``tests/gpu/results``.
"""

from __future__ import annotations

import ctypes
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from cupyconv import arrays
from cupyconv.gpu.sources import KernelSource

SOURCE = Path(__file__).with_name("golden.cu")
RESULTS = Path(__file__).with_name("results")
INCLUDE = Path(__file__).resolve().parents[2] / "cuda" / "include"
SWIZZLES = (0, 32, 64, 128)
WGMMA_N = (8, 64, 128, 192, 256)

COORDINATES = np.dtype([("at", np.int32, 5), ("tap", np.int32, 3)])
_FIELDS = (
    *("a_bytes", "b_bytes", "a_swizzle", "b_swizzle", "a_leading", "a_stride"),
    *("b_leading", "b_stride", "a_start", "b_start", "scale_d"),
)
WGMMA_OPERANDS = np.dtype([(name, np.int32) for name in _FIELDS])


@dataclass(frozen=True)
class Output:
    """The argument that a kernel writes; ``initial`` is its content before (default: poison)."""

    shape: tuple[int, ...]
    dtype: Any
    initial: np.ndarray | None = None


@dataclass(frozen=True)
class Map:
    """A tensor map over an input array, or over the output.

    Attributes:
        tensor: values, C-contiguous, outermost dimension first; or the output.
        box: elements per copy, innermost first; for im2col, channels and pixels.
        steps: element strides, innermost first.
        swizzle: span in bytes.
        corners: for im2col, lower and upper corners, W first; None for a tiled map.
    """

    tensor: np.ndarray | Output
    box: tuple[int, ...]
    steps: tuple[int, ...]
    swizzle: int = 0
    corners: tuple[tuple[int, ...], tuple[int, ...]] | None = None


@dataclass(frozen=True)
class Case:
    """One launch of one golden kernel.

    Attributes:
        name: unique name, for files and test ids.
        kernel: name of the kernel in golden.cu.
        arch: least compute capability times ten.
        threads: threads per block.
        arguments: inputs (arrays), outputs (Output), tensor maps (Map) and scalars, in order.
        blocks: thread blocks in the grid.
        shared: bytes of dynamic shared memory.
        wgmma: whether the kernel needs sm_90a.
        ulps: largest error of the output in units in the last place.
    """

    name: str
    kernel: str
    arch: int
    threads: int
    arguments: tuple[Any, ...]
    blocks: int = 1
    shared: int = 0
    wgmma: bool = False
    ulps: int = 0

    @property
    def output(self) -> Output:
        """The array that the kernel writes, directly or through a map."""
        candidates = [one.tensor if isinstance(one, Map) else one for one in self.arguments]
        return next(one for one in candidates if isinstance(one, Output))

    @property
    def inputs(self) -> list[np.ndarray]:
        """The input arrays in order, including the tensors of maps."""
        arrays = [one.tensor if isinstance(one, Map) else one for one in self.arguments]
        return [one for one in arrays if isinstance(one, np.ndarray) and not one.dtype.names]


class Device(Protocol):
    """Interface of the device that cases run on."""

    def upload(self, values: np.ndarray) -> Any: ...

    def output(self, wanted: Output) -> Any: ...

    def download(self, array: Any) -> np.ndarray: ...

    def encode(self, described: Map, array: Any) -> np.ndarray: ...

    def launch(self, case: Case, arguments: tuple[Any, ...]) -> None: ...


def run(case: Case, device: Device) -> np.ndarray:
    """Run a case, and return its output."""
    output = device.output(case.output)
    arguments = []
    for one in case.arguments:
        if isinstance(one, Output):
            arguments.append(output)
        elif isinstance(one, Map):
            tensor = output if isinstance(one.tensor, Output) else device.upload(one.tensor)
            arguments.append((device.encode(one, tensor), tensor))
        elif isinstance(one, np.ndarray) and not one.dtype.names:
            arguments.append(device.upload(one))
        else:
            arguments.append(one)
    # A map is paired with the tensor that it points to, which must stay alive.
    device.launch(case, tuple(one[0] if isinstance(one, tuple) else one for one in arguments))
    return device.download(output)


# --------------------------------------------------------------------------------------------------
# Values
# --------------------------------------------------------------------------------------------------
def small_integers(generator: np.random.Generator, shape: Sequence[int]) -> np.ndarray:
    """Return multiples of 1/4 from -2 to 2, so that all products and sums of a case are exact."""
    return generator.integers(-8, 9, shape) / 4


def bits_of(values: np.ndarray, element: str) -> np.ndarray:
    """Return values as bits of f16, bf16 (16-bit) or tf32 (32-bit); small integers are exact."""
    if element == "f16":
        return values.astype(np.float16).view(np.uint16)
    single = values.astype(np.float32).view(np.uint32)
    return (single >> 16).astype(np.uint16) if element == "bf16" else single


def _special_floats() -> np.ndarray:
    generator = np.random.default_rng(1)
    bits = generator.integers(0, 1 << 32, 512, dtype=np.uint32)
    halves = np.arange(0, 1 << 16, 257, dtype=np.uint32)
    near_f16 = halves.astype(np.uint16).view(np.float16).astype(np.float32).view(np.uint32)
    ties = np.concatenate([near_f16 + 0x1000, (halves << 16) + 0x8000, (halves << 16) + 0x7FFF])
    values = np.concatenate([bits, ties])[:1024].view(np.float32).copy()
    values[:8] = [0.0, -0.0, np.inf, -np.inf, np.nan, 65504.0, 65520.0, 1e-45]
    return np.resize(values, 1024)


# --------------------------------------------------------------------------------------------------
# Cases
# --------------------------------------------------------------------------------------------------
def _conversions() -> Iterator[Case]:
    floats = _special_floats()
    halves = np.random.default_rng(2).integers(0, 1 << 16, 1024).astype(np.uint16)
    n = 1024
    yield Case("f32_from_f16", "f32_from_f16", 75, n, (halves, Output((n,), np.float32)))
    yield Case("f16_from_f32", "f16_from_f32", 75, n, (floats, Output((n,), np.uint16)))
    yield Case("tf32_from_f32", "tf32_from_f32", 80, n, (floats, Output((n,), np.uint32)))
    pairs = np.resize(floats, 1024)
    for kernel in ("f16x2_from_f32", "bf16x2_from_f32"):
        yield Case(kernel, kernel, 80, n // 2, (pairs, Output((n // 2,), np.uint32)))
    powers = np.random.default_rng(3).uniform(-130, 130, n).astype(np.float32)
    powers[:8] = floats[:8]
    for kernel, values, ulps in (("rcp_approx", floats, 1), ("ex2_approx", powers, 2)):
        yield Case(kernel, kernel, 75, n, (values, Output((n,), np.float32)), ulps=ulps)


def _wide_stores() -> Iterator[Case]:
    words = np.arange(128, dtype=np.uint32).reshape(4, 32)
    yield Case("store_16_bytes", "store_16_bytes", 75, 32, (words, Output((32, 4), np.uint32)))


def _matrices() -> Iterator[Case]:
    rows = np.arange(256, dtype=np.uint16)
    for suffix in ("", "_trans"):
        for count in (2, 4):
            name = f"ldmatrix_x{count}{suffix}"
            yield Case(name, name, 75, 32, (rows, Output((count, 32), np.uint32)))
    registers = np.arange(256, dtype=np.uint16).view(np.uint32).reshape(4, 32)
    for name in ("stmatrix_x4", "stmatrix_x4_trans"):
        yield Case(name, name, 90, 32, (registers, Output((256,), np.uint16)))


def _register_bits(generator, count: int, lanes: int, element: str) -> np.ndarray:
    """Return random small integers in registers[count][lanes]."""
    per_register = 1 if element == "tf32" else 2
    values = small_integers(generator, (count, lanes, per_register))
    return np.ascontiguousarray(bits_of(values, element)).view(np.uint32).reshape(count, lanes)


def _warp_products() -> Iterator[Case]:
    generator = np.random.default_rng(3)
    for kernel, element, a_count, b_count, arch in (
        ("mma_m16n8k8_f16", "f16", 2, 1, 75),
        ("mma_m16n8k16_f16", "f16", 4, 2, 80),
        ("mma_m16n8k16_bf16", "bf16", 4, 2, 80),
        ("mma_m16n8k8_tf32", "tf32", 4, 2, 80),
    ):
        a = _register_bits(generator, a_count, 32, element)
        b = _register_bits(generator, b_count, 32, element)
        d = small_integers(generator, (4, 32)).astype(np.float32)
        yield Case(kernel, kernel, arch, 32, (a, b, d, Output((4, 32), np.float32)))
    a, b = (small_integers(generator, (32,)) for _ in range(2))
    d = small_integers(generator, (2, 32))
    yield Case("mma_m8n8k4_f64", "mma_m8n8k4_f64", 80, 32, (a, b, d, Output((2, 32), np.float64)))


def _thread_copies() -> Iterator[Case]:
    for size in (4, 8, 16):
        values = np.arange(32 * size, dtype=np.uint8)
        counts = (np.arange(32) % (size + 1)).astype(np.int32)
        name = f"cp_async_{size}"
        yield Case(name, name, 80, 32, (values, counts, Output((32 * size,), np.uint8)))


def _barriers() -> Iterator[Case]:
    words = np.arange(64, dtype=np.uint32) + 1
    name = "named_barriers"
    yield Case(name, name, 75, 64, (words, Output((32,), np.uint32)))
    name = "mbarrier_phases"
    yield Case(name, name, 90, 64, (words, Output((64,), np.uint32)))
    yield Case("elect_one", "elect_one", 90, 32, (Output((32,), np.uint32),))
    yield Case("griddepcontrol", "griddepcontrol", 90, 64, (words, Output((64,), np.uint32)))
    name = "cluster_exchange"
    numbers = words.astype(np.float32)
    yield Case(name, name, 90, 32, (numbers, Output((64,), np.float32)), blocks=2)


def _place(at: Sequence[int], tap: Sequence[int] = ()) -> np.ndarray:
    record = np.zeros(1, COORDINATES)
    record["at"][0, : len(at)] = at
    record["tap"][0, : len(tap)] = tap
    return record


def _counting(shape: Sequence[int], dtype=np.uint16) -> np.ndarray:
    return np.arange(1, np.prod(shape) + 1).reshape(shape).astype(dtype)


def _copy_bytes(described: Map, itemsize: int) -> int:
    if described.corners:
        return described.box[0] * described.box[1] * itemsize
    steps = (1, *described.steps[1:])
    counts = [-(-size // step) for size, step in zip(described.box, steps, strict=True)]
    return int(np.prod(counts)) * itemsize


def _load(name: str, described: Map, at: Sequence[int], tap: Sequence[int] = ()) -> Iterator[Case]:
    """Yield the case of a load, and of its multicast to a pair of blocks."""
    assert isinstance(described.tensor, np.ndarray)
    size = _copy_bytes(described, described.tensor.itemsize)
    mode = "im2col_" if described.corners else ""
    kernel = f"tma_load_{mode}{described.tensor.ndim}d"
    place = _place(at, tap)
    count = np.int32(size)
    arguments = (described, Output((size,), np.uint8), count, place)
    yield Case(f"{kernel}-{name}", kernel, 90, 64, arguments, shared=size)
    pair = (described, Output((2, size), np.uint8), count, place)
    kernel += "_multicast"
    yield Case(f"{kernel}-{name}", kernel, 90, 64, pair, blocks=2, shared=size)


def _tiled_loads() -> Iterator[Case]:
    ones = (1,) * 4
    for swizzle in SWIZZLES:
        columns = (swizzle or 32) // 2
        plane = Map(_counting((40, 72)), (columns, 32), ones[:2], swizzle)
        yield from _load(f"swizzle {swizzle}", plane, (8, 16))
    single = Map(_counting((40, 40), np.float32), (32, 24), ones[:2], 128)
    yield from _load("float32", single, (-4, -3))
    yield from _load(
        "box over all edges", Map(_counting((3, 5, 16)), (32, 7, 4), ones[:3]), (-8, -1, -1)
    )
    yield from _load(
        "every second row", Map(_counting((3, 9, 16)), (16, 8, 3), (1, 2, 1)), (0, 1, 0)
    )
    yield from _load("4d", Map(_counting((2, 3, 5, 16)), (16, 3, 2, 2), ones[:4]), (0, 3, 1, 1))


def _im2col_loads() -> Iterator[Case]:
    def described(shape, channels, pixels, lower, upper, stride=1, swizzle=0):
        rank = len(shape)
        steps = (1,) + (stride,) * (rank - 2) + (1,)
        return Map(_counting(shape), (channels, pixels), steps, swizzle, (lower, upper))

    # 3 wide filters, padding 1, stride 1: base pixels from -1 to extent - 2.
    yield from _load("1-D", described((2, 9, 16), 16, 24, (-1,), (-1,)), (0, 3, 0), (2,))
    padded = described((2, 5, 7, 64), 64, 48, (-1, -1), (-1, -1), swizzle=128)
    yield from _load("first tap", padded, (0, -1, -1, 0), (0, 0))
    yield from _load("last tap", padded, (0, -1, -1, 0), (2, 2))
    yield from _load("over an image's end", padded, (0, 2, 3, 0), (1, 2))
    yield from _load("past the last image", padded, (0, 0, 2, 1), (1, 1))
    strided = described((2, 9, 7, 32), 32, 30, (-1, -1), (-1, -1), stride=2, swizzle=64)
    yield from _load("stride 2", strided, (0, -1, -1, 0), (1, 2))
    tail = described((1, 4, 5, 24), 16, 20, (0, 0), (-1, -1), swizzle=32)
    yield from _load("channel tail", tail, (16, 0, 0, 0), (1, 1))
    dilated = described((1, 6, 6, 8), 8, 16, (-2, -2), (-2, -2))
    yield from _load("dilation 2", dilated, (0, -2, -2, 0), (4, 2))
    deep = described((2, 3, 4, 5, 8), 8, 64, (-1, -1, -1), (-1, -1, -1))
    yield from _load("3-D", deep, (0, 1, -1, 0, 0), (2, 1, 0))
    yield from _load(
        "3-D stride 2",
        described((1, 5, 4, 6, 8), 8, 12, (-1, 0, -1), (-1, -1, 0), 2),
        (0, -1, 0, -1, 0),
        (1, 1, 2),
    )


def _stores() -> Iterator[Case]:
    def store(name: str, shape, box, at, swizzle: int = 0) -> Case:
        before = Output(shape, np.uint16, np.full(shape, 0xABCD, np.uint16))
        described = Map(before, box, (1,) * len(shape), swizzle)
        size = int(np.prod(box)) * 2
        values = (np.arange(size) % 251).astype(np.uint8)
        kernel = f"tma_store_{len(shape)}d"
        arguments = (described, values, np.int32(size), _place(at))
        return Case(f"{kernel}-{name}", kernel, 90, 64, arguments, shared=size)

    for swizzle in SWIZZLES:
        columns = (swizzle or 32) // 2
        yield store(f"swizzle {swizzle}", (40, 72), (columns, 16), (16, 8), swizzle)
    # A coordinate below 0, or an innermost one of 8 bytes, is an illegal instruction on an H200.
    yield store("over the edges", (7, 16), (16, 4), (8, 5))


# --------------------------------------------------------------------------------------------------
# wgmma: tiles as bytes of shared memory, in the layouts of the PTX manual's figures
# --------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class TileLayout:
    """Layout of an operand in shared memory.

    Attributes:
        mn_major: whether elements along m or n are contiguous, else along k.
        swizzle: span in bytes.
        leading, stride: the descriptor's offsets in bytes.
        start: byte offset of the operand's first element in the tile.
        size: bytes of the tile.
    """

    mn_major: bool
    swizzle: int
    leading: int
    stride: int
    start: int
    size: int

    def byte_of(self, mn: np.ndarray, k: np.ndarray, itemsize: int) -> np.ndarray:
        """Return the byte offsets in the tile of the operand's elements (mn, k)."""
        unit = 16 // itemsize
        if self.mn_major and self.swizzle:
            span = self.swizzle // itemsize
            byte = mn // span * self.leading + mn % span * itemsize
            byte = byte + k // 8 * self.stride + k % 8 * self.swizzle
        elif self.mn_major:
            byte = mn // unit * self.stride + mn % unit * itemsize
            byte = byte + k // 8 * self.leading + k % 8 * 16
        elif self.swizzle:
            byte = mn // 8 * self.stride + mn % 8 * self.swizzle + k * itemsize
        else:
            byte = mn // 8 * self.stride + mn % 8 * 16
            byte = byte + k // unit * self.leading + k % unit * itemsize
        byte = byte + self.start
        return byte ^ ((byte >> 7 & {0: 0, 32: 1, 64: 3, 128: 7}[self.swizzle]) << 4)


def k_major(extent: int, swizzle: int, k_bytes: int, step: int = 0) -> TileLayout:
    """Return a tile of ``extent`` rows; ``step`` is the operand's position along k in the tile."""
    rows = -(-extent // 8)
    if swizzle:
        start = step * k_bytes % swizzle
        return TileLayout(False, swizzle, 16, 8 * swizzle, start, rows * 8 * swizzle)
    columns = k_bytes // 16
    return TileLayout(False, 0, rows * 128, 128, 0, rows * columns * 128)


def mn_major(extent: int, swizzle: int, k: int) -> TileLayout:
    """Return a tile of ``extent`` 16-bit elements along m or n by ``k``, a multiple of 8."""
    if swizzle:
        spans = -(-extent * 2 // swizzle)
        depth = k * swizzle
        return TileLayout(True, swizzle, depth, 8 * swizzle, 0, spans * depth)
    units = extent // 8
    return TileLayout(True, 0, units * 128, 128, 0, units * 128 * (k // 8))


def fill_tile(layout: TileLayout, values: np.ndarray) -> np.ndarray:
    """Return the bytes of a tile with ``values`` (mn, k), which are given as bits."""
    mn, k = np.indices(values.shape)
    itemsize = values.dtype.itemsize
    tile = np.zeros(layout.size, np.uint8)
    tile.view(values.dtype)[layout.byte_of(mn, k, itemsize) // itemsize] = values
    return tile


def accumulator_registers(d: np.ndarray) -> np.ndarray:
    """Return the matrix d (64, n) as registers[n / 2][128]."""
    register, thread = np.indices((d.shape[1] // 2, 128))
    row = thread // 32 * 16 + thread % 32 // 4 + register // 2 % 2 * 8
    column = register // 4 * 8 + thread % 4 * 2 + register % 2
    return d[row, column]


def _wgmma_case(
    element: str,
    n: int,
    swizzle: int,
    *,
    a_mn_major: bool = False,
    b_mn_major: bool = False,
    scale_d: int = 1,
    step: int = 0,
) -> Case:
    generator = np.random.default_rng(n * 1000 + swizzle)
    itemsize = 4 if element == "tf32" else 2
    k = 32 // itemsize
    # d = a @ b.T + (d if scale_d)
    a_values, b_values, d = (
        small_integers(generator, shape) for shape in ((64, k), (n, k), (64, n))
    )
    b_swizzle = swizzle
    while b_mn_major and b_swizzle and n * 2 % b_swizzle:
        b_swizzle = b_swizzle // 2 if b_swizzle > 32 else 0  # whole spans along n
    a_layout = mn_major(64, swizzle, k) if a_mn_major else k_major(64, swizzle, 32, step)
    b_layout = mn_major(n, b_swizzle, k) if b_mn_major else k_major(n, b_swizzle, 32, step)
    a_bits, b_bits = bits_of(a_values, element), bits_of(b_values, element)
    a_bytes = -(-a_layout.size // 1024) * 1024
    a = np.zeros(a_bytes, np.uint8)
    a[: a_layout.size] = fill_tile(a_layout, a_bits)
    b = fill_tile(b_layout, b_bits)

    parameters = np.zeros(1, WGMMA_OPERANDS)
    parameters["a_bytes"], parameters["b_bytes"] = a_bytes, b.size
    for name, layout in (("a", a_layout), ("b", b_layout)):
        parameters[f"{name}_swizzle"], parameters[f"{name}_start"] = layout.swizzle, layout.start
        parameters[f"{name}_leading"] = layout.leading
        parameters[f"{name}_stride"] = layout.stride
    parameters["scale_d"] = scale_d
    kernel = f"wgmma_{element}_n{n}"
    if element != "tf32":
        kernel += f"_a{int(a_mn_major)}_b{int(b_mn_major)}"
    before = accumulator_registers(d).astype(np.float32)
    output = Output((n // 2, 128), np.float32)
    name = f"{kernel}-swizzle {swizzle}" + (f" step {step}" if step else "")
    name += "" if scale_d else " overwrite"
    arguments = (a, b, before, output, parameters)
    return Case(name, kernel, 90, 128, arguments, shared=a_bytes + b.size, wgmma=True)


def _wgmma_cases() -> list[Case]:
    """Return a case for every wgmma wrapper, and for every layout at n = 64."""
    made = []
    for n in WGMMA_N:
        for swizzle in SWIZZLES if n == 64 else (128,):
            made += [
                _wgmma_case(element, n, swizzle, a_mn_major=a_mn_major, b_mn_major=b_mn_major)
                for element, a_mn_major, b_mn_major in product(
                    ("f16", "bf16"), (False, True), (False, True)
                )
            ]
            made.append(_wgmma_case("tf32", n, swizzle))
    made.append(_wgmma_case("f16", 64, 128, scale_d=0))
    made += [_wgmma_case("bf16", 64, 128, step=step) for step in (1, 2, 3)]
    return made


@cache
def cases() -> tuple[Case, ...]:
    """Return all cases; names are unique."""
    made = [
        *_conversions(),
        *_wide_stores(),
        *_matrices(),
        *_warp_products(),
        *_thread_copies(),
        *_barriers(),
        *_tiled_loads(),
        *_im2col_loads(),
        *_stores(),
    ]
    words = np.arange(256, dtype=np.uint32)
    made.append(
        Case("setmaxnreg", "setmaxnreg", 90, 256, (words, Output((256,), np.uint32)), wgmma=True)
    )
    made += _wgmma_cases()
    assert len({case.name for case in made}) == len(made)
    return tuple(made)


# --------------------------------------------------------------------------------------------------
# On a GPU
# --------------------------------------------------------------------------------------------------
def source() -> KernelSource:
    """Return golden.cu with the header that it tests."""
    headers = (("ptx.cuh", (INCLUDE / "ptx.cuh").read_text()),)
    return KernelSource(SOURCE.name, SOURCE.read_text(), headers)


def compile_cubin(architecture: str, wgmma: bool) -> bytes:
    """Compile golden.cu for a chip such as ``sm_90a``, with or without the wgmma kernels."""
    from cupyconv.gpu import compiler

    capability = int(architecture.removeprefix("sm_").rstrip("a"))
    defines = {"GOLDEN_ARCH": capability * 10, "GOLDEN_WGMMA": int(wgmma)}
    return compiler.cached_cubin(source(), defines, architecture)


class MapRefusedError(RuntimeError):
    """The driver refuses to encode a tensor map."""


class CupyDevice:
    """The current GPU, through CuPy."""

    def __init__(self) -> None:
        self._cupy = cupy = arrays.require_gpu()
        properties = cupy.cuda.runtime.getDeviceProperties(0)
        self.capability = properties["major"] * 10 + properties["minor"]
        self._driver = ctypes.CDLL("libcuda.so.1")
        suffix = "a" if self.capability >= 90 else ""
        self.architecture = f"sm_{self.capability}{suffix}"
        self._load = cache(self._load_module)

    def takes(self, case: Case) -> bool:
        """Return whether the chip has the instructions of a case."""
        return case.arch <= self.capability and (not case.wgmma or self.capability == 90)

    def _load_module(self, wgmma: bool) -> Any:
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(compile_cubin(self.architecture, wgmma))
            file.flush()
            module = self._cupy.RawModule(path=file.name)
            module.get_function("f32_from_f16")  # loads the file while it exists
            return module

    def upload(self, values: np.ndarray) -> Any:
        return self._cupy.asarray(values)

    def output(self, wanted: Output) -> Any:
        if wanted.initial is not None:
            return self._cupy.asarray(wanted.initial)
        size = int(np.prod(wanted.shape)) * np.dtype(wanted.dtype).itemsize
        poison = np.full(size, 255, np.uint8)
        return self._cupy.asarray(poison).view(wanted.dtype).reshape(wanted.shape)

    def download(self, array: Any) -> np.ndarray:
        return self._cupy.asnumpy(array)

    def launch(self, case: Case, arguments: tuple[Any, ...]) -> None:
        kernel = self._load(case.wgmma).get_function(case.kernel)
        if case.shared > 48 << 10:
            kernel.max_dynamic_shared_size_bytes = case.shared
        kernel((case.blocks,), (case.threads,), arguments, shared_mem=case.shared)
        self._cupy.cuda.runtime.deviceSynchronize()

    def encode(self, described: Map, array: Any) -> np.ndarray:
        """Return the driver's tensor map (cuTensorMapEncodeTiled, cuTensorMapEncodeIm2col)."""
        rank = array.ndim
        types = {1: 0, 2: 1, 4: 7}  # UINT8, UINT16, FLOAT32
        raw = np.zeros(192, np.uint8)
        start = -raw.ctypes.data % 64
        encoded = raw[start : start + 128]
        extents = (ctypes.c_uint64 * rank)(*array.shape[::-1])
        strides = (ctypes.c_uint64 * max(rank - 1, 1))(*array.strides[::-1][1:])
        steps = (ctypes.c_uint32 * rank)(*described.steps)
        head = [
            ctypes.c_void_p(encoded.ctypes.data),
            types[array.itemsize],
            ctypes.c_uint32(rank),
            ctypes.c_void_p(array.data.ptr),
            extents,
            strides,
        ]
        tail = [steps, 0, SWIZZLES.index(described.swizzle), 0, 0]
        if described.corners:
            lower, upper = ((ctypes.c_int * (rank - 2))(*corner) for corner in described.corners)
            channels, pixels = map(ctypes.c_uint32, described.box)
            middle = [lower, upper, channels, pixels]
            error = self._driver.cuTensorMapEncodeIm2col(*head, *middle, *tail)
        else:
            box = (ctypes.c_uint32 * rank)(*described.box)
            error = self._driver.cuTensorMapEncodeTiled(*head, box, *tail)
        if error:
            raise MapRefusedError(
                f"the driver refuses the map of shape {array.shape}: error {error}"
            )
        record = np.zeros(1, np.dtype([("opaque", np.uint64, 16)]))
        record.view(np.uint8)[...] = encoded
        return record
