"""Features that PyTorch programs use around convolutions, with a patch and with direct calls."""

from __future__ import annotations

import importlib
import itertools
import warnings

import numpy as np
import pytest

from cupyconv import ConvError, ConvTypeError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
ct = importlib.import_module("cupyconv.torch")
F = torch.nn.functional
func = torch.func
forward_ad = torch.autograd.forward_ad

# PyTorch's forward mode uses deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")


def integers(*shape, seed=0, dtype=torch.float64):
    numbers = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randint(-3, 4, shape, generator=numbers).to(dtype)


def checkpointed(layer, x):
    return torch.utils.checkpoint.checkpoint(layer, x, use_reentrant=False)


# -- convolutions during backward ------------------------------------------------------------------


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("kind", ["Conv2d", "ConvTranspose2d"])
def test_checkpoint_recomputes_on_cupyconv(kind, inside):
    layer = getattr(torch.nn, kind)(3, 2, 2, stride=2)
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    (expected,) = torch.autograd.grad(layer(x).square().sum(), x)
    with ct.patch() as report:
        loss = checkpointed(layer, x).square().sum()
        if inside:
            loss.backward()
    if not inside:
        loss.backward()
    torch.testing.assert_close(x.grad, expected)
    assert report.left == {}
    assert sum(report.calls.values()) == (2 if inside else 1)


