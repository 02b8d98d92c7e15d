"""PyTorch's functions on cupyconv: results, gradients, memory orders and graphs as in PyTorch."""

from __future__ import annotations

import importlib
import inspect
import itertools
import re
import sys
from functools import partial

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvTypeError, DeviceError, backends, cudnn

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
ct = importlib.import_module("cupyconv.torch")
F = torch.nn.functional

RANKS = (1, 2, 3)
DTYPES = ("float16", "bfloat16", "float32", "float64")
COMPLEX = ("complex64", "complex128")

LAYERS = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1},
    "per axis": {"stride": "per axis", "dilation": "per axis", "padding": 2},
    "grouped": {"groups": 2, "padding": 1},
    "depthwise": {"groups": 4},
    "valid": {"padding": "valid", "stride": 3},
    "same": {"padding": "same", "dilation": 2},
    "a list of one": {"stride": [2], "padding": (1,), "dilation": [1]},
}

TRANSPOSED = {
    "plain": {},
    "strided": {"stride": 2, "padding": 1, "output_padding": 1},
    "grouped": {"groups": 2, "stride": 3},
    "output_padding below the stride": {"stride": 3, "output_padding": 2},
    "output_padding of the stride and more": {"stride": 2, "dilation": 4, "output_padding": 3},
    "output_padding with no stride": {"dilation": 3, "output_padding": 2, "padding": 1},
}


@pytest.fixture(scope="module", autouse=True)
def one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def integers(*shape, dtype="float32", seed=0):
    """Return a tensor of small integers, whose sums are exact in every dtype."""
    numbers = torch.Generator().manual_seed(seed + sum(shape))
    drawn = torch.randint(-2, 3, shape, generator=numbers).to(getattr(torch, dtype))
    return drawn + 1j * drawn.roll(1) if dtype in COMPLEX else drawn


def layer_of(rules: dict, rank: int) -> dict:
    """Return the keywords of a layer, with different numbers on each axis for "per axis"."""
    return {key: list(range(1, rank + 1)) if v == "per axis" else v for key, v in rules.items()}


