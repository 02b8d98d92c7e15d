"""PyTorch's tools with ``cupyconv.torch``: exporters, tracers, transforms, hooks, counters."""

from __future__ import annotations

import importlib
import io
import itertools
import subprocess
import sys
import threading
import warnings

import pytest

from cupyconv import ConvTypeError

torch = pytest.importorskip("torch", reason="PyTorch is not installed")
ct = importlib.import_module("cupyconv.torch")
F = torch.nn.functional
func = torch.func
forward_ad = torch.autograd.forward_ad

# PyTorch's tools use deprecated functions.
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")


class Net(torch.nn.Module):
    """Network with a convolution layer, a transposed layer and a functional convolution."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.conv = torch.nn.Conv2d(2, 4, 3, padding=1)
        self.transposed = torch.nn.ConvTranspose2d(4, 3, 3, stride=2)
        self.weight = torch.nn.Parameter(torch.randn(2, 3, 3, 3))

    def forward(self, x):
        return F.conv2d(self.transposed(self.conv(x).relu()), self.weight, stride=2)


LAYERS = ("conv", "transposed", "Net")


class Direct(Net):
    """``Net`` with direct calls of cupyconv."""

    def forward(self, x):
        y = ct.conv2d(x, self.conv.weight, self.conv.bias, padding=1).relu()
        y = ct.conv_transpose2d(y, self.transposed.weight, self.transposed.bias, stride=2)
        return ct.conv2d(y, self.weight, stride=2)


@pytest.fixture
def net():
    return Net()


@pytest.fixture
def x():
    return torch.randn(5, 2, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def assert_close(ours, theirs):
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def require_left(report, reason):
    """Require that every call was left to PyTorch for this reason."""
    assert report.taken == ()
    assert report.left
    assert all(reason in why for why in report.left.values()), report.left


# -- names of layers -------------------------------------------------------------------------------


class InterruptedModule(torch.nn.Module):
    def forward(self, x):
        raise KeyboardInterrupt


class GeneratorModule(torch.nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        yield self.inner(x)


def test_failing_global_hook_leaves_no_warning(net, x):
    def fail(*_):
        raise KeyError("hook")

    hook = torch.nn.modules.module.register_module_forward_pre_hook(fail)
    with ct.patch() as report, warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            with pytest.raises(KeyError, match="hook"):
                net(x)
        finally:
            hook.remove()
        net(x)
    assert report.taken == LAYERS


def test_layer_names_after_an_interrupted_module(net, x):
    with ct.patch() as report:
        with pytest.raises(KeyboardInterrupt):
            torch.nn.Sequential(InterruptedModule())(x)
        net(x)
        F.conv2d(x, net.conv.weight)
    assert report.taken == (*LAYERS, "")


def test_layer_names_in_a_generator(net, x):
    with ct.patch() as report:
        pending = GeneratorModule(net)(x)
        F.conv2d(x, net.conv.weight)
        next(pending)
    assert report.taken == ("", *LAYERS)


def test_layer_name_of_a_layer_added_in_the_block(x):
    model = torch.nn.Sequential(torch.nn.Conv2d(2, 2, 1))
    with ct.patch() as report:
        model(x)
        model.append(torch.nn.Conv2d(2, 2, 1))
        model(x)
    assert report.calls == {("0", "conv2d", None): 2, ("1", "conv2d", None): 1}


def test_patch_registers_no_global_hooks():
    module = torch.nn.modules.module
    hooks = (module._global_forward_hooks, module._global_forward_pre_hooks)
    before = [dict(registered) for registered in hooks]
    with ct.patch():
        assert [dict(registered) for registered in hooks] == before


def test_patch_only_affects_its_thread(net, x):
    results = []
    script = torch.jit.script(torch.nn.Conv2d(2, 3, 3))
    with ct.patch() as report:
        worker = threading.Thread(target=lambda: results.append((net(x), script(x))))
        worker.start()
        worker.join()
    assert len(results) == 1
    assert report.calls == {}


def test_patch_restores_script_modules(x):
    script = torch.jit.script(torch.nn.Conv2d(2, 3, 3))
    with ct.patch() as outer:
        with ct.patch() as inner:
            script(x)
        script(x)
    script(x)
    for report in (inner, outer):
        assert sum(report.calls.values()) == 1
    assert "__call__" not in vars(torch.jit.ScriptModule)


# -- replaced functions ----------------------------------------------------------------------------


def test_patch_replaces_aten_operators(x):
    w, v = torch.randn(4, 2, 3, 3), torch.randn(2, 3, 3, 3)
    aten = torch.ops.aten
    calls = (
        lambda: aten.conv2d(x, w),
        lambda: aten.conv2d.default(x, w, None, [2, 2], [1, 1]),
        lambda: aten.conv2d.padding(x, w, None, [1, 1], "same"),
        lambda: aten.conv_transpose2d.input(x, v, None, [2, 2]),
        lambda: aten.convolution.default(x, w, None, [1] * 2, [0] * 2, [1] * 2, False, [0] * 2, 1),
    )
    expected = [call() for call in calls]
    with ct.patch() as report:
        results = [call() for call in calls]
    assert_close(results, expected)
    assert report.left == {}
    assert sum(report.calls.values()) == len(calls)


def test_call_with_out_is_left_to_pytorch(x):
    w, y = torch.randn(4, 2, 3, 3), torch.empty(5, 4, 6, 6)
    with ct.patch() as report:
        torch.ops.aten.convolution(x, w, None, [1] * 2, [0] * 2, [1] * 2, False, [0] * 2, 1, out=y)
    assert_close(y, F.conv2d(x, w))
    require_left(report, "out")


class Plain(torch.Tensor):
    pass


class Recording(torch.Tensor):
    functions: list = []  # noqa: RUF012

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        cls.functions.append(func)
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Plain, Recording])
@pytest.mark.parametrize("place", [0, 1])
def test_tensor_subclass_is_kept(kind, place, x):
    operands = [x, torch.randn(4, 2, 3, 3)]
    operands[place] = operands[place].as_subclass(kind)
    with ct.patch() as report:
        patched = F.conv2d(*operands)
    for result in (patched, ct.conv2d(*operands)):
        assert type(result) is type(F.conv2d(*operands)) is kind
        assert_close(result, F.conv2d(*operands))
    assert report.calls == {("", "conv2d", None): 1}


def test_tensor_subclass_sees_the_called_function(x):
    w = torch.randn(4, 2, 3, 3).as_subclass(Recording)
    for conv in (F.conv2d, ct.conv2d):
        Recording.functions.clear()
        with ct.patch():
            conv(x, w)
        assert Recording.functions == [conv]


def test_tensor_with_custom_operators_is_left_to_pytorch(x):
    two = pytest.importorskip("torch.testing._internal.two_tensor").TwoTensor
    w = torch.randn(4, 2, 3, 3)
    with ct.patch() as report:
        y = F.conv2d(two(x, 2 * x), two(w, w))
    assert_close(y.b, F.conv2d(2 * x, w))
    require_left(report, "TwoTensor")


# -- gradients of samples and function transforms --------------------------------------------------


@pytest.mark.parametrize(
    "layer",
    [
        lambda: torch.nn.Conv1d(4, 6, 3, stride=2, padding=1),
        lambda: torch.nn.Conv2d(4, 6, (3, 2), dilation=2, groups=2),
        lambda: torch.nn.Conv2d(4, 6, 3, padding="same"),
        lambda: torch.nn.Conv3d(4, 2, 2, bias=False),
    ],
)
def test_per_sample_gradients_match_pytorch(layer):
    module = pytest.importorskip("torch.nn.utils._per_sample_grad")
    torch.manual_seed(0)
    model = torch.nn.Sequential(layer(), torch.nn.Tanh()).double()
    shape = (3, 4, 9, 8, 7)[: model[0].weight.dim()]
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)

    def gradients():
        for parameter in model.parameters():
            parameter.grad_sample = None
        x.grad = None
        module.call_for_per_sample_grads(model)(x).square().sum().backward()
        return [x.grad, *(parameter.grad_sample for parameter in model.parameters())]

    expected = gradients()
    with ct.patch() as report:
        assert_close(gradients(), expected)
    assert report.left == {}
    assert "0" in report.taken


# PyTorch's linearize warns about its own graph.
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node:UserWarning")
def test_transforms_of_a_model_match_pytorch(net, x):
    net, x = net.double(), x.double()
    parameters = {name: p.detach() for name, p in net.named_parameters()}

    def call(p, x):
        return func.functional_call(net, p, (x,))

    def loss(p, x):
        return call(p, x[None]).pow(3).sum()

    for transformed in (
        lambda: func.vmap(func.grad(loss), (None, 0))(parameters, x),
        lambda: func.vmap(func.grad(loss), (None, 0), chunk_size=2)(parameters, x),
        lambda: func.jacrev(call)(parameters, x[:1, :, :4, :4]),
        lambda: func.jacfwd(call, argnums=1)(parameters, x[:1, :, :4, :4]),
        lambda: func.hessian(loss, argnums=1)(parameters, x[0, :, :4, :4]),
        lambda: func.linearize(lambda x: call(parameters, x), x)[1](x),
        lambda: func.functionalize(call)(parameters, x),
    ):
        expected = transformed()
        with ct.patch() as report:
            result = transformed()
        torch.testing.assert_close(result, expected, rtol=1e-9, atol=1e-9)
        assert report.calls
        assert all("functionalize" in why for why in report.left.values())
    with pytest.raises(ConvTypeError, match=r"functionalize does not support"):
        func.functionalize(ct.conv2d)(x, net.conv.weight)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # from PyTorch's compiler
@pytest.mark.parametrize("route", ["direct", "patch"])
def test_compiled_transforms_match_pytorch(route, x):
    """Graphs call PyTorch's convolutions inside a patch, and break before cupyconv's."""
    w = torch.randn(3, 2, 3, 3)

    def transforms(conv):
        def dual():
            with forward_ad.dual_level():
                return forward_ad.unpack_dual(conv(x, forward_ad.make_dual(w, w))).tangent

        return (
            lambda: func.grad(lambda w: conv(x, w).square().sum())(w),
            lambda: func.vmap(func.grad(lambda w, x: conv(x[None], w).sum()), (None, 0))(w, x),
            lambda: func.jvp(lambda w: conv(x, w), (w,), (w,)),
            dual,
        )

    for ours, theirs in zip(
        transforms(ct.conv2d if route == "direct" else F.conv2d), transforms(F.conv2d), strict=True
    ):
        expected = theirs()
        torch.compiler.reset()
        if route == "direct":
            result = torch.compile(ours, backend="aot_eager")()
        else:
            with ct.patch() as report:
                result = torch.compile(ours, backend="aot_eager", fullgraph=True)()
            require_left(report, "transforms of cupyconv cannot be compiled")
        torch.testing.assert_close(result, expected, rtol=1e-4, atol=1e-3)


class TransformModule(torch.nn.Module):
    def __init__(self, conv):
        super().__init__()
        self.conv = conv

    def forward(self, x, w):
        y = func.vmap(lambda x: self.conv(x[None], w))(x)
        return y, func.jvp(lambda w: self.conv(x, w), (w,), (w,))[1]


@pytest.mark.parametrize("strict", [False, True])
def test_exported_transforms_match_pytorch(strict, x):
    w = torch.randn(3, 2, 3, 3)
    with ct.patch() as report:
        program = torch.export.export(TransformModule(F.conv2d), (x, w), strict=strict)
    require_left(report, "transforms of cupyconv cannot be compiled or exported")
    assert_close(program.module()(x, w), TransformModule(F.conv2d)(x, w))
    if not strict:
        with pytest.raises(ConvTypeError, match=r"torch\.export does not support transforms"):
            torch.export.export(TransformModule(ct.conv2d), (x, w), strict=False)


# -- tracers and exporters -------------------------------------------------------------------------


def test_symbolic_trace_keeps_pytorchs_functions(net, x):
    with ct.patch() as report:
        graph = torch.fx.symbolic_trace(net)
    assert F.conv2d in [node.target for node in graph.graph.nodes]
    require_left(report, "Proxy.__torch_function__ calls no convolution")
    with ct.patch() as report:
        y = graph(x)
    assert_close(y, net(x))
    assert report.left == {}


def test_symbolic_trace_records_direct_calls(net, x):
    graph = torch.fx.symbolic_trace(Direct())
    assert {ct.conv2d, ct.conv_transpose2d} <= {node.target for node in graph.graph.nodes}
    assert_close(graph(x), net(x))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("strict", [False, True])
def test_export_contains_cupyconv_operators(strict, dynamic, net, x):
    sizes = {0: torch.export.Dim("batch"), 2: torch.export.Dim("height", min=4, max=99)}
    shapes = {"x": sizes} if dynamic else None
    other = torch.randn(3, 2, 11, 8) if dynamic else x
    with ct.patch() as report:
        programs = [torch.export.export(net, (x,), strict=strict, dynamic_shapes=shapes)]
    assert report.left == {}
    programs.append(torch.export.export(Direct(), (x,), strict=strict, dynamic_shapes=shapes))
    programs.append(programs[0].run_decompositions())
    for program in programs:
        targets = [str(node.target) for node in program.graph.nodes]
        assert sum("cupyconv" in target for target in targets) == 3
        assert_close(program.module()(other), net(other))


def test_exported_program_runs_on_cupyconv(net, x):
    module = torch.export.export(net, (x,)).module()
    with ct.patch() as report:
        assert_close(module(x), net(x))
    assert report.left == {}
    assert sum(report.calls.values()) == 6


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
def test_make_fx_traces_match_pytorch(mode, x):
    from torch.fx.experimental.proxy_tensor import make_fx

    w, v = torch.randn(4, 2, 3, 3), torch.randn(4, 3, 3, 3)

    def calls(module):
        def call(x, w, v):
            y = module.conv2d(x, w, padding=1).tanh()
            return module.conv_transpose2d(y, v, stride=2, output_padding=1)

        return (
            call,
            func.grad(lambda *args: call(*args).square().mean()),
            lambda x, w, v: func.vmap(lambda x: call(x[None], w, v))(x),
            lambda x, w, v: func.jvp(lambda x: call(x, w, v), (x,), (x,))[1],
        )

    for ours, theirs in zip(calls(ct), calls(F), strict=True):
        expected = theirs(x, w, v)
        assert_close(make_fx(ours, tracing_mode=mode)(x, w, v)(x, w, v), expected)
        with ct.patch() as report:
            traced = make_fx(theirs, tracing_mode=mode)(x, w, v)
        assert report.left == {}
        assert_close(traced(x, w, v), expected)


@pytest.mark.parametrize("backend", ["eager", "aot_eager", "aot_eager_decomp_partition"])
def test_compile_is_silent_inside_a_patch(backend, net, x):
    x.requires_grad_()
    (expected,) = torch.autograd.grad(net(x).square().sum(), x)
    with ct.patch() as report, warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*global hooks")
        y = torch.compile(net, backend=backend, fullgraph=True)(x)
        (dx,) = torch.autograd.grad(y.square().sum(), x)
    assert_close(dx, expected)
    assert report.left == {}


@pytest.mark.parametrize("dynamo", [False, True])
def test_onnx_export_is_left_to_pytorch(dynamo, net, x):
    onnx = pytest.importorskip("onnx")
    if dynamo:
        pytest.importorskip("onnxscript")
    with ct.patch() as report:
        if dynamo:
            model = torch.onnx.export(net.eval(), (x,), dynamo=True, verbose=False).model_proto
        else:
            file = io.BytesIO()
            torch.onnx.export(net.eval(), (x,), file, dynamo=False)
            model = onnx.load_from_string(file.getvalue())
        require_left(report, "torch.onnx.export")
        net(x)
    operators = [node.op_type for node in model.graph.node]
    assert operators.count("Conv") == 2
    assert operators.count("ConvTranspose") == 1
    assert report.taken == LAYERS


# -- FLOP counts -----------------------------------------------------------------------------------

FLOP_LAYERS = [
    ({}, False),
    ({"stride": 2, "padding": 1}, False),
    ({"dilation": 2, "padding": "same"}, False),
    ({}, True),
    ({"stride": 3, "padding": 1, "output_padding": 2}, True),
    ({"dilation": 2}, True),
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64])
@pytest.mark.parametrize(("rules", "transposed"), FLOP_LAYERS)
@pytest.mark.parametrize("rank", [1, 2, 3])
def test_flop_counts_match_pytorch(rank, rules, transposed, dtype):
    counter = pytest.importorskip("torch.utils.flop_counter").FlopCounterMode
    name = f"conv_transpose{rank}d" if transposed else f"conv{rank}d"
    for groups, gradient in itertools.product((1, 2, 4), (False, True)):
        channels = (4, 8 // groups) if transposed else (8, 4 // groups)
        shapes = (2, 4, *(9, 8, 7)[:rank]), (*channels, *(3, 2, 3)[:rank]), (8,)
        operands = [torch.randn(shape, dtype=dtype, requires_grad=True) for shape in shapes]
        counts = []
        for module in (ct, F):
            with counter(display=False) as mode:
                y = getattr(module, name)(*operands, groups=groups, **rules)
                if gradient:
                    torch.autograd.grad(y.abs().sum(), operands)
            counts.append(mode.get_total_flops())
        assert counts[0] == counts[1] > 0


@pytest.mark.thorough
def test_flop_counter_may_be_missing():
    script = (
        "import sys, torch\n"
        "sys.modules['torch.utils.flop_counter'] = None\n"
        "import cupyconv.torch as ct\n"
        "print(tuple(ct.conv1d(torch.ones(1, 1, 3), torch.ones(1, 1, 2)).shape))\n"
    )
    process = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert process.stdout.strip() == "(1, 1, 2)", process.stderr