class Backwards(torch.autograd.Function):
    """Function that calls a convolution in its backward."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(w)
        return F.conv2d(x, w)

    @staticmethod
    def backward(ctx, dy):
        (w,) = ctx.saved_tensors
        return F.conv_transpose2d(dy, w), None


def test_patch_intercepts_convolutions_inside_backward():
    x, w = integers(1, 2, 5, 5).requires_grad_(), integers(3, 2, 2, 2)
    (expected,) = torch.autograd.grad(Backwards.apply(x, w).sum(), x)
    for run in (
        lambda y: y.sum().backward(),
        lambda y: torch.autograd.grad(y.sum(), x),
        lambda y: torch.autograd.grad([y], [x], grad_outputs=[torch.ones_like(y)])[0].sum(),
    ):
        with ct.patch() as report:
            run(Backwards.apply(x, w))
        assert ("", "conv_transpose2d", None) in report.calls
    assert torch.equal(x.grad, expected)


# -- tracing and scripting -------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::torch.jit.TracerWarning")
def test_jit_trace_is_left_to_pytorch_and_reported():
    model, x = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3)), torch.randn(1, 2, 6, 6)
    with ct.patch() as report:
        traced = torch.jit.trace(model, x)
    assert list(report.left) == ["0"]
    assert "torch.jit.trace does not see" in report.left["0"]
    torch.testing.assert_close(traced(x), model(x))
    with pytest.raises(ConvTypeError, match=r"torch\.export"):
        torch.jit.trace(lambda t: ct.conv2d(t, model[0].weight), x)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_scripted_module_is_reported():
    model, x = torch.nn.Sequential(torch.nn.Conv2d(2, 3, 3)), torch.randn(1, 2, 6, 6)
    partly_scripted = torch.nn.Sequential(torch.jit.script(model), torch.nn.Conv2d(3, 1, 1))
    with ct.patch() as report:
        partly_scripted(x)
    assert report.taken == ("1",)
    assert "calls in TorchScript cannot be replaced" in report.left["0"]
    assert "0: its TorchScript, 1 call, by PyTorch" in str(report)


# -- arguments -------------------------------------------------------------------------------------


@pytest.mark.parametrize("integer", [np.int64, np.uint8, torch.tensor])
def test_integers_of_any_library_are_accepted(integer):
    x, w = integers(1, 4, 9, 9), integers(4, 2, 3, 3)
    rules = {"stride": 2, "padding": 1, "dilation": 2, "groups": 2}
    for conv, extra in (("conv2d", {}), ("conv_transpose2d", {"output_padding": 1})):
        expected = getattr(F, conv)(x, w, **rules, **extra)
        converted = {key: integer(value) for key, value in {**rules, **extra}.items()}
        assert torch.equal(getattr(ct, conv)(x, w, **converted), expected)
        listed = {k: v if k == "groups" else [v, v] for k, v in converted.items()}
        assert torch.equal(getattr(ct, conv)(x, w, **listed), expected)
    with ct.patch() as report:
        F.conv2d(x, w, **{key: integer(value) for key, value in rules.items()})
    assert report.left == {}
    for wrong in (1.5, "2", None, [1.0, 1]):
        with pytest.raises(ConvTypeError, match="stride must be made of integers"):
            ct.conv2d(x, w, stride=wrong, groups=2)


def test_result_strides_match_pytorch():
    """Sizes of 1 make both memory orders match, and one operand alone may be channels last."""
    sizes = itertools.product((1, 2), (1, 3), (1, 8), ((7, 6), (1, 1)), ((3, 2), (1, 1)))
    for images, channels, filters, pixels, taps in sizes:
        x, w = integers(images, channels, *pixels), integers(filters, channels, *taps)
        for x_last, w_last in itertools.product((False, True), repeat=2):
            arguments = [
                t.to(memory_format=torch.channels_last) if last else t
                for t, last in ((x, x_last), (w, w_last))
            ]
            ours, theirs = ct.conv2d(*arguments, padding=1), F.conv2d(*arguments, padding=1)
            assert torch.equal(ours, theirs)
            message = f"{[(tuple(t.shape), t.stride()) for t in arguments]}"
            assert ours.stride() == theirs.stride(), message


def test_errors_are_runtime_errors():
    x, w = integers(1, 2, 5, 5), integers(3, 2, 9, 9)
    with pytest.raises(RuntimeError, match="must fit into the padded input") as caught:
        ct.conv2d(x, w)
    assert isinstance(caught.value, ConvError)
    assert caught.value.axis == "H"
    with pytest.raises(RuntimeError, match="all tensors must have one dtype") as caught:
        ct.conv2d(x, w.float())
    assert isinstance(caught.value, ConvTypeError)


@pytest.mark.parametrize("batch", [0, 2])
@pytest.mark.parametrize("has_bias", [False, True])
def test_results_without_input_channels_match_pytorch(batch, has_bias):
    x = torch.zeros(batch, 0, 15, requires_grad=True)
    w, b = torch.zeros(8, 0, 2, requires_grad=True), torch.arange(8.0, requires_grad=True)
    arguments = (x, w, b) if has_bias else (x, w)
    ours, theirs = (m.conv1d(*arguments, stride=2, padding=1) for m in (ct, F))
    assert ours.shape == theirs.shape == (batch, 0, 8)
    if batch:
        got, expected = (torch.autograd.grad(y.sum(), arguments) for y in (ours, theirs))
        assert all(map(torch.equal, got, expected))
    with pytest.raises(ConvError, match="must fit"):
        ct.conv1d(x, torch.zeros(8, 0, 16))


@pytest.mark.parametrize("rank", [1, 2, 3])
def test_patch_replaces_torch_nn_grad(rank):
    x, w = integers(2, 4, *[7, 6, 5][:rank]), integers(6, 2, *[3, 2, 2][:rank], seed=1)
    rules = {"stride": 2, "padding": 1, "groups": 2}
    dy = integers(*getattr(F, f"conv{rank}d")(x, w, **rules).shape, seed=2)
    calls = (
        lambda: getattr(torch.nn.grad, f"conv{rank}d_input")(x.shape, w, dy, **rules),
        lambda: getattr(torch.nn.grad, f"conv{rank}d_weight")(x, w.shape, dy, **rules),
    )
    expected = [call() for call in calls]
    with ct.patch() as report:
        got = [call() for call in calls]
    assert all(map(torch.equal, got, expected))
    assert report.calls == {("", "convolution_backward", None): 2}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_patch_replaces_torch_convolution(rank, transposed):
    x, w = integers(2, 4, *[7, 6, 5][:rank]), integers(4, 2, *[3, 2, 2][:rank], seed=1)
    bias, ones = integers(4, seed=2), [1] * rank
    arguments = (x, w, bias, [2] * rank, ones, ones, transposed, [int(transposed)] * rank, 2)
    expected = torch.convolution(*arguments)
    with ct.patch() as report:
        assert torch.equal(torch.convolution(*arguments), expected)
        assert torch.equal(torch.ops.aten.convolution(*arguments), expected)
    assert report.calls == {("", "convolution", None): 2}


def test_patch_replaces_convolution_backward():
    x, w, dy = integers(2, 4, 7), integers(4, 4, 3, seed=1), integers(2, 4, 5, seed=2)
    backward = torch.ops.aten.convolution_backward
    window = ([1], [0], [1])
    tail = ([0], 1, [True, True, True])
    with ct.patch() as report:
        got = backward(dy, x, w, [4], *window, False, *tail)
        backward(integers(2, 4, 7), integers(2, 4, 5), w, [4], *window, True, *tail)
    assert all(map(torch.equal, got, backward(dy, x, w, [4], *window, False, *tail)))
    assert [why is None for _, _, why in report.calls] == [True, False]


# -- function transforms ---------------------------------------------------------------------------

LAYERS = [
    ("conv1d", (2, 4, 9), (6, 2, 3), (6,), {"stride": 2, "padding": 1, "groups": 2}),
    ("conv2d", (2, 4, 7, 6), (6, 4, 3, 2), (6,), {"dilation": 2, "padding": (2, 1)}),
    ("conv2d", (4, 7, 6), (4, 1, 3, 3), None, {"padding": "same", "groups": 4}),
    ("conv3d", (1, 2, 4, 5, 4), (3, 2, 2, 3, 2), (3,), {}),
    ("conv_transpose1d", (2, 4, 5), (4, 3, 3), (6,), {"stride": 2, "groups": 2}),
    ("conv_transpose2d", (2, 3, 4, 5), (3, 2, 3, 2), (2,), {"stride": 2, "output_padding": 1}),
]


@pytest.fixture(params=LAYERS, ids=lambda layer: f"{layer[0]}-{len(layer[1])}")
def layer(request):
    """Return cupyconv's and PyTorch's function of a layer, and its operands."""
    name, x, w, b, rules = request.param
    operands = [integers(*shape, seed=n) for n, shape in enumerate((x, w, b)) if shape is not None]

    def function_of(module):
        return lambda *arguments: getattr(module, name)(*arguments, **rules)

    return function_of(ct), function_of(F), operands


def nonempty_choices(operands):
    """Return every non-empty choice of operands, as tuples of booleans."""
    return (
        choice for choice in itertools.product((False, True), repeat=len(operands)) if any(choice)
    )


def test_vmap_matches_pytorch_without_warnings(layer):
    ours, theirs, operands = layer
    for choice in nonempty_choices(operands):
        dims = tuple(turn % 2 if c else None for turn, c in enumerate(choice))
        given = [
            o if d is None else torch.stack([o, 2 * o, o - 1], dim=d)
            for o, d in zip(operands, dims, strict=True)
        ]
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # for example about a missing batching rule
            got = func.vmap(ours, in_dims=dims)(*given)
        assert torch.equal(got, func.vmap(theirs, in_dims=dims)(*given))


def test_vmap_without_examples_has_the_right_shapes(layer):
    """PyTorch's vmap fails without examples, or returns wrong shapes."""
    ours, theirs, operands = layer
    argnums = tuple(range(len(operands)))
    reference = theirs(*operands)
    for dims in itertools.product((None, 0, 1, -1), repeat=len(operands)):
        if dims == (None,) * len(operands):
            continue
        given = [
            o if d is None else o.new_empty(0, *o.shape).movedim(0, d)
            for o, d in zip(operands, dims, strict=True)
        ]

        def mapped(*given, dims=dims):
            return func.vmap(ours, in_dims=dims)(*given)

        assert mapped(*given).shape == (0, *reference.shape)
        y, tangent = func.jvp(mapped, tuple(given), tuple(given))
        assert y.shape == tangent.shape == (0, *reference.shape)
        # Gradients are zero, as no result depends on the operands.
        leaves = [o.clone().requires_grad_() for o in given]
        for gradients in (
            func.grad(lambda *given: mapped(*given).sum(), argnums)(*given),
            torch.autograd.grad(mapped(*leaves).sum(), leaves),
        ):
            for gradient, o in zip(gradients, given, strict=True):
                assert torch.equal(gradient, torch.zeros_like(o))
        loss = func.grad(lambda *given: ours(*given).square().sum(), argnums)
        for gradient, o in zip(func.vmap(loss, in_dims=dims)(*given), operands, strict=True):
            assert gradient.shape == (0, *o.shape)