def operands(rank: int, rules: dict, dtype="float32", transposed=False):
    """Return input, weight and bias for 4 and 8 channels."""
    groups = rules.get("groups", 1)
    x = integers(2, 4, *(7 + 2 * i for i in range(rank)), dtype=dtype)
    w_shape = (4, 8 // groups) if transposed else (8, 4 // groups)
    w = integers(*w_shape, *(2 + i for i in range(rank)), dtype=dtype, seed=1)
    return x, w, integers(8, dtype=dtype, seed=2)


def assert_same(ours, theirs):
    assert ours.dtype == theirs.dtype
    assert ours.shape == theirs.shape
    assert torch.equal(ours, theirs)


# -- results and gradients -------------------------------------------------------------------------


# PyTorch warns that it copies the input for "same" with even filters.
@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths:UserWarning")
@pytest.mark.parametrize("dtype", [*DTYPES, *COMPLEX])
@pytest.mark.parametrize("name", [*LAYERS, *(f"transposed, {name}" for name in TRANSPOSED)])
@pytest.mark.parametrize("rank", RANKS)
def test_convolutions_and_gradients_match_pytorch(rank, name, dtype):
    *transposed, name = name.split(", ")
    rules = layer_of((TRANSPOSED if transposed else LAYERS)[name], rank)
    leaves = [t.requires_grad_() for t in operands(rank, rules, dtype, bool(transposed))]
    function = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
    ours, theirs = (getattr(module, function)(*leaves, **rules) for module in (ct, F))
    assert_same(ours, theirs)
    dy = integers(*theirs.shape, dtype=dtype, seed=3)
    results = (torch.autograd.grad(y, leaves, dy) for y in (ours, theirs))
    for gradient, reference in zip(*results, strict=True):
        assert_same(gradient, reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rank", RANKS)
def test_addend_and_its_gradient_match_a_separate_sum(rank, dtype):
    rules = {"stride": 2, "padding": 1}
    x, w, b = (t.requires_grad_() for t in operands(rank, rules, dtype))
    ours, theirs = getattr(ct, f"conv{rank}d"), getattr(F, f"conv{rank}d")
    y = theirs(x, w, b, **rules)
    add = integers(*y.shape, dtype=dtype, seed=5).transpose(0, 1).clone().transpose(0, 1)
    leaves = (x, w, b, add.requires_grad_())
    assert_same(ours(*leaves[:3], **rules, add=add), y + add)
    assert_same(ours(x[0], w, b, **rules, add=add[0]), (y + add)[0])
    dy = integers(*y.shape, dtype=dtype, seed=3)
    gradients = torch.autograd.grad(ours(x, w, b, **rules, add=add), leaves, dy)
    expected = torch.autograd.grad(theirs(x, w, b, **rules) + add, leaves, dy)
    for gradient, reference in zip(gradients, expected, strict=True):
        assert_same(gradient, reference)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from forward mode
def test_addend_is_differentiable_in_every_mode():
    x, w, b, add = doubles((2, 4, 6, 5), (6, 2, 3, 2), (6,), (2, 6, 3, 3))

    def residual(x, w, b, add):
        return ct.conv2d(x, w, b, 2, 1, 1, 2, add=add)

    assert torch.autograd.gradcheck(residual, (x, w, b, add), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(residual, (x, w, b, add))
    expected = F.conv2d(x, w, b, 2, 1, 1, 2) + add
    compiled = torch.compile(residual, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, w, b, add), expected)
    shared = torch.func.vmap(residual, (0, None, None, 0))
    pair = shared(torch.stack([x, x]), w, b, torch.stack([add, -add]))
    torch.testing.assert_close(pair, torch.stack([expected, expected - 2 * add]))


@pytest.mark.parametrize("rank", RANKS)
def test_positional_arguments_match_pytorch(rank):
    x, w, b = operands(rank, {"groups": 2})
    assert_same(
        getattr(ct, f"conv{rank}d")(x, w, b, 2, 1, 2, 2),
        getattr(F, f"conv{rank}d")(x, w, b, 2, 1, 2, 2),
    )
    x, w, b = operands(rank, {"groups": 2}, transposed=True)
    assert_same(
        getattr(ct, f"conv_transpose{rank}d")(x, w, b, 3, 1, 2, 2, 1),
        getattr(F, f"conv_transpose{rank}d")(x, w, b, 3, 1, 2, 2, 1),
    )


@pytest.mark.parametrize("name", [f"conv{r}d_{of}" for r in RANKS for of in ("input", "weight")])
def test_gradient_functions_match_torch_nn_grad(name):
    ours, theirs = getattr(ct, name), getattr(torch.nn.grad, name)
    signatures = [inspect.signature(f).parameters.values() for f in (ours, theirs)]
    our_parameters, their_parameters = ([(p.name, p.default) for p in s] for s in signatures)
    assert our_parameters == their_parameters
    rank, rules = int(name[4]), {"stride": 2, "padding": 1, "groups": 2}
    x, w, _ = operands(rank, rules)
    dy = integers(*getattr(F, name[:6])(x, w, **rules).shape, seed=4)
    arguments = (x.shape, w, dy) if name.endswith("input") else (x, w.shape, dy)
    assert_same(ours(*arguments, **rules), theirs(*arguments, **rules))


@pytest.mark.parametrize("rank", RANKS)
def test_batch_may_be_missing_or_empty(rank):
    x, w, b = operands(rank, {})
    for input in (x[0], x[:0]):
        ours = getattr(ct, f"conv{rank}d")(input, w, b, padding=1)
        assert_same(ours, getattr(F, f"conv{rank}d")(input, w, b, padding=1))
    x, w, b = operands(rank, {}, transposed=True)
    for input in (x[0], x[:0]):
        ours = getattr(ct, f"conv_transpose{rank}d")(input, w, b)
        assert_same(ours, getattr(F, f"conv_transpose{rank}d")(input, w, b))
    x, w, _ = operands(rank, {})
    dy = getattr(F, f"conv{rank}d")(x, w)
    dw = getattr(ct, f"conv{rank}d_weight")(x[0], w.shape, dy[0])
    assert_same(dw, getattr(ct, f"conv{rank}d_weight")(x[:1], w.shape, dy[:1]))
    dx = getattr(ct, f"conv{rank}d_input")(x.shape[1:], w, dy[0])
    assert_same(dx, getattr(ct, f"conv{rank}d_input")(x[:1].shape, w, dy[:1])[0])


def test_views_and_expanded_gradients_match_pytorch():
    wide = integers(2, 4, 9, 18)
    x, w, _ = wide[..., ::2], *operands(2, {})[1:]
    assert_same(ct.conv2d(x, w), F.conv2d(x, w))
    leaf = x.clone().requires_grad_()
    ct.conv2d(leaf, w).sum().backward()  # dy has strides of 0
    expected = leaf.grad
    leaf.grad = None
    F.conv2d(leaf, w).sum().backward()
    assert_same(expected, leaf.grad)


# -- derivatives -----------------------------------------------------------------------------------


def doubles(*shapes):
    numbers = torch.Generator().manual_seed(0)
    return [torch.randn(s, generator=numbers, dtype=torch.float64).requires_grad_() for s in shapes]


@pytest.mark.parametrize("rank", RANKS)
def test_first_and_second_derivatives_match_differences(rank):
    window = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    tail = (4, 3, 3)[:rank]
    conv, transposed = getattr(ct, f"conv{rank}d"), getattr(ct, f"conv_transpose{rank}d")
    fast = rank == 3  # random directions, as all directions take seconds
    for call, leaves in (
        (conv, doubles((2, 2, *tail), (4, 1, *[2] * rank), (4,))),
        (transposed, doubles((1, 4, *[2] * rank), (4, 1, *[2] * rank), (2,))),
    ):
        assert torch.autograd.gradcheck(partial(call, **window), leaves, fast_mode=fast)
        assert torch.autograd.gradgradcheck(partial(call, **window), leaves, fast_mode=fast)


def test_gradient_functions_are_twice_differentiable():
    x, w, dy = doubles((2, 2, 4, 3), (3, 2, 3, 2), (2, 3, 2, 2))
    for call, leaves in (
        (lambda w, dy: ct.conv2d_input((2, 2, 4, 3), w, dy), (w, dy)),
        (lambda x, dy: ct.conv2d_weight(x, (3, 2, 3, 2), dy), (x, dy)),
    ):
        assert torch.autograd.gradcheck(call, leaves)
        assert torch.autograd.gradgradcheck(call, leaves)


def test_third_derivatives_match_pytorch():
    leaves = doubles((1, 2, 5), (3, 2, 2))

    def third(conv):
        y = conv(*leaves, padding=1).tanh().sum()
        (dx,) = torch.autograd.grad(y, leaves[0], create_graph=True)
        (ddx,) = torch.autograd.grad(dx.pow(2).sum(), leaves[1], create_graph=True)
        return torch.autograd.grad(ddx.pow(2).sum(), leaves)

    for ours, theirs in zip(third(ct.conv1d), third(F.conv1d), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-10, atol=1e-10)


@pytest.fixture
def passes(monkeypatch):
    """Record the passes that the CPU computes, with the addresses of their tensors."""
    recorded = []
    run = backends.CpuBackend.run

    def record(self, planned, compute, arrays):
        addresses = {one.ctypes.data for one in arrays if isinstance(one, np.ndarray)}
        recorded.append((planned.pass_, addresses))
        return run(self, planned, compute, arrays)

    monkeypatch.setattr(backends.CpuBackend, "run", record)
    return recorded


def test_backward_computes_only_the_needed_gradients(passes):
    x, w, _ = operands(2, {})
    w.requires_grad_()
    ct.conv2d(x, w).sum().backward()
    assert [pass_ for pass_, _ in passes] == ["forward", "backprop_filter"]


# -- graphs ----------------------------------------------------------------------------------------


def network(x, w, b):
    """Both kinds of layers, with elementwise functions that a compiler may fuse."""
    y = ct.conv2d(x.relu(), w, b, stride=2, padding=1)
    return ct.conv_transpose2d(y * 2, w, stride=2, padding=1, output_padding=1).sigmoid()


def assert_compiles(backend: str, dynamic: bool | None):
    torch._dynamo.reset()
    compiled = torch.compile(network, fullgraph=True, backend=backend, dynamic=dynamic)
    for size in (8, 12):
        leaves = doubles((2, 3, size, size + 2), (4, 3, 3, 3), (4,))
        ours, expected = compiled(*leaves), network(*leaves)
        assert ours.stride() == expected.stride()
        torch.testing.assert_close(ours, expected)
        for gradient, reference in zip(
            torch.autograd.grad(ours.sum(), leaves),
            torch.autograd.grad(expected.sum(), leaves),
            strict=True,
        ):
            torch.testing.assert_close(gradient, reference)
    torch._dynamo.reset()


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch's compiler
@pytest.mark.parametrize("dynamic", [False, True])
def test_functions_compile_to_one_graph(dynamic):
    assert_compiles("aot_eager", dynamic)


@pytest.mark.slow  # calls a C++ compiler
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dynamic", [False, None])  # None: detect changing sizes
def test_functions_compile_with_inductor(dynamic):
    try:
        assert_compiles("inductor", dynamic)
    except torch._dynamo.exc.BackendCompilerFailed as error:
        if "compiler" in str(error):
            pytest.skip("there is no C++ compiler")
        raise


@pytest.mark.parametrize("order", ["contiguous", "channels_last"])
def test_operators_pass_opcheck(order):
    # opcheck covers the schema, fake shapes and strides, autograd and dynamic shapes.
    x, w, b = doubles((2, 4, 6, 5), (6, 2, 3, 2), (6,))
    if order == "channels_last":
        x = x.detach().to(memory_format=torch.channels_last).requires_grad_()
    window = [2, 1], [1, 0, 2, 1], [1, 2], 2
    operators = torch.ops.cupyconv
    torch.library.opcheck(operators.forward, (x, w, b, *window))
    add = torch.ones_like(operators.forward(x, w, b, *window)).requires_grad_()
    torch.library.opcheck(operators.forward, (x, w, b, *window), {"add": add})
    dy = operators.forward(x, w, b, *window).detach().requires_grad_()
    torch.library.opcheck(operators.backprop_input, (list(x.shape), w, dy, None, *window))
    shift = torch.ones(x.shape[1], dtype=x.dtype, requires_grad=True)
    torch.library.opcheck(operators.backprop_input, (list(x.shape), w, dy, shift, *window))
    torch.library.opcheck(operators.backprop_filter, (x, list(w.shape), dy, *window))


def test_meta_tensors_have_the_result_shapes():
    x, w, b = (t.to("meta") for t in operands(2, {}))
    y = ct.conv2d(x, w, b, stride=2)
    assert y.device.type == "meta"
    assert y.shape == F.conv2d(x, w, b, stride=2).shape
    with pytest.raises(ConvError, match="must fit into the padded input"):
        ct.conv2d(x, torch.empty(8, 4, 30, 3, device="meta"))
    with pytest.raises(ConvError, match="grad_output must have the output size"):
        ct.conv2d_weight(x, w.shape, y)


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("rank", [2, 3])
def test_results_keep_channels_last(rank):
    order = {2: torch.channels_last, 3: torch.channels_last_3d}[rank]
    x, w, b = operands(rank, {})
    conv, transposed = getattr(ct, f"conv{rank}d"), getattr(ct, f"conv_transpose{rank}d")
    for x_last, w_last in itertools.product((False, True), repeat=2):
        input = x.to(memory_format=order) if x_last else x
        leaves = [
            input.clone().requires_grad_(),
            (w.to(memory_format=order) if w_last else w).clone().requires_grad_(),
        ]
        y = conv(*leaves, b, padding=1)
        assert_same(y, getattr(F, f"conv{rank}d")(x, w, b, padding=1))
        assert y.is_contiguous(memory_format=order) == (x_last or w_last)
        assert y.is_contiguous() == (not (x_last or w_last))
        dx, dw = torch.autograd.grad(y, leaves, torch.ones_like(y))
        assert dx.is_contiguous(memory_format=order) == (x_last or w_last)
        assert dw.is_contiguous(memory_format=order) == (x_last or w_last)
        back = transposed(y.detach(), leaves[1], padding=1)
        assert back.is_contiguous(memory_format=order) == (x_last or w_last)


@pytest.mark.parametrize("dtype", DTYPES)
def test_passes_use_the_tensors_memory(passes, dtype):
    x, w, b = operands(2, {}, dtype)
    y = ct.conv2d(x, w, b)
    assert passes == [("forward", {tensor.data_ptr() for tensor in (x, w, y, b)})]


# -- autocast --------------------------------------------------------------------------------------


def test_autocast_dtypes_match_pytorch():
    x, w, b = (t.requires_grad_() for t in operands(2, {}))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        ours, theirs = ct.conv2d(x, w, b), F.conv2d(x, w, b)
        mixed = ct.conv2d(x, w.detach().bfloat16(), b)
        exact = ct.conv2d(x.double(), w.double(), b.double())
    assert ours.dtype == theirs.dtype == torch.bfloat16
    assert_same(ours, theirs)
    assert_same(mixed, theirs)
    assert exact.dtype == torch.float64
    (dw,) = torch.autograd.grad(ours.sum(), w)
    assert dw.dtype == torch.float32


# -- bad input -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from TorchScript
def test_operators_reject_dual_tensors():
    """Custom operators only support reverse mode; PyTorch would drop a tangent silently."""
    x, w, _ = operands(2, {})
    layer = ([1, 1], [0] * 4, [1, 1], 1)
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
        with pytest.raises(ConvTypeError, match=r"tangent would be lost.*cupyconv\.torch\.conv2d"):
            torch.ops.cupyconv.forward(dual, w, None, *layer)
        y = torch.ops.cupyconv.forward(x, w, None, *layer)
        ours, theirs = (
            torch.autograd.forward_ad.unpack_dual(function(dual, w))
            for function in (ct.conv2d, F.conv2d)
        )
    assert_same(ours.primal, y)
    assert_same(ours.tangent, theirs.tangent)


def test_forward_mode_works_under_dispatch_modes():
    """PyTorch excludes the dispatch key of dual tensors while a mode's kernel runs."""
    flop_counter = pytest.importorskip("torch.utils.flop_counter")
    proxy_tensor = pytest.importorskip("torch.fx.experimental.proxy_tensor")
    x, w, _ = operands(2, {})
    x, w = x.double(), w.double()
    tangent = torch.randn_like(x)

    def jvp(conv, x):
        return torch.func.jvp(lambda x: conv(x, w).pow(2), (x,), (tangent,))[1]

    def hessian(conv, x):
        return torch.func.hessian(lambda x: conv(x, w[:1]).pow(3).sum())(x[:1, :, :4, :4])

    for transform in (jvp, hessian):
        expected = transform(F.conv2d, x)
        with flop_counter.FlopCounterMode(display=False):
            torch.testing.assert_close(transform(ct.conv2d, x), expected)
    traced = proxy_tensor.make_fx(lambda x: jvp(ct.conv2d, x))(x)
    torch.testing.assert_close(traced(x + 1), jvp(F.conv2d, x + 1))

    layer = ([1, 1], [0] * 4, [1, 1], 1)
    forward_ad = torch.autograd.forward_ad
    with forward_ad.dual_level(), flop_counter.FlopCounterMode(display=False):
        dual = forward_ad.make_dual(x, tangent)
        with pytest.raises(ConvTypeError, match="tangent would be lost"):
            torch.ops.cupyconv.forward(dual, w, None, *layer)


CALLS_WITH_OUT = {
    "conv_forward": lambda x, w, y: cupyconv.conv_forward(x, w, out=y),
    "conv_backprop_input": lambda x, w, y: cupyconv.conv_backprop_input(x.shape, w, y, out=x),
    "conv_backprop_filter": lambda x, w, y: cupyconv.conv_backprop_filter(x, w.shape, y, out=w),
    "conv_backprop_bias": lambda x, w, y: cupyconv.conv_backprop_bias(y, out=w[:, 0, 0, 0]),
    "conv_transpose": lambda x, w, y: cupyconv.conv_transpose(y, w, out=x),
    "cudnn": lambda x, w, y: cudnn.convolution_forward(
        x, w, None, y, (0, 0), (1, 1), (1, 1), 1, auto_tune=False, tensor_core="auto"
    ),
}


@pytest.mark.parametrize("name", CALLS_WITH_OUT)
def test_autograd_detects_a_write_to_out(name):
    """Autograd rejects a gradient that needs an overwritten tensor."""
    x, w, y = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3), torch.ones(1, 1, 2, 2)
    output = {"conv_forward": y, "cudnn": y, "conv_backprop_input": x, "conv_transpose": x}
    saved = output.get(name, w)
    p = torch.ones_like(saved, requires_grad=True)
    loss = (p * saved).sum()
    CALLS_WITH_OUT[name](x, w, y)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_out_may_be_an_inference_tensor():
    """Inference tensors have no version counter."""
    x, w = torch.ones(1, 1, 4, 4), torch.ones(1, 1, 3, 3)
    with torch.inference_mode():
        y = torch.empty(1, 1, 2, 2)
    assert cupyconv.conv_forward(x, w, out=y) is y
    assert_same(y, F.conv2d(x, w))


@pytest.mark.filterwarnings("ignore")  # some of these kinds are prototypes or deprecated
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x, w, b: (x.numpy(), w, b), r"input must be a tensor: got ndarray.*from_dlpack"),
        (lambda x, w, b: (x, w.double(), b), r"input is torch\.float32, weight is torch\.float64"),
        (lambda x, w, b: (x, w, b.half()), r"bias is torch\.float16.*bias\.to\(torch\.float32\)"),
        (
            lambda x, w, b: (x.long(), w.long(), b.long()),
            r"input is torch\.int64.*input\.to\(",
        ),
        (
            lambda x, w, b: (x.to(torch.complex32), w, None),
            r"complex32.*input\.to\(torch\.complex64\)",
        ),
        (lambda x, w, b: (x.to_sparse(), w, b), r"dense tensor.*input\.to_dense"),
        (
            lambda x, w, b: (torch.quantize_per_tensor(x, 1.0, 0, torch.qint8), w, b),
            r"quantised\. Pass input\.dequantize\(\)",
        ),
        (
            lambda x, w, b: (x, torch.masked.masked_tensor(w, w > 0), b),
            r"masked tensor.*weight\.to_tensor\(0\)",
        ),
        (
            lambda x, w, b: (torch.nested.nested_tensor([x[0], x[0, :, :5]]), w, b),
            r"input is a nested tensor.*separately",
        ),
        (lambda x, w, b: (x.to("meta"), w, b), r"input is on meta, weight on cpu.*weight\.to"),
    ],
)
def test_unsupported_tensors_are_rejected(change, said):
    with pytest.raises(ConvTypeError, match=said):
        ct.conv2d(*change(*operands(2, {})))


