"""Matrix products in Triton's language."""

import triton
import triton.language as tl


@triton.jit
def product(
    a,
    b,
    c,
    m,
    n,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
):
    rows = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    depth = tl.arange(0, BLOCK_K)
    of_a = a + rows[:, None] * k + depth[None, :]
    if IS_TRANSPOSED:
        of_b = b + columns[None, :] * k + depth[:, None]
    else:
        of_b = b + depth[:, None] * n + columns[None, :]
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        left_inside = (rows[:, None] < m) & (depth[None, :] + start < k)
        right_inside = (columns[None, :] < n) & (depth[:, None] + start < k)
        left = tl.load(of_a, mask=left_inside, other=0.0)
        right = tl.load(of_b, mask=right_inside, other=0.0)
        total = tl.dot(left, right, total)
        of_a += BLOCK_K
        of_b += BLOCK_K if IS_TRANSPOSED else BLOCK_K * n
    of_c = c + rows[:, None] * n + columns[None, :]
    tl.store(of_c, total.to(c.dtype.element_ty), mask=(rows[:, None] < m) & (columns[None, :] < n))


@triton.jit
def product_by_descriptor(
    a,
    b,
    c,
    k,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    row, column = tl.program_id(0) * BLOCK_M, tl.program_id(1) * BLOCK_N
    total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
    for start in range(0, k, BLOCK_K):
        total = tl.dot(a.load([row, start]), b.load([start, column]), total)
    c.store([row, column], total.to(c.dtype))


@triton.jit
def chain(
    a,
    b,
    v,
    d,
    c,
    M: tl.constexpr,
    K: tl.constexpr,
    L: tl.constexpr,
    N: tl.constexpr,
    IS_TRANSPOSED: tl.constexpr,
):
    """Compute one tile of c = (a b) v + d."""
    rows, depth = tl.arange(0, M)[:, None], tl.arange(0, K)
    middle, columns = tl.arange(0, L), tl.arange(0, N)[None, :]
    right = tl.load(b + depth[:, None] * L + middle[None, :])
    inner = tl.dot(tl.load(a + rows * K + depth[None, :]), right)
    of_v = v + (columns * L + middle[:, None] if IS_TRANSPOSED else middle[:, None] * N + columns)
    total = tl.dot(inner.to(a.dtype.element_ty), tl.load(of_v))
    total += tl.load(d + rows * N + columns)
    tl.store(c + rows * N + columns, total.to(c.dtype.element_ty))


@triton.jit
def threefold_product(a, b, c, M: tl.constexpr, N: tl.constexpr, K: tl.constexpr):
    """Compute one tile of c = a b, with each float32 split into two TF32 values."""
    rows, depth, columns = tl.arange(0, M)[:, None], tl.arange(0, K), tl.arange(0, N)[None, :]
    left, right = tl.load(a + rows * K + depth[None, :]), tl.load(b + depth[:, None] * N + columns)
    tl.store(c + rows * N + columns, tl.dot(left, right, input_precision="tf32x3"))