def test_per_example_gradients_match_pytorch(layer):
    ours, theirs, operands = layer
    many = [torch.stack([o, o + 1]) for o in operands]
    which = tuple(range(len(operands)))

    def gradients(f):
        return func.grad(lambda *given: f(*given).square().sum(), argnums=which)

    def jacobians(f):
        return func.jacrev(lambda *given: f(*given).sum((-1, -2)), argnums=which)

    for make, given in (
        (gradients, operands),
        (lambda f: func.vmap(gradients(f)), many),
        (jacobians, operands),
    ):
        for got, expected in zip(make(ours)(*given), make(theirs)(*given), strict=True):
            assert torch.equal(got, expected)


def test_forward_mode_matches_pytorch(layer):
    ours, theirs, operands = layer
    tangents = [integers(*o.shape, seed=9) for o in operands]
    for got, expected in zip(
        func.jvp(ours, tuple(operands), tuple(tangents)),
        func.jvp(theirs, tuple(operands), tuple(tangents)),
        strict=True,
    ):
        assert torch.equal(got, expected)
    for choice in nonempty_choices(operands):
        results = []
        with forward_ad.dual_level():
            for f in (ours, theirs):
                given = [
                    forward_ad.make_dual(o, t) if c else o
                    for o, t, c in zip(operands, tangents, choice, strict=True)
                ]
                results.append(forward_ad.unpack_dual(f(*given)))
        assert torch.equal(results[0].primal, results[1].primal)
        assert torch.equal(results[0].tangent, results[1].tangent)


