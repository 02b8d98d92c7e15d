"""Small cases of the kernels, each at an edge where a fault in one line of a kernel shows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from unittest import mock

import numpy as np

import cupyconv
from cupyconv import ConvProblem, Plan
from cupyconv.kernels import parameters
from cupyconv.kernels.family import Tile
from cupyconv.planning import Request
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import REAL_ITEMSIZE, REAL_PART
from tests import agreement, emulator, views
from tests.activations import ACTIVATIONS
from tests.agreement import fits, plan_with, plan_with_tiling, plan_without_copies
from tests.configurations import CASES, FAMILY_CASES, in_formats, integer_data, random_data
from tests.families import FAMILY_LAYERS

from . import (
    SCHEDULES,
    Settings,
    conv_forward,
    conv_transpose,
    device,
    settings,
)

# Of edge cases with the same name, the first family's case is used.
_EDGE_CASES = chain.from_iterable(one.edge_cases for one in reversed(FAMILY_LAYERS.values()))
_PROBLEMS = {case.name: case.problem for case in (*CASES, *FAMILY_CASES, *_EDGE_CASES)}
_PROBLEMS |= {
    "deeper_filter_dilated": ConvProblem(
        (1, 16, 9, 6, 4),
        (16, 16, 4, 2, 1),
        dilation=(2, 1, 1),
        padding=((3, 2), (1, 0), (0, 0)),
    ),
    "single_rows_of_the_filter": ConvProblem((1, 3, 12, 14), (8, 3, 4, 3)),
    "taps_staged_one_by_one": ConvProblem((1, 12, 3, 9), (8, 12, 1, 5), padding=((0, 0), (2, 2))),
    "more_lines_than_threads": ConvProblem(
        (20, 8, 1, 4), (8, 1, 17, 1), groups=8, padding=((8, 8), (0, 0))
    ),
}

_SPLIT = (
    (16, "pieces_of_8", "NCHW", "OIHW"),  # partial sums reduced in one iteration, or in two
    (17, "odd_channels", "NCHW", "OIHW"),
    (3, "odd_channels", "NHWC", "HWIO"),
)
# float32 products outside the tensor cores.
_PLAIN = (
    ("pieces_of_8", "NHWC", "OHWI"),
    ("several_tiles", "NCHW", "OIHW"),
    ("volume_phases", "NDHWC", "DHWIO"),
    ("pixels_follow", "NCHW", "OIHW"),
    ("more_taps_than_lanes", "NCW", "OIW"),
    ("groups_of_3_to_2", "NHWC", "HWIO"),
    ("phases_without_taps", "NCHW", "OIHW"),
)
_ARRANGED = (
    ("stride_beyond_input", "NCHW", "OIHW", "float16"),
    ("one_tile", "NCHW", "OIHW", "float16"),
    ("a_matrix_product", "NCHW", "OIHW", "bfloat16"),
    ("a_volume_with_phases", "NCDHW", "OIDHW", "float16"),
    ("ragged_channels", "NCHW", "OIHW", "float16"),
)


def _layer(name: str, data_format: str, filter_format: str, dtype: str) -> ConvProblem:
    """Return the layer with this name in these formats and dtype."""
    return in_formats(_PROBLEMS[name], data_format, filter_format).replace(dtype=dtype)


_DTYPE = {2: "float16", 4: "float32", 8: "float64", 16: "complex128"}
"""Dtype of the tiles for this number of bytes per element."""


def _layers(impl: str, layers: Sequence[tuple[str, str, str, str]]):
    for number, (name, *formats, dtype) in enumerate(layers):
        problem = _layer(name, *formats, dtype)
        precision = FAMILY_LAYERS[impl].precision
        schedule, arch = SCHEDULES[number % 3], FAMILY_LAYERS[impl].arch
        run = partial(_exact, problem, impl, schedule=schedule, arch=arch, precision=precision)
        if impl == "cuda-direct":  # small layers get small tiles
            run = partial(run, tiling=5 * (number % 3))
        if impl in ("cuda-toeplitz", "cuda-patch") and number % 2:
            run = partial(run, tiling=number // 2)
        if impl == "cuda-columns":  # every other layer has splits
            run = partial(run, tile=number, splits=1 + 2 * (number % 2))
        if "hopper" in impl:  # rotate tiles, clusters and splits
            run = partial(run, tile=2 * number, splits=1 + 2 * (number % 2))
        for pass_ in fits(problem, impl, arch, precision):
            yield f"{pass_} {name} {problem.data_format} {dtype}", partial(run, pass_=pass_)


def with_addend():
    """Yield the cases with an addend of all families."""
    for impl, layers in FAMILY_LAYERS.items():
        for number, (name, *formats, dtype) in enumerate(layers.with_addend):
            problem = _layer(name, *formats, dtype)
            precision = FAMILY_LAYERS[impl].precision
            run = partial(_exact_with_addend, problem, impl, precision, number)
            for pass_ in fits(problem, impl, FAMILY_LAYERS[impl].arch, precision):
                if pass_ != "backprop_filter":
                    yield f"{impl} {pass_} {name} {dtype} with addend", partial(run, pass_)


def every_dtype(impl: str):
    """Yield the name and check of each dtype that a family supports, without the pass."""
    for dtype in (*REAL_ITEMSIZE, *REAL_PART):
        problem = _layer(FAMILY_LAYERS[impl].small, "NHWC", "OHWI", dtype)
        precision = FAMILY_LAYERS[impl].precision
        passes = fits(problem, impl, FAMILY_LAYERS[impl].arch, precision)
        run = partial(_exact, problem, impl, arch=FAMILY_LAYERS[impl].arch, precision=precision)
        if passes:
            yield dtype, passes, run


def every_tile(impl: str):
    """Yield the name, passes and check of each tile of a family, without the pass."""
    for tile in FAMILIES[impl].tiles:
        formats = ("NCHW", "OIHW") if tile.defines.get("PLANAR") else ("NHWC", "OHWI")
        dtype = _DTYPE[tile.itemsize or 4]
        problem = _layer(FAMILY_LAYERS[impl].small, *formats, dtype)
        is_plain = tile.defines.get("TENSOR_CORES") == 0
        arch = "sm_86" if is_plain and dtype == "float64" else FAMILY_LAYERS[impl].arch
        precision = FAMILY_LAYERS[impl].precision if not is_plain else "ieee"
        precision = "tf32" if precision == "ieee" and not is_plain else precision
        run = partial(_exact, problem, impl, arch=arch, precision=precision, tile=tile)
        macros = [f"{macro}={value}" for macro, value in tile.macros]
        passes = []
        for pass_ in fits(problem, impl, arch, precision):
            request = Request(problem, pass_, device(arch), precision)
            if tile in FAMILIES[impl].fitting_tiles(request):
                passes.append(pass_)
        yield " ".join([str(tile), dtype, *macros]), passes, run


def _views(impl: str):
    for number, (name, *formats, dtype, kind) in enumerate(FAMILY_LAYERS[impl].on_views):
        problem = _layer(name, *formats, dtype)
        for pass_ in fits(problem, impl, FAMILY_LAYERS[impl].arch, FAMILY_LAYERS[impl].precision):
            run = partial(_exact_on_views, problem, impl, pass_, kind, SCHEDULES[number % 3])
            if impl == "cuda-direct":  # the largest tile, then one with several channels
                run = partial(run, tiling=7 * number)
            yield f"{pass_} {name} {kind}", run


def cases_of(impl: str):
    """Yield the name and check of each case of a family; every_tile has those of tiles."""
    yield from _layers(impl, FAMILY_LAYERS[impl].emulated)
    yield from _views(impl)
    for number, (dtype, passes, run) in enumerate(every_dtype(impl)):
        pass_ = passes[number % len(passes)]
        yield f"{pass_} {dtype}", partial(run, pass_=pass_, schedule=SCHEDULES[number % 3])
    if impl == "cuda-hopper":
        for name, run in _layers(impl, _ARRANGED):
            yield f"{name} arranged", run
    if impl == "cuda-gather":
        yield from _gather_cases()
    if impl == "cuda-direct":
        problem = _layer("sixteen_sources", "NDHWC", "DHWIO", "float32")
        yield "not a number", partial(_not_a_number, impl, problem)
        problem = _PROBLEMS["ragged_tiles"]
        run = partial(_exact, problem, impl, pass_="forward", schedule=SCHEDULES[0])
        yield "64 bits", partial(_in_64_bits, partial(run, tiling=0))
        problem = _layer("single_rows_of_the_filter", "NHWC", "OHWI", "float32")
        run = partial(_exact, problem, impl, pass_="backprop_filter", schedule=SCHEDULES[1])
        yield "single_rows_of_the_filter", run
        problem = _layer("taps_staged_one_by_one", "NHWC", "OHWI", "float32")
        run = partial(_exact, problem, impl, pass_="forward", schedule=SCHEDULES[2])
        yield "taps_staged_one_by_one", partial(run, tiling=5)
    if impl != "cuda-patch":
        yield "transposed", partial(_transposed, impl)
    if impl == "cuda-generic":
        for dtype in ("float16", "bfloat16"):
            yield f"rounding {dtype}", partial(_rounding, impl, dtype)


def _gather_cases():
    impl = "cuda-gather"
    for splits, name, *formats in _SPLIT:
        problem = _layer(name, *formats, "float16")
        for pass_ in fits(problem, impl, "sm_80"):
            run = partial(_exact, problem, impl, pass_=pass_, schedule=SCHEDULES[2])
            yield f"{pass_} split {name} {formats[0]}", partial(run, tile=2, splits=splits)
    for number, name in enumerate(("pieces_of_8_everything_differs", "pipeline_wraps")):
        problem = _layer(name, "NHWC", "OHWI", "float16")
        for pass_ in fits(problem, impl, "sm_80"):  # tiles whose threads keep positions
            run = partial(_exact, problem, impl, pass_=pass_, schedule=SCHEDULES[1 + number])
            yield f"{pass_} large {name}", partial(run, tile=number)
    for number, (name, *formats) in enumerate(_PLAIN):
        problem = _layer(name, *formats, "float32")
        for pass_ in fits(problem, impl, "sm_80"):
            run = partial(_exact, problem, impl, pass_=pass_, schedule=SCHEDULES[number % 3])
            run = partial(run, tile=number, splits=1 + 2 * (number % 2))
            yield f"{pass_} plain {name} {formats[0]}", run
    problem = _PROBLEMS["pieces_of_8"].replace(dtype="float16")
    yield (
        "7.5",
        partial(_exact, problem, impl, pass_="forward", schedule=SCHEDULES[0], arch="sm_75"),
    )


def _exact(
    problem: ConvProblem,
    impl: str,
    *,
    pass_: str,
    schedule: Settings,
    arch: str = "sm_80",
    precision: str = "ieee",
    tiling: int | None = None,
    **choices: int | Tile,
) -> None:
    """Check a pass, with a tiling by number, or with choices of ``plan_with``."""
    chip = device(arch)
    if tiling is not None:
        how = {"passes": (pass_,), "precision": precision}
        plan = plan_with_tiling(problem, impl, tiling, chip, **how)
    elif choices:
        how = {"passes": (pass_,), "precision": precision, **choices}
        plan = plan_with(problem, impl, chip, **how)
    else:
        plan = plan_without_copies(problem, impl, chip, passes=(pass_,), precision=precision)
    with settings(schedule):
        require_planned(problem, plan, pass_, arch, precision)


def require_planned(
    problem: ConvProblem, plan: Plan, pass_: str, arch: str, precision: str
) -> None:
    """Require exact results of a planned pass."""
    how = {"impl": plan, "arch": arch, "precision": precision}
    agreement.require_exact(emulator, problem, passes=(pass_,), **how)


def _exact_with_addend(
    problem: ConvProblem, impl: str, precision: str, number: int, pass_: str
) -> None:
    """Check act(sum + bias + addend).

    Every other case has splits, or the largest tiling of a family with tilings.  In every third
    case the addend is the result's own array.
    """
    chip, arch = device(FAMILY_LAYERS[impl].arch), FAMILY_LAYERS[impl].arch
    how = {"passes": (pass_,), "precision": precision}
    if impl in agreement.TILED and number % 2:
        plan = plan_with_tiling(problem, impl, 0, chip, **how)
    else:
        plan = plan_with(problem, impl, chip, splits=1 + number % 2 * 2, **how)
    data, is_forward = integer_data(problem), pass_ == "forward"
    x, shape = (data.x, problem.output_shape) if is_forward else (data.dy, problem.input_shape)
    function = "conv_forward" if is_forward else "conv_transpose"
    channels = shape[problem.data_axes[1]]
    bias = (np.arange(channels) % 7 - 3).astype(data.x.dtype)
    add = (np.arange(np.prod(shape)) % 13 - 6).reshape(shape).astype(data.x.dtype)
    options = {"activation": "relu", **problem.keywords}
    if not is_forward:
        options["output_shape"] = shape
    expected = getattr(cupyconv, function)(
        *(array.astype(np.float64) for array in (x, data.w, bias)),
        impl="reference",
        **{**options, "activation": None},
    )
    expected = np.maximum(expected + add.astype(np.float64), 0).astype(data.x.dtype)
    out = add.copy() if number % 3 == 2 else None
    options |= {"impl": plan, "arch": arch, "precision": precision, "out": out}
    with settings(SCHEDULES[number % 3]):
        got = getattr(emulator, function)(
            x, data.w, bias, add=add if out is None else out, **options
        )
    agreement.require_equal(got, expected, f"{impl} {pass_} of {problem} with an addend")


def _exact_on_views(
    problem: ConvProblem,
    impl: str,
    pass_: str,
    kind: str,
    schedule: Settings,
    tiling: int | None = None,
) -> None:
    """Check a pass on views, with a tiling by number if it is given."""
    kinds, chip = views.named(problem, pass_, kind), device(FAMILY_LAYERS[impl].arch)
    precision = FAMILY_LAYERS[impl].precision
    how = {"passes": (pass_,), "strides": views.strides_of(problem, pass_, kinds)}
    if tiling is None:
        plan = plan_without_copies(problem, impl, chip, precision=precision, **how)
    else:
        plan = plan_with_tiling(problem, impl, tiling, chip, **how)
    with settings(schedule):
        views.require_exact(
            emulator,
            problem,
            pass_,
            kinds,
            impl=plan,
            arch=FAMILY_LAYERS[impl].arch,
            precision=precision,
        )


def _in_64_bits(run: Callable[[], None]) -> None:
    with mock.patch.object(parameters, "index_type", return_value="long long"):
        run()


def _rounding(impl: str, dtype: str) -> None:
    """Check single products, exact in float32 and rounded once: ties, overflow, NaN."""
    problem = ConvProblem((1, 1, 600), (4, 1, 1), dtype=dtype)
    data = random_data(problem)
    data.x[0, 0, :4] = np.nan, np.inf, -np.inf, 6e4
    with np.errstate(over="ignore", invalid="ignore"):
        products = data.x.astype(np.float32) * data.w.reshape(4, 1).astype(np.float32)
        expected = products.astype(data.x.dtype)
        result = conv_forward(data.x, data.w, impl=impl, **problem.keywords)
    assert np.array_equal(result, expected.reshape(result.shape), equal_nan=True)


def _not_a_number(impl: str, problem: ConvProblem) -> None:
    """Check that NaN in the input's last slice reaches exactly the windows that contain it."""
    data = integer_data(problem)
    data.x[0, -1] = np.nan
    arguments = problem.keywords
    result = conv_forward(data.x, data.w, impl=impl, **arguments)
    expected = cupyconv.conv_forward(data.x, data.w, impl="reference", **arguments)
    assert 0 < np.isnan(expected).mean() < 1
    assert np.array_equal(result, expected, equal_nan=True)


