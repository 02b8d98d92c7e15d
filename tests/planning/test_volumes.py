"""Plans of video and volume networks: families, workspace, time of backprop_input, and indices."""

from __future__ import annotations

from itertools import product
from statistics import geometric_mean

import pytest

from cupyconv.bench import data, suites
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request, plan
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES, ConvProblem
from tests.launches import prepare

NARROW = ("wan-stem", "wan-head")
"""Layers between frames of three channels, which cuda-columns computes in one pass."""

VIDEO = {
    layer.name: layer.problem
    for layer in suites.listed()
    if layer.suite in ("wan", "hunyuan", "unet3d", "conv3d")
}
WORKSPACE = {"channels_last": (0.9, 0.4), "channels_first": (1.1, 1.1)}
"""Largest workspace relative to x, w and y, of layers below and above 80 MB.  The page
notebooks/how-to/video.md states these limits."""


def video(layout: str, dtype: str = "bfloat16") -> dict[str, ConvProblem]:
    return {name: data.in_layout(problem, layout, dtype) for name, problem in VIDEO.items()}


@pytest.mark.parametrize("layout", WORKSPACE)
@pytest.mark.parametrize(("dtype", "precision"), [("bfloat16", "ieee"), ("float32", "tf32")])
@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "sm_90a", "sm_120a"])
def test_video_layers_have_fast_passes_with_little_workspace(arch, dtype, precision, layout):
    ratios = {}
    for name, problem in video(layout, dtype).items():
        planned = plan(problem, arch, precision=precision)
        assert ("divided" in planned.passes[1].reason) == planned.passes[1].divides_frames
        most = WORKSPACE[layout][problem.bytes > 80e6] * problem.bytes
        assert all(one.implementation != "cuda-generic" for one in planned)
        ratios[name] = planned["backprop_input"].microseconds / planned["forward"].microseconds
        for one in planned:
            if one.implementation != "cuda-columns":
                assert one.workspace_bytes <= most, (name, one)
            else:
                assert name in NARROW
    wide = {name: ratio for name, ratio in ratios.items() if name not in NARROW}
    assert geometric_mean(wide.values()) < 1.35
    assert max(wide.values()) < 1.75, wide


@pytest.mark.parametrize("layout", WORKSPACE)
@pytest.mark.parametrize(("impl", "arch"), [("cuda-hopper", "sm_90a"), ("cuda-gather", "sm_80")])
def test_causal_padding_changes_no_family(impl, arch, layout):
    for (name, problem), pass_ in product(video(layout).items(), PASSES):
        padding = [(before + after, 0) for before, after in problem.padding]
        for one in (problem, problem.replace(padding=padding)):
            assert FAMILIES[impl].refuses(Request(one, pass_, Device.of(arch))) is None, name


@pytest.mark.parametrize("layout", WORKSPACE)
@pytest.mark.parametrize("arch", ["sm_80", "sm_90a"])
def test_frames_beyond_32_bits_have_64_bit_indices(arch, layout):
    problem, device = video(layout)["hunyuan-720p"], Device.of(arch)
    assert problem.needs_64bit_indexing
    for one in plan(problem, device):
        launches = prepare(one, problem, Strides.contiguous(problem), device)
        found = {dict(launch.defines).get("INDEX") for launch in launches}
        assert found <= {None, "long long"}  # cuda-hopper and copies have no other offsets
        assert ("long long" in found) == (one.implementation != "cuda-hopper")