def test_hessians_match_pytorch():
    x, w = integers(1, 2, 4, 4), integers(2, 2, 2, 2)

    def loss(module):
        return lambda x, w: (module.conv2d(x, w) ** 3).sum()

    ours, theirs = (func.hessian(loss(module), argnums=(0, 1))(x, w) for module in (ct, F))
    for got, expected in zip(itertools.chain(*ours), itertools.chain(*theirs), strict=True):
        assert torch.equal(got, expected)


def test_vmap_of_gradient_functions_matches_pytorch():
    x, w = integers(3, 2, 4, 6, 6), integers(4, 4, 3, 3)
    dy = integers(3, *F.conv2d(x[0], w).shape)
    for ours, theirs, given in (
        (ct.conv2d_weight, torch.nn.grad.conv2d_weight, (x, w.shape, dy)),
        (ct.conv2d_input, torch.nn.grad.conv2d_input, (x.shape[1:], w, dy)),
    ):
        dims = tuple(0 if t is x or t is dy else None for t in given)
        got = func.vmap(ours, in_dims=dims)(*given)
        for number in range(3):
            example = [t[number] if d == 0 else t for t, d in zip(given, dims, strict=True)]
            assert torch.equal(got[number], theirs(*example))


def test_patch_handles_function_transforms():
    x, w = integers(2, 4, 7, 7), integers(3, 4, 3, 3)
    with ct.patch() as report:
        func.vmap(lambda t: F.conv2d(t[None], w))(x)
        func.jvp(lambda t: F.conv2d(t, w), (x,), (x,))
        func.grad(lambda t: F.conv2d(t, w).sum())(x)
        with forward_ad.dual_level():
            F.conv_transpose2d(forward_ad.make_dual(F.conv2d(x, w), F.conv2d(x, w)), w)
        F.conv2d(torch.ones(1, 0, 5, 5), torch.ones(2, 0, 3, 3))
    assert report.left == {}
    assert sum(report.calls.values()) == 7