def _with_epilogue(impl: str) -> tuple[ConvProblem, dict[str, str]]:
    """Return a layer and the options with which a family computes it."""
    problem = _PROBLEMS["depthwise_pieces"].replace(dtype="float16")
    if "hopper" in impl:
        dtype = "float32" if impl == "cuda-hopper-bf16x6" else "float16"
        problem = _layer("few_channels", "NHWC", "OHWI", dtype)
    if impl in ("cuda-patch", "cuda-columns"):
        problem = _PROBLEMS["gaps_of_odd_length"].replace(dtype="float16")
    precision = FAMILY_LAYERS[impl].precision
    return problem, {"impl": impl, "arch": FAMILY_LAYERS[impl].arch, "precision": precision}


def _transposed(impl: str) -> None:
    """Check a transposed convolution with bias and activation, and with activation only."""
    problem, options = _with_epilogue(impl)
    data = random_data(problem)
    bias = np.linspace(-3, 3, problem.C).astype(data.w.dtype)
    for activation, bias_or_none in (("relu", bias), ("silu", None)):
        arguments = {**problem.keywords, "activation": activation}
        result = conv_transpose(data.dy, data.w, bias_or_none, **options, **arguments)
        expected = cupyconv.conv_transpose(
            data.dy, data.w, bias_or_none, impl="reference", **arguments
        )
        difference = np.abs(result.astype(np.float64) - expected.astype(np.float64))
        assert difference.max() < 4e-3 * max(1, np.abs(expected).max())


def require_activations(impl: str) -> None:
    """Require every activation to match NumPy's, with and without bias, on data of both signs."""
    problem, options = _with_epilogue(impl)
    data = random_data(problem)
    for number, activation in enumerate(ACTIVATIONS):
        bias = None if number % 2 else data.bias
        arguments = {**problem.keywords, "activation": activation}
        result = conv_forward(data.x, data.w, bias, **options, **arguments)
        expected = cupyconv.conv_forward(data.x, data.w, bias, impl="reference", **arguments)
        difference = np.abs(result.astype(np.float64) - expected.astype(np.float64))
        assert difference.max() < 4e-3