@pytest.mark.parametrize(
    ("shapes", "said"),
    [
        (((2, 8), (3, 2, 3), (3, 5)), r"add is 3x5, the result is 3x6. Pass add with shape (3, 6)"),
        (((2, 8), (3, 2, 3), ()), r"add is a scalar, the result is 3x6. Pass add with shape"),
        (((1, 0, 8), (3, 0, 3), (4, 0, 6)), "add is 4x0x6, the result is 1x0x6"),
        (((0, 8), (3, 0, 3), (2, 0, 6)), "add is 2x0x6, the result is 0x6"),
        (((2, 0, 8), (3, 0, 3), (2, 3, 6)), "add is 2x3x6, the result is 2x0x6"),
        (((2, 2, 8), (3, 2, 9), (2, 3, 6)), "the weight must fit into the padded input"),
    ],
)
def test_addend_of_another_shape_is_rejected(shapes, said):
    x, w, add = map(torch.ones, shapes)
    with pytest.raises(ConvError, match=re.escape(said)):
        ct.conv1d(x, w, add=add)


def test_addend_of_another_dtype_is_rejected():
    x, w, _ = operands(2, {})
    with pytest.raises(ConvTypeError, match=r"input is torch\.float32, add is torch\.float64"):
        ct.conv2d(x, w, add=ct.conv2d(x, w).double())


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda x, w, b: ct.conv2d(x, w, b[:3]), r"one value for each output channel"),
        (lambda x, w, b: ct.conv2d(x, w, add=x), r"add must have the result's shape"),
        (
            lambda x, w, b: torch.vmap(lambda x: ct.conv2d(x, w, add=x))(x[None]),
            r"add must have the result's shape",
        ),
        (
            lambda x, w, b: ct.conv2d(x.to("meta"), w.to("meta"), add=x.to("meta")),
            r"add must have the result's shape",
        ),
        (
            lambda x, w, b: ct.conv1d(x, w, b),
            r"1-D convolution must have 3 axes.*for 2 spatial axes",
        ),
        (lambda x, w, b: ct.conv2d(x[0, 0], w, b), r"must have 4 axes, or 3 without a batch"),
        (lambda x, w, b: ct.conv2d(x, w, padding="full"), r"Use padding=\(1, 2\)"),
        (lambda x, w, b: ct.conv2d(x, w, padding="same", stride=2), r"stride must be 1"),
        (lambda x, w, b: ct.conv_transpose2d(b.new_ones(1, 8, 3, 3), w, b), r"bias.*4 output"),
        (
            lambda x, w, b: ct.conv_transpose2d(b.new_ones(1, 8, 3, 3), w, output_padding=1),
            r"less than the stride or the dilation.*\(axis H\)|Use 0",
        ),
        (
            lambda x, w, b: ct.conv_transpose2d(b.new_ones(1, 8, 3, 3), w, stride=(1, 0)),
            r"stride must be at least 1 \(axis W\): got 0",
        ),
        (
            lambda x, w, b: ct.conv_transpose2d(b.new_ones(1, 8, 3, 3), w, padding="same"),
            r"must be one or more integers",
        ),
        (lambda x, w, b: ct.conv2d_input((2, 4, 9, 9), w, x), r"grad_output must have one channel"),
    ],
)
def test_invalid_calls_give_the_remedy(call, said):
    with pytest.raises(ConvError, match=said):
        call(*operands(2, {}))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from forward mode
