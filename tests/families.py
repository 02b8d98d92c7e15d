"""Layers on which the tests run each kernel family; a new family adds its entry here."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from cupyconv import ConvProblem
from cupyconv.problem import PASSES
from tests.configurations import (
    COLUMNS_CASES,
    DIRECT_CASES,
    HOPPER_CASES,
    PATCH_CASES,
    TOEPLITZ_CASES,
    Case,
)

Channels = tuple[int, int, int]
"""Number of groups, and channels and filters per group."""


@dataclass(frozen=True, kw_only=True)
class FamilyLayers:
    """Layers of one kernel family.

    Attributes:
        small: name of the layer that the emulator computes in all dtypes and with all tiles.
        emulated: (layer, data format, filter format, dtype) of each case of the emulator.
        with_addend: cases of forward and of transposed convolutions with an addend, bias and relu.
        on_views: cases on views; all tensors of a case are views of its last entry's kind.
        arch: architecture of the emulated chip.
        precision: precision of float32 cases.
        edge_cases: further edge cases of the family.
        passes, with_workspace: passes that the family computes, and those with a workspace.
        dtype, channels_last: dtype and memory order of the edge cases on emulated devices.
        ieee_dtypes: dtypes that support precision="ieee"; tests that are not slow use the first.
        ieee: layers on which test_ieee.py checks the promises of precision="ieee".
        compiled: layers whose kernels test_kernel_compile.py compiles; () if it has another test
            of the family.
        draw_channels: function with which the fuzzer draws supported channels; it returns None to
            draw as for other families.
    """

    small: str
    emulated: tuple[tuple[str, str, str, str], ...]
    with_addend: tuple[tuple[str, str, str, str], ...]
    on_views: tuple[tuple[str, str, str, str, str], ...]
    arch: str = "sm_80"
    precision: str = "ieee"
    edge_cases: tuple[Case, ...] = ()
    passes: tuple[str, ...] = PASSES
    with_workspace: tuple[str, ...] = ()
    dtype: str = "float16"
    channels_last: bool = False
    ieee_dtypes: tuple[str, ...] = ()
    ieee: tuple[ConvProblem, ...] = ()
    compiled: tuple[Case, ...] = ()
    draw_channels: Callable[[Any], Channels | None] = lambda draw: None


def _layer(name: str, input_shape: Any, filter_shape: Any, **rules: Any) -> Case:
    return Case(name, ConvProblem(input_shape, filter_shape, **rules))


NHWC: dict[str, Any] = {"data_format": "NHWC", "padding": "same"}

IN_PADDING = ConvProblem(
    (1, 9, 10, 8), (16, 3, 3, 8), padding=3, data_format="NHWC", filter_format="OHWI"
)
STRIDED = IN_PADDING.replace(
    filter_shape=(8, 3, 2, 8), stride=(3, 2), dilation=(1, 2), padding=((1, 0), (2, 1))
)
FEW_FILTERS = ConvProblem((1, 24, 5, 6), (3, 24, 3, 2), padding=1)
FEW_CHANNELS = ConvProblem((1, 3, 4, 6), (8, 3, 3, 3), stride=2, padding=1)
PATCHES = ConvProblem((2, 3, 10, 11), (8, 3, 3, 2), stride=(4, 3), padding=1)
DEPTHWISE = ConvProblem((2, 8, 9, 11), (8, 1, 3, 3), padding=3, groups=8)
STEM = ConvProblem((2, 3, 9, 10), (16, 3, 3, 3), padding=3)
GROUPED = IN_PADDING.replace(input_shape=(1, 5, 6, 16), filter_shape=(16, 3, 2, 4), groups=4)

SIZES = (1, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 16, 24, 33, 64)
"""Numbers of channels and filters that the fuzzer draws for any family."""

_PIECES = (8, 8, 16, 24, 32, 64, 72)
_RAGGED = (*_PIECES, 1, 3, 12, 17, 65)


def _gather_channels(draw: Any) -> Channels | None:
    if not draw.chance(0.5):
        return None
    return draw.one((1, 1, 2)), draw.one((2, 4, *_PIECES)), draw.one((2, 4, *_PIECES))


def _hopper_channels(draw: Any) -> Channels:
    return draw.one((1, 1, 1, 2)), draw.one(_RAGGED), draw.one(_RAGGED)


def _patch_channels(draw: Any) -> Channels:
    return 1, draw.one((1, 2, 3, 3, 4, 8)), draw.one(SIZES)


def _toeplitz_channels(draw: Any) -> Channels:
    return draw.one((1, 3, 4, 8, 9, 16)), 1, 1


FAMILY_LAYERS: dict[str, FamilyLayers] = {
    "cuda-generic": FamilyLayers(
        small="channels_beyond_one_tile",
        emulated=(
            ("volume_everything_differs", "NDHWC", "DHWIO", "float32"),
            ("channels_beyond_one_tile", "NCHW", "OIHW", "float32"),
            ("stride_and_dilation_coprime", "NWC", "OWI", "float32"),
            ("padding_beyond_the_filter_on_one_side", "NCHW", "HWIO", "float32"),
            ("depthwise_multiplier", "NHWC", "HWIO", "float16"),
            ("groups_of_whole_tiles_and_a_pixel", "NCW", "OIW", "float32"),
            ("deeper_than_high", "NCDHW", "OIDHW", "float32"),
        ),
        with_addend=(
            ("volume_everything_differs", "NDHWC", "DHWIO", "float32"),
            ("depthwise_multiplier", "NHWC", "HWIO", "float16"),
        ),
        on_views=(("volume_everything_differs", "NCDHW", "OIDHW", "float32", "reversed"),),
        ieee_dtypes=("float32", "float64", "float16"),
        ieee=(IN_PADDING, STRIDED),
        dtype="float64",
    ),
    "cuda-gather": FamilyLayers(
        small="pieces_of_8",
        emulated=(
            ("many_stride_phases", "NHWC", "OHWI", "float16"),  # 48 phases in two launches
            ("pieces_of_8_everything_differs", "NHWC", "HWIO", "float16"),
            ("pipeline_wraps", "NHWC", "OHWI", "float16"),
            ("odd_channels", "NCHW", "OIHW", "float16"),
            ("grouped_pieces", "NHWC", "HWIO", "bfloat16"),
            ("several_tiles", "NCHW", "OIHW", "float16"),
            ("volume_phases", "NDHWC", "ODHWI", "float16"),
            ("pieces_of_4", "NHWC", "HWIO", "float16"),
            ("pieces_of_4", "NHWC", "OHWI", "float64"),
            ("pixels_follow", "NCHW", "OIHW", "float64"),
            ("pieces_of_4", "NHWC", "OHWI", "float32"),
            ("pixels_follow", "NCHW", "OIHW", "float32"),
            ("filter_beyond_input_fits_with_padding", "NHWC", "OHWI", "float16"),
            ("phases_without_taps", "NHWC", "OHWI", "float16"),
            ("stride_and_dilation", "NHWC", "HWIO", "float16"),
            ("stride_beyond_input", "NHWC", "OHWI", "float16"),
            ("deeper_than_high", "NCDHW", "OIDHW", "float16"),
            ("whole_tiles", "NHWC", "OHWI", "float16"),
            ("a_tile_and_one", "NHWC", "OHWI", "float16"),
            ("grouped_strides_differ", "NHWC", "OHWI", "float16"),
            ("groups_of_3_to_2", "NHWC", "HWIO", "float16"),
            ("more_taps_than_lanes", "NCW", "OIW", "float16"),
            ("as_many_taps_as_bits", "NWC", "OWI", "float16"),
            ("taps_of_three_words", "NWC", "OWI", "float16"),
            ("dilation", "NHWC", "HWIO", "float16"),
            ("deeper_filter_dilated", "NDHWC", "ODHWI", "float16"),
        ),
        with_addend=(
            ("odd_channels", "NCHW", "OIHW", "float16"),
            ("volume_phases", "NDHWC", "ODHWI", "bfloat16"),
            ("pieces_of_4", "NHWC", "OHWI", "float64"),
            ("pixels_follow", "NCHW", "OIHW", "float32"),
            ("grouped_strides_differ", "NHWC", "OHWI", "float16"),
        ),
        on_views=(
            ("a_volume_with_phases", "NDHWC", "DHWIO", "float16", "reversed"),
            ("grouped_strides_differ", "NHWC", "OHWI", "float16", "reversed"),
            ("pieces_of_8", "NHWC", "OHWI", "float16", "reversed window"),
        ),
        precision="tf32",
        ieee_dtypes=("float16", "float32", "float64", "bfloat16"),
        ieee=(IN_PADDING, STRIDED, FEW_FILTERS, FEW_CHANNELS, GROUPED),
        compiled=(
            _layer("wide", (32, 28, 28, 256), (3, 3, 256, 256), **NHWC),
            _layer("narrow", (32, 56, 56, 64), (3, 3, 64, 64), stride=2, **NHWC),
            _layer("odd", (8, 28, 28, 35), (3, 3, 35, 63), **NHWC),
            _layer("first", (32, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3),
            _layer("last", (1, 128, 64, 64), (3, 128, 3, 3), padding=1),
            _layer("merged", (32, 56, 56, 256), (3, 3, 8, 256), groups=32, **NHWC),
        ),
        draw_channels=_gather_channels,
        with_workspace=PASSES,
        channels_last=True,
    ),
    "cuda-direct": FamilyLayers(
        small="depthwise",
        emulated=(
            ("columns_in_pieces", "NCHW", "OIHW", "float32"),
            ("volume_everything_differs", "NDHWC", "DHWIO", "float32"),
            ("groups_of_4", "NHWC", "HWIO", "float16"),
            ("columns_in_pieces_strided", "NCHW", "OIHW", "float16"),
            ("ragged_tiles", "NHWC", "HWIO", "float32"),
            ("several_rounds", "NHWC", "HWIO", "float16"),
            ("columns_in_pieces_dilated", "NCHW", "HWIO", "float32"),
            ("deeper_than_high", "NCDHW", "OIDHW", "float32"),
            ("first_layer", "NHWC", "OHWI", "float32"),
            ("rows_far_apart", "NHWC", "HWIO", "float32"),
            ("depthwise_stride_3", "NHWC", "HWIO", "float32"),
            ("depthwise_padding_beyond_stride", "NHWC", "HWIO", "float16"),
            ("rows_of_the_filter_in_parts", "NHWC", "OHWI", "float32"),
            ("three_results_of_five_sources", "NHWC", "HWIO", "float16"),
            ("lanes_without_channels", "NHWC", "OHWI", "float32"),
            ("eight_phases", "NCHW", "OIHW", "float32"),
            ("deeper_than_high_than_wide", "NDHWC", "DHWIO", "float32"),
            ("sixteen_sources", "NDHWC", "DHWIO", "float32"),
        ),
        with_addend=(
            ("columns_in_pieces", "NCHW", "OIHW", "float32"),
            ("groups_of_4", "NHWC", "HWIO", "float16"),
            ("ragged_tiles", "NHWC", "HWIO", "float32"),
        ),
        on_views=(
            ("volume_everything_differs", "NDHWC", "DHWIO", "float32", "reversed"),
            ("groups_of_4", "NHWC", "HWIO", "float16", "reversed"),
        ),
        edge_cases=DIRECT_CASES,
        ieee_dtypes=("float32", "float64", "bfloat16"),
        ieee=(DEPTHWISE, DEPTHWISE.replace(stride=(2, 3))),
        compiled=(
            _layer("3x3", (32, 56, 56, 128), (3, 3, 1, 128), groups=128, **NHWC),
            _layer("stride", (32, 56, 56, 128), (3, 3, 1, 128), groups=128, stride=2, **NHWC),
            _layer("7x7", (32, 56, 56, 96), (7, 7, 1, 96), groups=96, **NHWC),
            _layer("31x31", (8, 32, 32, 64), (31, 31, 1, 64), groups=64, **NHWC),
            _layer("first", (32, 96, 56, 56), (96, 1, 3, 3), groups=96, padding=1),
            _layer("multiplied", (8, 28, 28, 32), (3, 3, 1, 64), groups=32, **NHWC),
            _layer("grouped", (32, 56, 56, 128), (3, 3, 4, 128), groups=32, **NHWC),
            _layer("stem", (8, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3),
        ),
        with_workspace=PASSES[2:],
        dtype="float32",
    ),
    "cuda-toeplitz": FamilyLayers(
        small="many_images_in_a_tile",
        emulated=(
            ("many_images_in_a_tile", "NHWC", "HWIO", "float16"),
            ("two_products_a_strip", "NCHW", "OIHW", "bfloat16"),
            ("rows_of_images_rounded_up", "NCHW", "HWIO", "float16"),
            ("padding_beyond_the_filter", "NHWC", "OHWI", "float16"),
            ("many_chunks", "NCHW", "OIHW", "float16"),
            ("more_taps_than_lanes", "NCW", "OIW", "float16"),
            ("as_many_blocks_as_are_loaded", "NHWC", "OHWI", "float16"),
            ("many_blocks_of_columns", "NWC", "OWI", "float16"),
            ("more_lines_than_threads", "NCHW", "OIHW", "float16"),
        ),
        with_addend=(
            ("many_images_in_a_tile", "NHWC", "HWIO", "float16"),
            ("two_products_a_strip", "NCHW", "OIHW", "bfloat16"),
        ),
        on_views=(("many_images_in_a_tile", "NCHW", "OIHW", "float16", "reversed"),),
        edge_cases=TOEPLITZ_CASES,
        ieee_dtypes=("float16", "bfloat16"),
        ieee=(DEPTHWISE,),
        compiled=(
            _layer("7x7", (32, 56, 56, 96), (7, 7, 1, 96), groups=96, **NHWC),
            _layer("7x7 of 7", (32, 768, 7, 7), (768, 1, 7, 7), groups=768, padding=3),
            _layer("13x13", (8, 14, 14, 64), (13, 13, 1, 64), groups=64, **NHWC),
            _layer("31x31", (8, 128, 56, 56), (128, 1, 31, 31), groups=128, padding=15),
            _layer("row", (8, 64, 1000), (64, 1, 33), groups=64, padding=16),
        ),
        draw_channels=_toeplitz_channels,
        with_workspace=PASSES[2:],
    ),
    "cuda-patch": FamilyLayers(
        small="gaps_of_odd_length",
        emulated=(
            ("seven_by_seven_of_three", "NHWC", "HWIO", "float16"),
            ("windows_begin_odd_and_even", "NCHW", "OIHW", "float16"),
            ("windows_begin_odd_and_even", "NHWC", "OHWI", "bfloat16"),
            ("filters_beyond_a_block", "NHWC", "HWIO", "float16"),
            ("runs_of_whole_words", "NCHW", "OIHW", "float16"),
            ("gaps_between_windows", "NHWC", "HWIO", "float16"),
            ("gaps_of_odd_length", "NCHW", "OIHW", "float16"),
            ("gaps_in_the_window", "NHWC", "HWIO", "float32"),
            ("words_beyond_a_block", "NDHWC", "DHWIO", "float16"),
            ("a_volume", "NCDHW", "OIDHW", "float16"),
            ("a_volume", "NDHWC", "ODHWI", "float64"),
            ("blocks_take_several_tiles", "NHWC", "OHWI", "float16"),
            ("blocks_take_several_tiles", "NCHW", "HWIO", "float32"),
            ("chunks_without_tiles", "NHWC", "OHWI", "float16"),
            ("one_word_beyond_a_step", "NCHW", "OIHW", "bfloat16"),
        ),
        with_addend=(
            ("seven_by_seven_of_three", "NHWC", "HWIO", "float16"),
            ("windows_begin_odd_and_even", "NCHW", "OIHW", "float16"),
            ("blocks_take_several_tiles", "NCHW", "HWIO", "float32"),
        ),
        on_views=(
            ("a_volume", "NCDHW", "OIDHW", "float16", "reversed"),
            ("filters_beyond_a_block", "NHWC", "HWIO", "float16", "reversed"),
            ("windows_begin_odd_and_even", "NCHW", "OIHW", "float16", "with gaps"),
        ),
        precision="tf32",
        edge_cases=PATCH_CASES,
        ieee_dtypes=("float16", "float64", "bfloat16"),
        ieee=(STEM, STEM.replace(stride=(2, 3))),
        compiled=(
            _layer(
                "7x7", (32, 224, 224, 3), (7, 7, 3, 64), stride=2, padding=3, data_format="NHWC"
            ),
            _layer("two classes", (16, 3, 224, 224), (64, 3, 3, 3), padding=1),
            _layer(
                "element by element",
                (32, 227, 227, 3),
                (11, 11, 3, 96),
                stride=4,
                data_format="NHWC",
            ),
            _layer("few filters", (128, 1, 28, 28), (32, 1, 5, 5), padding=2),
            _layer("volume", (8, 3, 16, 112, 112), (64, 3, 7, 7, 7), stride=(1, 2, 2), padding=3),
            _layer("row", (8, 160000, 2), (10, 2, 512), stride=5, data_format="NWC"),
        ),
        draw_channels=_patch_channels,
        passes=(PASSES[0], PASSES[2]),
        with_workspace=PASSES[2:],
    ),
    "cuda-columns": FamilyLayers(
        small="patches_side_by_side",
        emulated=(
            ("patches_side_by_side", "NCHW", "OIHW", "float16"),
            ("stride_beyond_the_filter", "NHWC", "HWIO", "float32"),
            ("many_stride_phases", "NCHW", "OIHW", "bfloat16"),
            ("many_stride_phases", "NHWC", "OHWI", "float64"),
            ("one_output_position", "NCHW", "OIHW", "float32"),
            ("one_output_with_padding", "NHWC", "OHWI", "float16"),
            ("dilation_and_stride_share_a_factor", "NCHW", "HWIO", "float16"),
            ("dilation_beyond_the_stride", "NCHW", "OIHW", "float32"),
            ("few_filters", "NHWC", "OHWI", "float16"),
            ("few_filters", "NCHW", "OIHW", "float16"),
            ("upsampled_sound", "NCW", "OIW", "float16"),
            ("grouped_patches", "NCHW", "OIHW", "float32"),
            ("grouped_patches", "NHWC", "HWIO", "float16"),
            ("depthwise_upsampling", "NCHW", "OIHW", "float16"),
            ("deep_product", "NHWC", "OHWI", "float16"),
            ("grouped_volume_of_patches", "NCDHW", "OIDHW", "float16"),
            ("a_volume_of_patches", "NCDHW", "OIDHW", "float32"),
            ("a_volume_of_patches", "NDHWC", "DHWIO", "float16"),
        ),
        with_addend=(
            ("many_stride_phases", "NCHW", "OIHW", "bfloat16"),
            ("grouped_patches", "NHWC", "HWIO", "float16"),
        ),
        on_views=(
            ("many_stride_phases", "NCHW", "OIHW", "float16", "reversed"),
            ("a_volume_of_patches", "NDHWC", "ODHWI", "float32", "reversed"),
        ),
        edge_cases=COLUMNS_CASES,
        ieee_dtypes=("float32", "float64", "float16"),
        ieee=(IN_PADDING, PATCHES),
        passes=PASSES[:2],
        with_workspace=PASSES[:2],
    ),
    "cuda-hopper": FamilyLayers(
        small="images_of_filled_lines",
        emulated=(
            ("everything_differs", "NHWC", "OHWI", "float16"),
            ("several_tiles", "NHWC", "HWIO", "float16"),
            ("phases_of_one_two_and_four_taps", "NHWC", "HWIO", "bfloat16"),
            ("channels_beyond_a_line", "NHWC", "OHWI", "float16"),
            ("pipeline_wraps", "NHWC", "HWIO", "float16"),
            ("a_volume_with_phases", "NDHWC", "ODHWI", "float16"),
            ("a_row_stride_3", "NWC", "WIO", "float16"),
            ("a_matrix_product", "NHWC", "OHWI", "float16"),
            ("groups_and_phases", "NHWC", "OHWI", "float16"),
            ("stride_beyond_input", "NCHW", "OIHW", "float16"),
            ("groups", "NHWC", "OHWI", "float16"),
            ("one_pixel_beyond_a_line", "NHWC", "HWIO", "float16"),
            ("several_tiles_strided", "NHWC", "OHWI", "float16"),
            ("several_tiles_of_a_volume", "NDHWC", "ODHWI", "float16"),
            ("a_phase_without_taps_then_a_full_pipeline", "NWC", "OWI", "float16"),
            ("ragged_channels", "NHWC", "OHWI", "float16"),
            ("ragged_channels", "NHWC", "HWIO", "float16"),
            ("pairs_of_channels", "NCHW", "HWIO", "float16"),
            ("images_of_filled_lines", "NCHW", "OIHW", "float16"),
            ("images_of_whole_lines", "NCHW", "HWIO", "bfloat16"),
            ("volumes_of_filled_lines", "NCDHW", "OIDHW", "float16"),
            ("groups_of_planes", "NCHW", "OHWI", "float16"),
            ("rows_of_filled_lines", "NCHW", "OIHW", "float16"),
            ("rows_of_two_lines", "NCHW", "HWIO", "float16"),
            ("rows_of_phases", "NCHW", "OIHW", "bfloat16"),
            ("rows_of_whole_lines", "NCHW", "OIHW", "float16"),
            ("groups_of_rows", "NCHW", "OHWI", "float16"),
            ("a_row_of_two_lines", "NCW", "WIO", "float16"),
        ),
        with_addend=(
            ("everything_differs", "NHWC", "OHWI", "float16"),
            ("several_tiles", "NHWC", "HWIO", "float16"),
            ("a_matrix_product", "NHWC", "OHWI", "float16"),
            ("ragged_channels", "NHWC", "HWIO", "bfloat16"),
            ("rows_of_phases", "NCHW", "OIHW", "bfloat16"),
            ("images_of_filled_lines", "NCHW", "OIHW", "float16"),
            ("groups_and_phases", "NHWC", "OHWI", "float16"),
        ),
        on_views=(("a_volume_with_phases", "NDHWC", "ODHWI", "float16", "reversed"),),
        arch="sm_90a",
        edge_cases=HOPPER_CASES,
        ieee_dtypes=("float16", "bfloat16"),
        ieee=(IN_PADDING, STRIDED, GROUPED),
        draw_channels=_hopper_channels,
        with_workspace=PASSES,
    ),
    "cuda-hopper-bf16x6": FamilyLayers(
        small="everything_differs",
        emulated=(
            ("channels_beyond_a_line", "NHWC", "HWIO", "float32"),
            ("a_volume_with_phases", "NDHWC", "ODHWI", "float32"),
            ("ragged_channels", "NHWC", "OHWI", "float32"),
        ),
        with_addend=(("channels_beyond_a_line", "NHWC", "HWIO", "float32"),),
        on_views=(("a_volume_with_phases", "NDHWC", "ODHWI", "float32", "reversed window"),),
        arch="sm_90a",
        precision="bf16x6",
        edge_cases=HOPPER_CASES,
        draw_channels=_hopper_channels,
        with_workspace=PASSES,
        dtype="float32",
        channels_last=True,
    ),
}
