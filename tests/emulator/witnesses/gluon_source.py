"""Kernels in Gluon, Triton's language with explicit layouts and warp roles."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
)


@gluon.jit
def _write(values, result, FLAT: gl.constexpr):
    """Store values in the order of their indices."""
    count: gl.constexpr = values.numel
    flat = gl.convert_layout(values.reshape([count]), FLAT)
    gl.store(result + gl.arange(0, count, FLAT), flat)


@gluon.jit
def loaded_box(
    source,
    result,
    CORNER: gl.constexpr,
    MULTICAST: gl.constexpr,
    REGISTERS: gl.constexpr,
    FLAT: gl.constexpr,
):
    """Load a box of a tensor; elements outside are zero."""
    held = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, source.nbytes_per_cta)
    tma.async_load(source, CORNER, full, held, multicast=MULTICAST)
    mbarrier.wait(full, 0)
    _write(held.load(REGISTERS), result, FLAT)


@gluon.jit
def loaded_column(
    source,
    result,
    BASE: gl.constexpr,
    OFFSETS: gl.constexpr,
    MULTICAST: gl.constexpr,
    REGISTERS: gl.constexpr,
    FLAT: gl.constexpr,
):
    """Load a column of pixels from a base pixel on, offset by a filter tap."""
    held = gl.allocate_shared_memory(source.dtype, source.block_shape, source.layout)
    full = mbarrier.allocate_mbarrier()
    mbarrier.init(full, count=1)
    mbarrier.expect(full, source.nbytes_per_cta)
    tma.async_load_im2col(source, BASE, OFFSETS, full, held, multicast=MULTICAST)
    mbarrier.wait(full, 0)
    _write(held.load(REGISTERS), result, FLAT)


@gluon.jit
def stored_box(source, target, CORNER: gl.constexpr, REGISTERS: gl.constexpr, FLAT: gl.constexpr):
    """Store the part of a box that is inside a tensor."""
    count: gl.constexpr = target.block_type.numel
    values = gl.load(source + gl.arange(0, count, FLAT)).reshape(target.block_shape)
    held = gl.allocate_shared_memory(target.dtype, target.block_shape, target.layout)
    held.store(gl.convert_layout(values, REGISTERS))
    fence_async_shared()
    tma.async_store(target, CORNER, held)
    tma.store_wait(0)


@gluon.jit
def product(
    a,
    b,
    c,
    M: gl.constexpr,
    N: gl.constexpr,
    K: gl.constexpr,
    OF_A: gl.constexpr,
    OF_B: gl.constexpr,
    OF_C: gl.constexpr,
    REGISTERS: gl.constexpr,
    FLAT: gl.constexpr,
):
    """Compute one tile of c = a b, with the given layouts of a and b in shared memory."""
    left = gl.load(a + gl.arange(0, M * K, FLAT)).reshape([M, K])
    right = gl.load(b + gl.arange(0, K * N, FLAT)).reshape([K, N])
    held_a = gl.allocate_shared_memory(a.dtype.element_ty, [M, K], OF_A)
    held_b = gl.allocate_shared_memory(b.dtype.element_ty, [K, N], OF_B)
    held_a.store(gl.convert_layout(left, REGISTERS))
    held_b.store(gl.convert_layout(right, REGISTERS))
    fence_async_shared()
    gl.barrier()
    total = warpgroup_mma(held_a, held_b, gl.zeros([M, N], gl.float32, OF_C))
    _write(total.to(c.dtype.element_ty), c, FLAT)


@gluon.jit
def _sums(x, y, ROWS: gl.constexpr, LENGTH: gl.constexpr, FLAT: gl.constexpr):
    place = gl.arange(0, LENGTH, FLAT)
    for row in range(ROWS):
        gl.store(y + row, gl.sum(gl.load(x + row * LENGTH + place), 0))


@gluon.jit
def sums_by_parties(
    x, y, ROWS: gl.constexpr, LENGTH: gl.constexpr, WARPS: gl.constexpr, FLAT: gl.constexpr
):
    """Compute row sums; each party has its own warps and works concurrently."""
    first: gl.constexpr = ROWS[0]
    second: gl.constexpr = first + ROWS[1]
    gl.warp_specialize(
        [
            (_sums, (x, y, ROWS[0], LENGTH, FLAT[0])),
            (_sums, (x + first * LENGTH, y + first, ROWS[1], LENGTH, FLAT[1])),
            (_sums, (x + second * LENGTH, y + second, ROWS[2], LENGTH, FLAT[2])),
        ],
        [WARPS[1], WARPS[2]],
    )


@gluon.jit
def transposed_between_blocks(
    x, y, N: gl.constexpr, BY_ROWS: gl.constexpr, BY_COLUMNS: gl.constexpr
):
    """Transpose x to y; a block reads some rows and writes some columns."""
    row = gl.arange(0, N, gl.SliceLayout(1, BY_ROWS))[:, None]
    column = gl.arange(0, N, gl.SliceLayout(0, BY_ROWS))[None, :]
    values = gl.convert_layout(gl.load(x + row * N + column), BY_COLUMNS)
    row = gl.arange(0, N, gl.SliceLayout(1, BY_COLUMNS))[:, None]
    column = gl.arange(0, N, gl.SliceLayout(0, BY_COLUMNS))[None, :]
    gl.store(y + column * N + row, values)