def test_import_error_names_pytorch(monkeypatch):
    for name in [n for n in sys.modules if n.startswith("cupyconv.torch")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(ImportError, match=r"needs PyTorch.*pytorch\.org"):
        importlib.import_module("cupyconv.torch")


@pytest.mark.skipif(not hasattr(torch, "mps"), reason="torch has no mps device")
def test_unsupported_device_is_named():
    class Elsewhere:
        is_nested = is_quantized = False
        layout = torch.strided
        device = torch.device("mps")

    stand_in = Elsewhere()
    from cupyconv.torch import functions

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(functions, "Tensor", Elsewhere)
        with pytest.raises(ConvTypeError, match=r"input is on mps.*input\.cpu\(\)"):
            functions._cast("input", stand_in, "weight", stand_in)


def test_cuda_tensor_needs_cupy_and_a_gpu():
    from cupyconv import arrays
    from cupyconv.torch import operators

    if arrays.device_count():
        pytest.skip("there is a GPU")
    with pytest.raises(DeviceError), operators._place(torch.device("cuda", 0)):
        pass


# -- models ----------------------------------------------------------------------------------------


class Net(torch.nn.Module):
    """Residual network with a strided shortcut."""

    def __init__(self) -> None:
        super().__init__()
        conv, norm = torch.nn.Conv2d, torch.nn.BatchNorm2d(12)
        self.stem = conv(3, 8, 3, padding=1, padding_mode="reflect")
        self.block = torch.nn.Sequential(
            conv(8, 12, 3, 2, 1, bias=False), norm, torch.nn.ReLU(), conv(12, 12, 3, padding=1)
        )
        self.shortcut = conv(8, 12, 1, 2)
        self.head = torch.nn.Linear(12, 5)

    def forward(self, x):
        x = self.stem(x)
        return self.head(F.relu(self.block(x) + self.shortcut(x)).mean((2, 3)))


def train(steps: int, dtype, order=torch.contiguous_format) -> list[float]:
    """Return the losses of some SGD steps from fixed weights and data."""
    torch.manual_seed(0)
    model = Net().to(dtype=dtype, memory_format=order)
    x = torch.randn(4, 3, 12, 10).to(dtype=dtype, memory_format=order)
    target = torch.arange(4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x), target)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("order", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("dtype", "rounding"), [(torch.float64, 1e-12), (torch.float32, 1e-4)])
