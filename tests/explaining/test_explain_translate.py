"""Generated programs for other frameworks, compared with cupyconv if a framework is installed."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import warnings
from dataclasses import replace

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem
from cupyconv.explaining.translate import Translation, translation, translations
from tests.configurations import CASES, integer_data, random_problems, three_passes

os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
os.environ.setdefault("TF_ENABLE_ONEDNN_OPTS", "1")

MODULES = {"tensorflow": "tensorflow", "pytorch": "torch", "jax": "jax", "onnx": "onnx"}

NAMES = {
    *("same_stride_2_of_5", "valid_stride_2_of_6", "five_channels_ten_filters", "channels_last"),
    *("same_stride_2_even_input", "same_lower_stride_2", "same_even_filter", "same_dilated"),
    *("trailing_inputs_unread", "padding_on_one_side", "groups", "groups_of_odd_sizes"),
    *("depthwise_multiplier", "stride_divides_dilation", "dilations_differ", "paddings_differ"),
    *(
        "one_pixel_filter_stride_2",
        "same_needs_no_padding",
        "signal_channels_last",
        "volume",
        "volume_everything_differs",
    ),
    *("volume_same", "volume_depthwise"),
}
PROBLEMS = {case.name: case.problem for case in CASES if case.name in NAMES}
PROBLEMS |= {
    dtype: PROBLEMS["five_channels_ten_filters"].replace(dtype=dtype)
    for dtype in ("float64", "float16", "bfloat16")
}
PROBLEMS["one_tap"] = PROBLEMS["one_pixel_filter_stride_2"].replace(input_shape=(1, 4, 8, 8))
PROBLEMS["padded_volume"] = PROBLEMS["volume"].replace(stride=(2, 1, 2), padding=(1, 0, 1))


def execute(text: str, **given: object) -> dict:
    """Run a program and return its variables."""
    names = dict(given)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # frameworks warn when first imported
        exec(text, names)
    return names


def run(problem: ConvProblem, told: Translation, data: dict) -> dict:
    """Run a translated program on x, w and dy, and return its variables."""
    plain = np.float32 if problem.dtype == "bfloat16" else data["x"].dtype
    given = {name: array.astype(plain) for name, array in data.items()}
    if told.framework != "JAX":
        return execute(f"{told.imports}\n{told.code}", **given)
    import jax

    before = jax.config.jax_enable_x64
    try:
        return execute(f"{told.imports}\n{told.code}", **given)
    finally:
        jax.config.update("jax_enable_x64", before)


def held_to_ours(problem: ConvProblem, framework: str) -> None:
    told = translation(problem, framework)
    data = integer_data(problem)
    names = run(problem, told, {name: getattr(data, name) for name in ("x", "w", "dy")})
    ours = three_passes(problem, replace(integer_data(problem), bias=None))
    ours["dx_direct"] = ours["dx"]
    for name, array in ours.items():
        if name in names:
            theirs = np.asarray(names[name])
            assert theirs.shape == array.shape
            np.testing.assert_array_equal(theirs.astype(float), array.astype(float), err_msg=name)
    assert "dx_direct" in names or framework != "pytorch"


def require(framework: str) -> None:
    if importlib.util.find_spec(MODULES[framework]) is None:
        pytest.skip(f"{MODULES[framework]} is not installed")


@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_programs_match_cupyconv(framework, name):
    require(framework)
    held_to_ours(PROBLEMS[name], framework)


@pytest.mark.parametrize("framework", MODULES)
@pytest.mark.parametrize("name", PROBLEMS)
def test_programs_of_transposed_layers_match_cupyconv(framework, name):
    """y, dx and dw are those of the transposed layer that reverses the problem."""
    require(framework)
    problem = PROBLEMS[name]
    data = integer_data(problem)
    ours = three_passes(problem, replace(data, bias=None))
    told = translation(problem, framework, is_transposed=True)
    assert "ranspose" in told.call
    names = run(problem, told, {"x": data.dy, "w": data.w, "dy": data.x})
    for theirs, array in {"y": ours["dx"], "dx": ours["y"], "dw": ours["dw"]}.items():
        assert names[theirs].shape == array.shape
        np.testing.assert_array_equal(names[theirs].astype(float), array.astype(float), theirs)


def test_transposed_line_of_tensorflow_pads_in_numbers():
    problem = ConvProblem((1, 1, 7, 7), (1, 1, 3, 3), stride=2, padding=1)
    line = translation(problem, "tensorflow", is_transposed=True)
    assert "padding=[[0, 0], [1, 1], [1, 1], [0, 0]]" in line.call
    assert not any("supports only" in note for note in line.flags)


@pytest.mark.parametrize("framework", MODULES)
def test_programs_of_random_layers_match_cupyconv(framework):
    require(framework)
    several = 8 if framework == "jax" else 25  # JAX compiles each program
    for problem in random_problems(several, seed=11, max_macs=500):
        if problem.N:
            held_to_ours(problem, framework)


@pytest.mark.parametrize("framework", MODULES)
def test_printed_programs_run_unchanged(framework, capsys):
    require(framework)
    problem = PROBLEMS["same_stride_2_of_5"]
    names = execute(translation(problem, framework).program)
    printed = capsys.readouterr().out.splitlines()
    for line, name in zip(printed, ("y", "dx", "dw"), strict=True):
        shape, norm = names[name].shape, np.linalg.norm(names[name])
        assert line == f"{name}: shape {shape}, norm {norm:.5g}"
    rest = problem.keywords
    dx = cupyconv.conv_backprop_input(problem.input_shape, names["w"], names["dy"], **rest)
    np.testing.assert_allclose(names["dx"], dx, rtol=1e-5, atol=1e-5)


# -- the size of dx in other frameworks ------------------------------------------------------------


@pytest.mark.parametrize("name", PROBLEMS)
def test_onnx_output_shape_is_given_only_if_equivalent(name):
    require("onnx")
    problem = PROBLEMS[name]
    found = re.search(
        r'or output_shape=(\[.*\]) with auto_pad="(\w+)"', size_of_dx("onnx", problem)
    )
    has_rest = any(
        axis.padded_input != (axis.output - 1) * axis.stride + axis.effective_filter
        for axis in problem.axes
    )
    if found is None:
        uneven = {after - before for before, after in problem.padding}
        assert has_rest or uneven >= {-1, 1} or max(map(abs, uneven)) > 1
        return
    if problem.groups > 1 or problem.dtype not in ("float32", "float64"):
        return  # onnx's evaluator does not support these
    names = execute(translation(problem, "onnx").program)
    attributes = {"output_shape": ast.literal_eval(found[1]), "auto_pad": found[2]}
    dx = names["run"]("ConvTranspose", names["DY"], names["W"], **attributes, **names["same"])
    np.testing.assert_allclose(dx, names["DX"], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "name",
    [
        "paddings_differ",
        "padded_volume",
        "padding_on_one_side",
        "valid_stride_2_of_6",
        "volume_same",
    ],
)
def test_tensorflow_accepts_the_given_output_shape(name):
    tf = pytest.importorskip("tensorflow")
    problem, told = PROBLEMS[name], size_of_dx("tensorflow", PROBLEMS[name])
    data, rank = integer_data(problem), problem.spatial_rank
    shape = ast.literal_eval(re.search(r"output_shape=(\[.*?\])", told)[1])
    padding = problem.padding_mode.upper()
    if padding == "EXPLICIT":
        assert ('padding="VALID"' in told) == (rank != 2)
        padding = "VALID" if rank != 2 else [[0, 0], *map(list, problem.padding), [0, 0]]
    back = problem.data_format.startswith("NC")
    order = (0, *range(2, rank + 2), 1)
    dy = data.dy.transpose(order) if back else data.dy
    w = data.w.transpose((*range(2, rank + 2), 1, 0)) if back else data.w
    strides = [1, *problem.stride, 1] if rank == 3 else list(problem.stride)
    dx = getattr(tf.nn, f"conv{rank}d_transpose")(dy, w, shape, strides, padding).numpy()
    if cropped := re.search(r"cropped to \[(.*)\]", told):
        dx = eval(f"dx[:, {cropped[1]}]")
    ours = cupyconv.conv_backprop_input(problem.input_shape, data.w, data.dy, **problem.keywords)
    np.testing.assert_array_equal(dx, ours.transpose(order) if back else ours)


def size_of_dx(framework: str, problem: ConvProblem) -> str:
    return translation(problem, framework).size


# -- unsupported layers ----------------------------------------------------------------------------


def flags(framework: str, name: str) -> str:
    return " ".join(translation(PROBLEMS[name], framework).flags)


@pytest.mark.parametrize(
    ("framework", "name", "said"),
    [
        ("pytorch", "same_stride_2_even_input", "pads both sides of an axis equally"),
        ("pytorch", "same_stride_2_even_input", "padding='same' only for stride 1"),
        ("pytorch", "same_stride_2_of_5", "axes are NCHW and OIHW"),
        ("tensorflow", "stride_divides_dilation", "reject stride together with dilation"),
        ("tensorflow", "same_lower_stride_2", "no SAME_LOWER"),
        ("tensorflow", "one_tap", "may crash on gradients of strided layers"),
        ("tensorflow", "paddings_differ", "supports only SAME and VALID"),
        ("tensorflow", "groups", "cannot compute gradients of grouped layers"),
        ("tensorflow", "five_channels_ten_filters", "channels-first"),
        (
            "tensorflow",
            "dilations_differ",
            "gradients of dilated layers only with oneDNN, in float32 and",
        ),
        ("jax", "float64", "jax_enable_x64"),
        ("onnx", "same_stride_2_of_5", "has no gradients of Conv"),
        ("onnx", "groups", "one Conv node per group"),
    ],
)
def test_unsupported_features_are_flagged(framework, name, said):
    assert said in flags(framework, name)


def test_supported_layers_are_not_flagged():
    assert flags("pytorch", "five_channels_ten_filters") == ""
    assert flags("tensorflow", "same_stride_2_of_5") == ""


def test_keras_rejects_what_the_flag_says():
    if importlib.util.find_spec("keras") is None:
        pytest.skip("keras is not installed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import keras
    with pytest.raises(ValueError, match="strides"):
        keras.layers.Conv2D(4, 3, strides=2, dilation_rate=2)


def test_pytorch_rejects_what_the_flag_says():
    torch = pytest.importorskip("torch")
    with pytest.raises(RuntimeError, match="stride"):
        torch.nn.functional.conv2d(
            torch.zeros(1, 1, 5, 5), torch.zeros(1, 1, 3, 3), stride=2, padding="same"
        )


def test_frameworks_are_found_by_name():
    problem = PROBLEMS["same_stride_2_of_5"]
    assert [told.framework for told in translations(problem)] == [
        "TensorFlow",
        "PyTorch",
        "JAX",
        "ONNX",
    ]
    assert translation(problem, "torch").framework == "PyTorch"
    assert translation(problem, "TF").framework == "TensorFlow"
    with pytest.raises(ConvError, match="unknown framework"):
        translation(problem, "caffe")
    told = cupyconv.explain(problem).code("pytorch").to_dict()
    assert told["program"].startswith("# PyTorch's axes")