# -- complex numbers -------------------------------------------------------------------------------


def complex_integers(*shape, seed=0):
    return torch.complex(integers(*shape, seed=seed), integers(*shape, seed=seed + 9))


@pytest.mark.thorough
def test_complex_layers_pass_gradient_checks():
    x, w = complex_integers(2, 2, 5, 4), complex_integers(3, 2, 2, 2, seed=1)
    t = complex_integers(3, seed=2)
    leaves = tuple(v.requires_grad_() for v in (x, w, t))
    assert torch.autograd.gradcheck(lambda *v: ct.conv2d(*v, stride=2, padding=1), leaves)
    assert torch.autograd.gradgradcheck(lambda *v: ct.conv2d(*v, padding=1), leaves)
    back = complex_integers(2, 3, 3, 3).requires_grad_(), w, t[:2].detach().requires_grad_()
    assert torch.autograd.gradcheck(
        lambda *v: ct.conv_transpose2d(*v, stride=2), back, check_forward_ad=True
    )
    many = torch.stack([x.detach(), x.detach().conj()])
    got = func.vmap(lambda v: ct.conv2d(v, w))(many)
    assert torch.equal(got, torch.stack([F.conv2d(example, w) for example in many]))


def test_conjugated_views_match_pytorch():
    x, w = complex_integers(2, 2, 5, 4), complex_integers(3, 2, 2, 2, seed=1)
    dy = complex_integers(*F.conv2d(x, w).shape)
    assert torch.equal(ct.conv2d(x.conj(), w.conj()), F.conv2d(x.conj(), w.conj()))
    leaves = x.requires_grad_(), w.requires_grad_()
    dx, dw = torch.autograd.grad(F.conv2d(*leaves), leaves, dy)
    assert torch.equal(ct.conv2d_input(x.shape, w, dy), dx)
    assert torch.equal(ct.conv2d_weight(x, w.shape, dy), dw)
    with ct.patch() as report:
        F.conv2d(x, w)
        torch.nn.ConvTranspose1d(2, 3, 2, dtype=torch.complex64)(torch.ones(1, 2, 4).cfloat())
    assert report.left == {}


@pytest.mark.parametrize("dynamic", [False, True])
def test_complex_layers_compile_to_one_graph(dynamic):
    x, w = complex_integers(2, 2, 5, 4), complex_integers(3, 2, 2, 2, seed=1)
    compiled = torch.compile(
        lambda x, w: ct.conv_transpose2d(ct.conv2d(x, w), w),
        fullgraph=True,
        backend="aot_eager",
        dynamic=dynamic,
    )
    assert torch.equal(compiled(x, w), F.conv_transpose2d(F.conv2d(x, w), w))


def test_lazily_conjugated_filter_supports_forward_mode():
    x, w = (torch.randn(shape, dtype=torch.complex128) for shape in ((1, 2, 4), (2, 2, 3)))
    tangent = torch.randn_like(w)
    ours = torch.func.jvp(lambda q: ct.conv_transpose1d(x, q), (w.conj(),), (tangent,))
    theirs = torch.func.jvp(lambda q: F.conv_transpose1d(x, q), (w.conj(),), (tangent,))
    for got, expected in zip(ours, theirs, strict=True):
        torch.testing.assert_close(got, expected)