def test_patched_network_trains_like_pytorch(dtype, rounding, order):
    expected = train(12, dtype)
    with ct.patch() as report:
        losses = train(12, dtype, order)
    np.testing.assert_allclose(losses, expected, rtol=rounding)
    assert losses[-1] < losses[0] / 2
    assert report.left == {}
    assert report.taken == ("stem", "block.0", "block.3", "shortcut")
    assert set(report.calls.values()) == {12}
    assert train(1, dtype) == expected[:1]  # outside the patch


def test_patch_report_lists_calls_and_reasons():
    x, w, _ = operands(2, {})
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3), torch.nn.ReLU())
    integer_layer = torch.nn.Conv1d(2, 3, 3, bias=False)
    integer_layer.weight = torch.nn.Parameter(integers(3, 2, 3).long(), requires_grad=False)
    with ct.patch() as report:
        y = F.conv2d(x, w)
        model(x)
        z = integer_layer(torch.ones(1, 2, 9, dtype=torch.int64))
        torch.conv_transpose2d(y, w)
        F.relu(x)
    assert_same(y, F.conv2d(x, w))
    assert z.dtype == torch.int64
    assert report.taken == ("", "0")
    assert list(report.left) == ["Conv1d"]
    assert "int64" in report.left["Conv1d"]
    assert [key[:2] for key in report.calls] == [
        ("", "conv2d"),
        ("0", "conv2d"),
        ("Conv1d", "conv1d"),
        ("", "conv_transpose2d"),
    ]
    text = str(report)
    assert "0: conv2d, 1 call, by cupyconv" in text
    assert "Conv1d: conv1d, 1 call, dtype must be one of" in text


