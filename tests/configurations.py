"""Configurations for all tests: curated edge cases, random legal layers, data with exact sums.

Each of ``CASES`` is named after the edge case that it tests.  ``random_problem`` draws a legal
configuration, ``random_problems`` yields a seeded series of random configurations, and
``problems`` is a hypothesis strategy.  All three take ``max_macs``, the largest number of
multiply-adds per pass.

``integer_data`` gives x, w, dy and bias whose sums are exact in the problem's dtype in any order of
summation, so that implementations can be compared for equality.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np
from hypothesis import strategies as st

import cupyconv
from cupyconv.arrays import numpy_dtype
from cupyconv.formats import data_axes, data_formats, filter_axes, filter_formats
from cupyconv.problem import REAL_ITEMSIZE, REAL_PART, ConvProblem

DTYPES = tuple(REAL_ITEMSIZE)

EXACT = {"float16": 2**11, "bfloat16": 2**8, "float32": 2**24, "float64": 2**53}
"""Largest n per dtype such that all integers up to n are representable."""


@dataclass(frozen=True)
class Case:
    """A configuration, named after the edge case that it tests."""

    name: str
    problem: ConvProblem

    @property
    def macs(self) -> int:
        """Multiply-adds per pass."""
        return self.problem.flops // 2


def _case(name: str, input_shape: tuple, filter_shape: tuple, **arguments: object) -> Case:
    return Case(name, ConvProblem(input_shape, filter_shape, **arguments))


CASES: tuple[Case, ...] = (
    # the smallest
    _case("one_element", (1, 1, 1), (1, 1, 1)),
    _case("one_window", (2, 3, 4, 4), (5, 3, 4, 4)),
    _case("empty_batch", (0, 3, 6, 6), (4, 3, 3, 3), padding=1),
    _case("one_channel", (2, 1, 7, 8), (1, 1, 3, 3)),
    _case("one_pixel_filter", (2, 5, 4, 6), (7, 5, 1, 1)),
    # strides
    _case("one_pixel_filter_stride_2", (1, 4, 7, 7), (6, 4, 1, 1), stride=2),
    _case("stride_beyond_filter_leaves_gaps", (1, 2, 17), (3, 2, 2), stride=5),
    _case("trailing_inputs_unread", (1, 2, 11, 13), (2, 2, 3, 3), stride=4),
    _case("stride_beyond_input", (2, 3, 5, 5), (4, 3, 2, 2), stride=9),
    _case("strides_differ", (1, 3, 9, 10), (2, 3, 3, 2), stride=(3, 1)),
    # dilation
    _case("dilation", (1, 3, 12), (4, 3, 3), dilation=3),
    _case("dilations_differ", (2, 2, 9, 11), (3, 2, 2, 3), dilation=(1, 4)),
    _case(
        "dilation_beyond_input_leaves_centre_tap", (1, 2, 5), (3, 2, 3), dilation=7, padding=(7,)
    ),
    _case("stride_divides_dilation", (1, 2, 15, 15), (2, 2, 3, 3), stride=2, dilation=4, padding=3),
    _case("stride_and_dilation_coprime", (1, 2, 16), (3, 2, 4), stride=3, dilation=2, padding=2),
    _case("stride_equals_dilation", (2, 2, 13), (2, 2, 3), stride=3, dilation=3, padding=4),
    # padding
    _case("windows_wholly_in_the_padding", (1, 2, 4), (3, 2, 3), padding=6),
    _case("padding_on_one_side", (1, 2, 6, 6), (3, 2, 3, 3), padding=((2, 0), (0, 1))),
    _case("paddings_differ", (2, 3, 8), (2, 3, 5), padding=((1, 4),), stride=2),
    _case("padding_beyond_the_filter_on_one_side", (1, 1, 5, 4), (2, 1, 2, 2), padding=((5, 0), 3)),
    _case("same_even_filter", (1, 3, 7, 8), (4, 3, 2, 4), padding="same"),
    _case("same_lower_even_filter", (1, 3, 7, 8), (4, 3, 2, 4), padding="same_lower"),
    _case("same_stride_2_even_input", (1, 3, 6, 6), (4, 3, 3, 3), padding="same", stride=2),
    _case("same_lower_stride_2", (1, 3, 6, 6), (4, 3, 3, 3), padding="same_lower", stride=2),
    _case("same_needs_no_padding", (1, 2, 9), (2, 2, 1), padding="same", stride=4),
    _case("same_dilated", (1, 2, 9, 9), (2, 2, 3, 3), padding="same", dilation=(2, 3), stride=2),
    _case("filter_beyond_input_fits_with_padding", (1, 2, 3, 3), (2, 2, 5, 5), padding=1),
    # channels and groups
    _case("odd_channels", (3, 7, 5, 5), (11, 7, 3, 3), padding=1),
    _case("groups", (2, 6, 6, 6), (4, 3, 3, 3), groups=2),
    _case("groups_of_odd_sizes", (1, 9, 5), (15, 3, 3), groups=3, padding=1),
    _case("depthwise", (2, 5, 7, 7), (5, 1, 3, 3), groups=5, padding=1),
    _case("depthwise_multiplier", (2, 3, 6, 5), (12, 1, 3, 2), groups=3, stride=2, padding="same"),
    _case("grouped_to_one_channel_each", (1, 8, 6), (4, 2, 3), groups=4),
    _case("channels_beyond_one_tile", (1, 67, 3, 3), (66, 67, 1, 1)),
    _case("pixels_beyond_one_tile", (2, 2, 13, 11), (3, 2, 2, 2)),
    _case("taps_beyond_one_tile", (1, 3, 9, 9), (2, 3, 7, 7), padding=2),
    # ranks and aspect
    _case("long_signal", (1, 2, 200), (3, 2, 9), stride=2, padding=4),
    _case("one_row", (1, 3, 1, 12), (2, 3, 1, 3)),
    _case("one_column_padded", (1, 3, 12, 1), (2, 3, 3, 3), padding=1),
    _case("volume", (1, 2, 4, 5, 6), (3, 2, 2, 3, 2)),
    _case(
        "volume_everything_differs",
        (2, 4, 5, 7, 6),
        (6, 2, 2, 3, 1),
        stride=(2, 1, 3),
        dilation=(1, 2, 1),
        padding=((1, 0), (0, 2), (1, 1)),
        groups=2,
    ),
    _case("volume_same", (1, 3, 3, 4, 5), (2, 3, 3, 2, 3), padding="same", stride=(1, 2, 2)),
    _case("volume_depthwise", (1, 3, 4, 4, 4), (6, 1, 2, 2, 2), groups=3),
    # memory orders
    _case("channels_last", (2, 6, 7, 3), (3, 3, 3, 4), data_format="NHWC", padding="same"),
    _case(
        "channels_last_output_first",
        (1, 6, 5, 4),
        (6, 3, 3, 2),
        data_format="NHWC",
        filter_format="OHWI",
        padding=1,
        groups=2,
    ),
    _case("channels_first_filter_last", (1, 3, 6, 5), (3, 3, 3, 4), filter_format="HWIO"),
    _case("signal_channels_last", (2, 9, 3), (3, 3, 5), data_format="NWC", stride=2),
    # the project's first configurations
    _case("five_channels_ten_filters", (1, 5, 20, 20), (10, 5, 5, 5)),
    _case(
        "same_stride_2_of_5",
        (1, 5, 5, 3),
        (3, 3, 3, 4),
        data_format="NHWC",
        padding="same",
        stride=2,
    ),
    _case(
        "valid_stride_2_of_6",
        (1, 6, 6, 3),
        (3, 3, 3, 4),
        data_format="NHWC",
        padding="valid",
        stride=2,
    ),
    _case("groups_of_whole_tiles_and_a_pixel", (1, 16, 256), (16, 8, 2), groups=2, padding=1),
)


# Edge cases of the tensor-core and depthwise kernels: vectors of 8, 4 and 2 elements, full tiles
# and pipelines, phases, strips.  They are written channels first; the tests try every format.
FAMILY_CASES = (
    _case("pieces_of_8", (2, 16, 9, 7), (24, 16, 3, 3), padding=1),
    _case("pieces_of_8_stride_2", (2, 16, 9, 7), (24, 16, 3, 3), padding=1, stride=2),
    _case(
        "pieces_of_8_everything_differs",
        (1, 8, 11, 7),
        (8, 8, 3, 2),
        padding=((2, 0), (1, 1)),
        stride=(3, 2),
        dilation=(2, 1),
    ),
    _case("pieces_of_4", (1, 12, 6, 6), (20, 12, 3, 3)),
    _case("pieces_of_2", (1, 6, 6, 6), (10, 6, 3, 3)),
    _case("grouped_pieces", (1, 48, 6, 6), (40, 24, 3, 3), groups=2, padding="same"),
    _case("pipeline_wraps", (3, 64, 5, 6), (72, 64, 3, 1)),
    _case("several_tiles", (1, 130, 12, 13), (134, 130, 1, 1)),
    _case("pixels_follow", (2, 16, 8, 4), (24, 16, 1, 1)),
    _case("pixels_follow_in_pairs_in_the_output", (2, 8, 6, 5), (10, 8, 3, 3), padding=1),
    _case("volume_phases", (1, 8, 5, 5, 5), (16, 8, 2, 2, 2), stride=2),
    _case("groups_of_4", (2, 32, 7, 9), (32, 4, 3, 3), groups=8, padding=1, stride=(1, 2)),
    _case("groups_of_3_to_2", (1, 12, 6, 7), (8, 3, 2, 3), groups=4, dilation=2),
    _case("groups_of_8_to_16", (1, 16, 5, 6), (32, 8, 3, 3), groups=2, padding=1),
    _case("first_layer", (2, 3, 11, 12), (16, 3, 7, 7), stride=2, padding=3),
    _case(
        "deeper_than_high",
        (1, 4, 7, 3, 5),
        (4, 2, 3, 2, 2),
        groups=2,
        stride=(2, 1, 1),
        padding=((1, 2), (1, 0), (0, 1)),
    ),
    _case("depthwise_pieces", (2, 64, 7, 9), (64, 1, 3, 3), groups=64, padding=1),
    _case("depthwise_lanes_to_spare", (1, 40, 9, 6), (40, 1, 3, 3), groups=40, stride=2),
    _case(
        "depthwise_stride_3", (1, 16, 13, 14), (16, 1, 5, 4), groups=16, stride=3, padding=(2, 1)
    ),
    _case(
        "depthwise_padding_beyond_stride",
        (1, 8, 6, 14),
        (8, 1, 3, 5),
        groups=8,
        stride=(1, 2),
        padding=((0, 1), (4, 2)),
    ),
    _case("depthwise_dilated", (1, 16, 13, 14), (16, 1, 3, 3), groups=16, dilation=3, padding=2),
    _case("depthwise_multiplied", (1, 8, 6, 7), (24, 1, 3, 3), groups=8, padding=1),
    _case("depthwise_many_taps", (1, 8, 9, 33), (8, 1, 3, 31), groups=8, padding=(1, 15)),
    _case("depthwise_signal", (2, 24, 50), (24, 1, 9), groups=24, padding=4),
    _case("depthwise_chunks", (4, 8, 24, 24), (8, 1, 3, 2), groups=8, padding=1),
    _case("deeper_than_high_than_wide", (1, 32, 12, 4, 3), (32, 1, 2, 2, 2), groups=32),
    _case("sixteen_sources", (1, 64, 3, 2, 6), (32, 16, 2, 2, 4), groups=4),
    _case("whole_tiles", (1, 256, 8, 16), (256, 128, 1, 1), groups=2),
    _case("a_tile_and_one", (1, 129, 3, 43), (129, 129, 1, 1)),
    _case("grouped_strides_differ", (1, 16, 7, 9), (16, 8, 3, 3), groups=2, stride=(2, 1)),
    _case("as_many_taps_as_bits", (1, 8, 40), (8, 8, 29), padding=14),
    _case("taps_of_three_words", (1, 8, 70), (8, 8, 66), padding=33),
)

DIRECT_CASES = (
    _case("columns_in_pieces", (2, 3, 10, 24), (3, 1, 3, 3), groups=3, padding=1),
    _case("columns_in_pieces_strided", (1, 3, 9, 32), (3, 1, 3, 5), groups=3, padding=2, stride=2),
    _case(
        "columns_in_pieces_dilated",
        (1, 2, 9, 40),
        (2, 1, 2, 3),
        groups=2,
        padding=3,
        stride=(1, 6),
        dilation=3,
    ),
    _case("tiles_of_whole_rows", (1, 8, 16, 16), (8, 1, 5, 5), groups=8, padding=2),
    _case("ragged_tiles", (1, 8, 11, 13), (8, 1, 3, 3), groups=8),
    _case(
        "rows_far_apart", (1, 4, 40, 9), (4, 1, 3, 3), groups=4, dilation=(12, 1), padding=(12, 1)
    ),
    _case("rows_of_the_filter_in_parts", (1, 8, 9, 10), (8, 1, 9, 9), groups=8, padding=4),
    _case("sources_in_parts", (1, 32, 6, 7), (32, 16, 3, 3), groups=2, padding=1),
    _case("three_results_of_five_sources", (1, 20, 7, 9), (12, 5, 3, 3), groups=4, padding=1),
    _case("lanes_without_channels", (1, 35, 6, 8), (35, 1, 3, 3), groups=35, padding=1),
    _case("several_rounds", (2, 120, 24, 20), (120, 1, 3, 3), groups=120, padding=1),
    _case("a_stride_without_a_tap", (1, 4, 11, 14), (4, 1, 2, 2), groups=4, stride=3),
    _case("eight_phases", (1, 4, 9, 33), (4, 1, 3, 3), groups=4, stride=(2, 8), padding=(1, 9)),
)
"""Configurations for the direct family: tiles, vector accesses and parts of every kind."""

HOPPER_CASES = (
    _case("one_tile", (2, 64, 9, 7), (64, 64, 3, 3), padding=1),
    _case("ragged_channels", (2, 17, 9, 7), (65, 17, 3, 3), padding=1),
    _case("pairs_of_channels", (1, 70, 7, 8), (10, 70, 3, 2), stride=2, padding=1),
    _case("one_channel", (3, 1, 8, 9), (1, 1, 3, 3), padding=1),
    _case("images_of_whole_lines", (3, 72, 8, 16), (136, 72, 1, 1)),
    _case("planes_of_one_channel", (3, 1, 8, 16), (1, 1, 1, 1)),
    _case("one_plane", (1, 1, 8, 24), (8, 1, 1, 1)),
    _case("images_of_filled_lines", (2, 64, 15, 16), (64, 64, 1, 1)),
    _case("volumes_of_filled_lines", (2, 20, 3, 8, 10), (12, 20, 1, 1, 1)),
    _case("groups_of_planes", (2, 128, 30, 8), (128, 64, 1, 1), groups=2),
    _case("rows_of_filled_lines", (2, 24, 3, 56), (16, 24, 3, 3), padding=1),
    _case("rows_of_whole_lines", (1, 72, 3, 64), (136, 72, 3, 3), padding=1),
    _case("rows_that_end_within_a_piece", (1, 8, 4, 64), (8, 8, 3, 3)),
    _case(
        "rows_of_two_lines",
        (2, 16, 9, 112),
        (24, 16, 2, 2),
        stride=(2, 1),
        dilation=(3, 2),
        padding=((1, 0), (1, 1)),
    ),
    _case("rows_of_phases", (1, 8, 3, 112), (72, 8, 3, 3), padding=1, stride=2),
    _case("groups_of_rows", (2, 128, 2, 56), (128, 64, 3, 3), groups=2, padding=1),
    _case("a_row_of_two_lines", (3, 20, 120), (12, 20, 5), padding=2),
    _case("channels_beyond_a_line", (1, 72, 6, 5), (136, 72, 2, 2)),
    _case("few_channels", (2, 8, 6, 7), (8, 8, 3, 3), padding=1),
    _case("pipeline_wraps", (1, 200, 5, 5), (64, 200, 3, 1)),
    _case("several_tiles", (3, 16, 12, 15), (264, 16, 3, 3), padding=1),
    _case("phases_of_one_two_and_four_taps", (2, 64, 10, 9), (72, 64, 3, 3), padding=1, stride=2),
    _case("phases_without_taps", (1, 24, 9, 10), (64, 24, 1, 1), stride=2),
    _case("stride_beyond_input", (1, 16, 5, 2), (8, 16, 2, 2), stride=(4, 3), padding=(1, 0)),
    _case(
        "everything_differs",
        (1, 24, 12, 11),
        (40, 24, 3, 2),
        padding=((2, 0), (1, 3)),
        stride=(3, 2),
        dilation=(2, 1),
    ),
    _case("dilation", (1, 64, 9, 10), (64, 64, 3, 3), dilation=(2, 3), padding=(2, 3)),
    _case("stride_and_dilation", (1, 16, 13, 12), (16, 16, 3, 3), stride=2, dilation=2, padding=2),
    _case("windows_wholly_in_the_padding", (2, 8, 4), (16, 8, 3), padding=5),
    _case("trailing_inputs_unread", (1, 16, 11, 12), (8, 16, 2, 2), stride=4),
    _case("a_matrix_product", (3, 136, 7, 7), (72, 136, 1, 1)),
    _case("one_pixel_filter_padded", (1, 8, 4, 5), (8, 8, 1, 1), padding=1),
    _case("a_row", (2, 64, 150), (64, 64, 5), padding=2),
    _case("a_row_stride_3", (2, 16, 61), (24, 16, 4), padding=1, stride=3),
    _case("a_volume", (1, 16, 5, 6, 7), (16, 16, 3, 3, 3), padding=1),
    _case("a_volume_with_phases", (2, 8, 4, 5, 6), (16, 8, 2, 3, 2), stride=(1, 2, 2), padding=1),
    _case("groups", (2, 128, 7, 6), (384, 64, 3, 3), groups=2, padding=1),
    _case("groups_and_phases", (1, 256, 6, 5), (128, 128, 3, 3), groups=2, padding=1, stride=2),
    _case("one_image_row", (1, 64, 1, 40), (64, 64, 1, 3)),
    _case("one_pixel_beyond_a_line", (1, 8, 13, 5), (8, 8, 1, 1)),
    _case(
        "a_phase_without_taps_then_a_full_pipeline", (1, 192, 30), (1344, 64, 1), groups=3, stride=3
    ),
    _case("several_tiles_strided", (1, 8, 30, 41), (8, 8, 3, 3), stride=(2, 3), padding=1),
    _case(
        "several_tiles_of_a_volume",
        (1, 8, 16, 5, 14),
        (8, 8, 2, 2, 2),
        stride=(2, 1, 2),
        dilation=(2, 1, 1),
        padding=((1, 0), (0, 0), (0, 1)),
    ),
)
"""Configurations for the Hopper family."""

TOEPLITZ_CASES = (
    _case("seven_by_seven", (2, 8, 9, 16), (8, 1, 7, 7), groups=8, padding=3),
    _case("many_images_in_a_tile", (9, 9, 3, 4), (9, 1, 5, 5), groups=9, padding=2),
    _case(
        "two_products_a_strip",
        (1, 16, 40, 70),
        (16, 1, 3, 13),
        groups=16,
        padding=((2, 1), (5, 9)),
    ),
    _case("rows_of_images_rounded_up", (2, 4, 33, 20), (4, 1, 31, 31), groups=4, padding=15),
    _case("even_filter_unpadded", (2, 8, 17, 23), (8, 1, 6, 8), groups=8),
    _case(
        "padding_beyond_the_filter", (1, 8, 4, 6), (8, 1, 2, 3), groups=8, padding=((3, 0), (9, 4))
    ),
    _case("more_taps_than_lanes", (3, 16, 150), (16, 1, 33), groups=16, padding=16),
    _case("many_chunks", (40, 8, 16, 8), (8, 1, 5, 3), groups=8, padding=((2, 2), (1, 1))),
    _case(
        "as_many_blocks_as_are_loaded",
        (1, 8, 6, 16),
        (8, 1, 2, 10),
        groups=8,
        padding=((1, 1), (5, 4)),
    ),
    # The last block has a single column.
    _case("many_blocks_of_columns", (1, 8, 1345), (8, 1, 5), groups=8, padding=2),
    _case("one_channel_one_tap", (1, 1, 3, 5), (1, 1, 1, 1)),
    _case("no_images", (0, 8, 5, 5), (8, 1, 3, 3), groups=8),
)
"""Depthwise configurations for the Toeplitz family."""

COLUMNS_CASES = (
    _case("patches_side_by_side", (2, 3, 12, 16), (20, 3, 4, 4), stride=4),
    _case("stride_beyond_the_filter", (1, 4, 19, 16), (10, 4, 2, 3), stride=(7, 5), padding=(0, 2)),
    _case("many_stride_phases", (1, 3, 24, 26), (6, 3, 9, 12), stride=(6, 8), padding=(3, 4)),
    _case("one_output_position", (5, 6, 4, 3), (9, 6, 4, 3)),
    _case("one_output_with_padding", (3, 2, 3, 4), (7, 2, 5, 7), padding=((1, 1), (2, 1))),
    _case("dilation_and_stride_share_a_factor", (1, 2, 21, 17), (5, 2, 3, 2), stride=4, dilation=6),
    _case("dilation_beyond_the_stride", (2, 3, 15, 16), (4, 3, 3, 3), stride=2, dilation=3),
    _case("few_filters", (1, 24, 9, 11), (3, 24, 3, 3), padding=1),
    _case("upsampled_sound", (2, 5, 70), (8, 5, 16), stride=8, padding=4),
    _case(
        "a_volume_of_patches",
        (1, 2, 7, 8, 9),
        (5, 2, 3, 2, 2),
        stride=(3, 2, 4),
        dilation=(1, 2, 1),
        padding=((1, 0), (2, 1), (0, 1)),
    ),
    _case("grouped_patches", (2, 6, 13, 15), (10, 3, 4, 4), groups=2, stride=4, padding=1),
    _case("depthwise_upsampling", (1, 5, 30, 23), (5, 1, 8, 8), groups=5, stride=4, padding=2),
    _case("deep_product", (3, 2, 9, 7), (80, 2, 3, 3), stride=3, padding=1),
    _case(
        "grouped_volume_of_patches", (1, 4, 6, 7, 8), (6, 2, 2, 3, 2), groups=2, stride=(2, 3, 3)
    ),
    _case("no_images_to_scatter", (0, 3, 8, 8), (4, 3, 4, 4), stride=4),
)
"""Configurations of large strides, single outputs and few channels for the columns family."""

PATCH_CASES = (
    _case("seven_by_seven_of_three", (1, 3, 20, 24), (16, 3, 7, 7), stride=2, padding=3),
    _case("windows_begin_odd_and_even", (2, 3, 17, 19), (10, 3, 3, 3), padding=1),
    _case("runs_of_whole_words", (1, 4, 21, 40), (24, 4, 4, 4), stride=2, padding=((1, 2), (3, 1))),
    _case("one_word_beyond_a_step", (1, 1, 12, 42), (72, 1, 3, 4), padding=(2, 1)),
    _case("filters_beyond_a_block", (1, 2, 9, 8), (130, 2, 2, 2)),
    _case("gaps_between_windows", (2, 3, 24, 23), (7, 3, 2, 2), stride=5),
    _case("gaps_in_the_window", (2, 3, 15, 18), (6, 3, 3, 3), dilation=2, padding=2),
    _case("gaps_of_odd_length", (1, 1, 9, 40), (8, 1, 2, 3), dilation=3, stride=(1, 2)),
    _case("rows_left_out", (1, 3, 20, 17), (5, 3, 3, 4), dilation=(3, 1), stride=(2, 3)),
    _case("windows_wholly_in_the_padding", (1, 3, 4, 5), (5, 3, 3, 3), padding=6),
    _case("blocks_take_several_tiles", (5, 3, 49, 30), (12, 3, 3, 3), stride=2, padding=1),
    _case("eleven_by_eleven", (1, 3, 35, 35), (33, 3, 11, 11), stride=4),
    _case("a_row", (2, 3, 300), (5, 3, 9), stride=3, padding=4),
    _case("a_row_with_gaps", (1, 2, 150), (6, 2, 5), dilation=2, padding=3),
    _case(
        "a_volume",
        (1, 3, 7, 10, 12),
        (6, 3, 3, 2, 3),
        stride=(3, 2, 1),
        dilation=(2, 1, 1),
        padding=((0, 1), (2, 1), (1, 0)),
    ),
    _case("words_beyond_a_block", (1, 3, 7, 8, 9), (4, 3, 7, 7, 7), padding=3),
    _case("chunks_without_tiles", (33, 2, 5, 9), (3, 2, 2, 3)),
    _case("eight_channels_one_tap", (1, 8, 9, 10), (6, 8, 1, 1)),
    _case("no_images", (0, 3, 5, 5), (4, 3, 3, 3)),
)
"""Configurations of few channels for the patch family."""


def cases(max_macs: int | None = None) -> list[Case]:
    """Return the curated cases, limited to ``max_macs`` multiply-adds per pass if given."""
    return [case for case in CASES if max_macs is None or case.macs <= max_macs]


def in_formats(problem: ConvProblem, data_format: str, filter_format: str) -> ConvProblem:
    """Return the same convolution with its arrays in another memory order."""
    rank = problem.spatial_rank
    x_shape, w_shape = [0] * (rank + 2), [0] * (rank + 2)
    moves = zip(problem.data_axes, data_axes(data_format), strict=True)
    for source, target in moves:
        x_shape[target] = problem.input_shape[source]
    moves = zip(problem.filter_axes, filter_axes(filter_format), strict=True)
    for source, target in moves:
        w_shape[target] = problem.filter_shape[source]
    return problem.replace(
        input_shape=x_shape,
        filter_shape=w_shape,
        data_format=data_format,
        filter_format=filter_format,
    )


def all_formats(problem: ConvProblem) -> list[ConvProblem]:
    """Return the same convolution in every memory order of its rank."""
    rank = problem.spatial_rank
    return [
        in_formats(problem, data, filter_)
        for data in data_formats(rank)
        for filter_ in filter_formats(rank)
    ]


# -- random configurations -------------------------------------------------------------------------

Pick = Callable[[int, int], int]
"""Function that returns an integer between two bounds, both included."""


def random_problem(
    pick: Pick,
    *,
    max_macs: int = 4096,
    ranks: Sequence[int] = (1, 2, 3),
    dtypes: Sequence[str] = ("float32",),
) -> ConvProblem:
    """Return a random legal configuration; about one in thirty has an empty batch."""

    def choose(options: Sequence) -> object:
        return options[pick(0, len(options) - 1)]

    rank = int(choose(ranks))
    mode = str(choose(("explicit", "explicit", "valid", "same", "same_lower")))
    budget = max_macs
    largest_filter, largest_output = {1: (9, 40), 2: (5, 12), 3: (3, 5)}[rank]
    sizes, taps, strides, dilations, pads = [], [], [], [], []
    for remaining in range(rank, 0, -1):
        share = max(int(budget ** (1 / remaining)), 1)
        filter_ = pick(1, min(largest_filter, share))
        stride, dilation = pick(1, 4), pick(1, 3)
        reach = (filter_ - 1) * dilation
        pad = (pick(0, reach + 1), pick(0, reach + 1)) if mode == "explicit" else (0, 0)
        output = pick(1, max(min(largest_output, share // filter_), 1))
        first = (output - 1) * stride + 1
        if mode in ("explicit", "valid"):
            first += reach - sum(pad)
            if first + stride - 1 < 1:  # padding alone makes more outputs than were picked
                first, pad = first + sum(pad), (0, 0)
        sizes.append(pick(max(first, 1), first + stride - 1))
        taps.append(filter_)
        strides.append(stride)
        dilations.append(dilation)
        pads.append(pad)
        budget = max(budget // (filter_ * output), 1)
    groups = pick(1, min(4, budget))
    budget //= groups
    channels = pick(1, min(7, budget))
    filters = pick(1, min(7, budget // channels))
    batch = 0 if pick(0, 30) == 30 else pick(1, min(3, max(budget // (channels * filters), 1)))
    first_last = ConvProblem(
        (batch, groups * channels, *sizes),
        (groups * filters, channels, *taps),
        stride=strides,
        dilation=dilations,
        padding=pads if mode == "explicit" else mode,
        groups=groups,
        dtype=str(choose(dtypes)),
    )
    return in_formats(
        first_last, str(choose(data_formats(rank))), str(choose(filter_formats(rank)))
    )


def random_problems(count: int, *, seed: int = 0, **limits: object) -> Iterator[ConvProblem]:
    """Yield a series of ``random_problem`` that is the same for the same seed."""
    numbers = random.Random(seed)
    for _ in range(count):
        yield random_problem(numbers.randint, **limits)


@st.composite
def problems(draw: st.DrawFn, **limits: object) -> ConvProblem:
    """Draw a ``random_problem`` with hypothesis, which shrinks it towards a single element."""
    return random_problem(lambda first, last: draw(st.integers(first, last)), **limits)


# -- data ------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Data:
    """Arrays that the passes of a problem read."""

    x: np.ndarray
    w: np.ndarray
    dy: np.ndarray
    bias: np.ndarray


def integer_data(problem: ConvProblem, seed: int = 0) -> Data:
    """Return small integers whose sums of products are exact in the dtype.

    Magnitudes are at most 8, so that values are also exact in TF32.  With very many terms, even -1,
    0 and 1 are too large; then most of w or dy is zero.  Complex numbers have such parts.
    """
    if problem.is_complex:
        real = problem.replace(dtype=REAL_PART[problem.dtype])
        parts = zip(*(vars(integer_data(real, seed + n)).values() for n in (0, 1)), strict=True)
        return Data(*((re + 1j * im).astype(problem.dtype) for re, im in parts))
    numbers = np.random.default_rng(seed)
    limit = EXACT[problem.dtype] - 8  # the bias is at most 8
    taps = prod(problem.filter_sizes)
    terms = taps * max(problem.C // problem.groups, problem.K)  # terms of y and dx
    terms_dw = max(problem.N * prod(problem.output_sizes), 1)
    size = next((m for m in (8, 5, 3, 2) if terms * m * m <= limit), 1)
    x = _integers(numbers, problem.input_shape, size, 1)
    w = _integers(numbers, problem.filter_shape, size, limit / (terms * size**2))
    dy = _integers(numbers, problem.output_shape, size, limit / (terms_dw * size**2))
    bias = _integers(numbers, problem.bias_shape, 8, 1)
    k_axis, i_axis, *_ = problem.filter_axes
    # Upper bounds on the sums of y, dx, and dw and db.
    bounds = (
        _largest_sum(w, k_axis) * size,
        _largest_sum(w, i_axis) * size,
        _largest_sum(dy, problem.data_axes[1]) * size,
    )
    assert max(bounds) <= limit, f"{problem}: sums up to {max(bounds)}, exact up to {limit}"
    dtype = numpy_dtype(problem.dtype)
    return Data(*(values.astype(dtype) for values in (x, w, dy, bias)))


def _integers(
    numbers: np.random.Generator, shape: tuple[int, ...], size: int, room: float
) -> np.ndarray:
    """Return integers from -size to size without 0; if ``room`` is below 1, most become zero."""
    values = numbers.integers(1, size + 1, shape) * numbers.choice((-1, 1), shape)
    if room < 1:
        values[numbers.random(shape) >= room / 4] = 0
    return values


def _largest_sum(values: np.ndarray, axis: int) -> int:
    """Return the largest sum of absolute values over all axes but ``axis``."""
    others = tuple(a for a in range(values.ndim) if a != axis)
    return int(np.abs(values).sum(axis=others).max(initial=0))


def random_data(problem: ConvProblem, seed: int = 0) -> Data:
    """Return normally distributed values, rounded to the dtype."""
    numbers = np.random.default_rng(seed)
    dtype = numpy_dtype(problem.dtype)
    shapes = (problem.input_shape, problem.filter_shape, problem.output_shape, problem.bias_shape)
    return Data(*(numbers.standard_normal(shape).astype(dtype) for shape in shapes))


# -- running ---------------------------------------------------------------------------------------


def three_passes(problem: ConvProblem, data: Data, impl: str = "auto") -> dict[str, Any]:
    """Compute y with its bias, dx and dw with the public functions, on the device of the data."""
    arguments = {**problem.keywords, "impl": impl}
    return {
        "y": cupyconv.conv_forward(data.x, data.w, data.bias, **arguments),
        "dx": cupyconv.conv_backprop_input(problem.input_shape, data.w, data.dy, **arguments),
        "dw": cupyconv.conv_backprop_filter(data.x, problem.filter_shape, data.dy, **arguments),
    }