def test_patch_leaves_errors_to_pytorch():
    def broken(module, inputs):
        raise KeyError("in the model")

    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3))
    x = integers(1, 4, 6, 6)
    with ct.patch() as report:
        with pytest.raises(RuntimeError, match="expected input"):
            F.conv2d(x[:, :2], model[0].weight)
        handle = model[0].register_forward_pre_hook(broken)
        with pytest.raises(KeyError):
            model(x)
        handle.remove()
        model(x)
    assert report.taken == ("0",)
    assert str(ct.PatchReport()) == "no convolution was called"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # from PyTorch's compiler
@pytest.mark.filterwarnings("ignore:Using `torch.compile:UserWarning")  # from the hooks of a patch
def test_patch_recompiles_a_compiled_model(passes):
    torch._dynamo.reset()
    model = torch.nn.Sequential(
        torch.nn.Conv2d(4, 6, 3, padding=1), torch.nn.ReLU(), torch.nn.Conv2d(6, 2, 3)
    )
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    x = integers(2, 4, 7, 6).requires_grad_()
    expected = compiled(x)
    assert passes == []
    for _ in range(2):
        passes.clear()
        with ct.patch() as report:
            y = compiled(x)
        assert [pass_ for pass_, _ in passes] == ["forward"] * 2
        assert report.calls == {("in a compiled graph", "conv2d", None): 2}
        assert str(report) == "in a compiled graph: conv2d, 2 calls, by cupyconv"
    torch.testing.assert_close(y, expected)
    for gradient, reference in zip(
        torch.autograd.grad(y.sum(), [x, *model.parameters()]),
        torch.autograd.grad(expected.sum(), [x, *model.parameters()]),
        strict=True,
    ):
        torch.testing.assert_close(gradient, reference)
    backward = sorted(pass_ for pass_, _ in passes[2:])
    assert backward == ["backprop_filter"] * 2 + ["backprop_input"] * 2
    passes.clear()
    torch.testing.assert_close(compiled(x), expected)
    assert passes == []  # outside the patch
    torch._dynamo.reset()


def test_patches_may_be_nested():
    model = torch.nn.Sequential(torch.nn.Conv2d(4, 4, 3))
    with ct.patch() as outer, ct.patch() as inner:
        model(integers(1, 4, 6, 6))
    assert inner.taken == ("0",)
    assert outer.taken == ()


def test_type_error_for_none_suggests_no_conversion():
    with pytest.raises(ConvTypeError, match=r"weight must be a tensor: got NoneType$"):
        ct.conv2d(torch.ones(1, 1, 3, 3), None)
