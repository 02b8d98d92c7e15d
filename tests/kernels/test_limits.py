"""Layers whose offsets or counts exceed 32 or 64 bits.

Their tensors are small, but their strides, dilations or paddings are large.  Each kernel family
computes such a layer exactly or rejects it; cuda-generic computes those that others reject.
"""

import numpy as np
import pytest

from cupyconv import ConvError, ConvProblem, operations
from cupyconv.kernels import direct
from cupyconv.kernels.cost import LEAST_SPLIT_STEPS
from cupyconv.kernels.family import Choices
from cupyconv.kernels.parameters import index_type
from cupyconv.kernels.strides import Strides
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from cupyconv.problem import PASSES
from tests import agreement, emulator, launches
from tests.agreement import fits
from tests.emulator import convolutions, memory

FAMILIES_HERE = ("cuda-generic", "cuda-gather", "cuda-direct", "cuda-toeplitz", "cuda-patch")

DEPTHWISE = ((1, 8, 4, 4), (8, 1, 2, 1), {"groups": 8})
DENSE = ((1, 16, 4, 4), (16, 16, 2, 1), {})
FIRST = ((1, 3, 4, 40), (16, 3, 2, 3), {})


def far(layer, taps=None, **rules):
    x_shape, w_shape, others = layer
    if taps is not None:
        w_shape = (*w_shape[:2], *taps)
    return ConvProblem(x_shape, w_shape, **others, **rules)


def apart(layer, dilation, taps=2):
    """Return a layer with this distance between filter rows; the last row meets the input."""
    rules = {"dilation": (dilation, 1), "padding": ((dilation * (taps - 1), 0), (0, 0))}
    return far(layer, (taps, layer[1][3]), **rules)


def striding(layer, stride):
    """Return a layer whose second window is this far from the first, and reads the input."""
    rules = {"stride": (stride, 1), "padding": ((stride, 0), (0, 0))}
    return far(layer, (1, layer[1][3]), **rules)


LAYERS = {
    "a single row, dilated": far(DEPTHWISE, (1, 3), dilation=(2**31, 1)),
    "a single tap, dilated": ConvProblem((1, 8, 64), (8, 1, 1), groups=8, dilation=2**40),
    "a single window, strided": far(DEPTHWISE, stride=(2**31, 1)),
    "a single window of same padding": far(DENSE, stride=2**33, padding="same"),
    "a single dense window, strided": far(DENSE, stride=(2**30, 1), padding=1),
    "rows 2^24 apart, and many": apart(((16, 64, 256, 1), (64, 1, 2, 1), {"groups": 64}), 2**24),
    "rows that both reach the padding": far(
        DEPTHWISE, (3, 1), dilation=(2**30, 1), padding=((2**30, 2**30), (0, 0))
    ),
    "a padding of 2^31": ConvProblem(
        (1, 1, 4, 40), (1, 1, 3, 33), dilation=(2**30, 1), padding=((2**31, 0), (0, 0))
    ),
    **{
        f"{name}: rows 2^{bits} + {more} apart": apart(layer, 2**bits + more)
        for name, layer in (("depthwise", DEPTHWISE), ("dense", DENSE), ("first", FIRST))
        for bits, more in ((30, -1), (30, 0))
    },
    **{
        f"{name}: windows 2^{bits} apart": striding(layer, 2**bits)
        for name, layer in (("depthwise", DEPTHWISE), ("dense", DENSE), ("first", FIRST))
        for bits in (26, 30)
    },
}


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", ["float16", "float32"])
@pytest.mark.parametrize("name", LAYERS)
def test_far_layers_are_exact_or_refused(name, dtype):
    problem = LAYERS[name].replace(dtype=dtype)
    assert fits(problem, "cuda-generic", "sm_80") == PASSES
    for impl in FAMILIES_HERE:
        agreement.require_exact(emulator, problem, passes=fits(problem, impl, "sm_80"), impl=impl)
    agreement.require_exact(emulator, problem, passes=PASSES)


def test_rules_that_do_nothing_keep_no_family_out():
    """The dilation of a single tap and the stride after a single window have no effect."""
    for name in ("a single row, dilated", "a single tap, dilated", "a single window, strided"):
        assert fits(LAYERS[name], "cuda-direct", "sm_80") == PASSES
    for name in ("a single window of same padding", "a single dense window, strided"):
        assert fits(LAYERS[name].replace(dtype="float16"), "cuda-gather", "sm_80") == PASSES


def padded(before):
    return ConvProblem((1, 16, 4), (16, 16, 1), padding=((before, 0),), stride=2)


def taps_of(channels):
    """Return a layer with 65,536 taps and this many channels, whose x and dy are not exchanged."""
    return ConvProblem(
        (1, 2, channels),
        (65536, channels, 8),
        stride=2,
        padding=32767,
        data_format="NWC",
        dtype="float16",
    )


def images(number, filters=8, taps=3):
    rules = {"data_format": "NWC", "filter_format": "OWI"}
    return ConvProblem((number, 1, 1), (filters, taps, 1), padding=taps // 2, **rules)


def tall(number):
    """Return images of one row, with 63 filter rows; the kernel computes 16 rows per image."""
    return ConvProblem(
        (number, 1, 1, 1), (1, 1, 63, 1), padding=((31, 31), (0, 0)), dtype="float16"
    )


def one_column(rows):
    """Return a layer with a filter of this many rows on a single pixel."""
    return ConvProblem(
        (1, 1, 1, 1), (1, 1, rows, 1), padding=((rows - 1, 0), (0, 0)), dtype="float16"
    )


def tiled(number):
    """Return a layer with 512 tiles of columns and this many tiles of rows."""
    rules = {"data_format": "NWC", "filter_format": "OWI", "dtype": "float16"}
    return ConvProblem((1, 128 * number, 64), (512 * 64, 1, 64), **rules)


def apart_by_stride(number):
    """Return a layer with an odd distance between taps, which alternate between two phases."""
    return apart(DEPTHWISE, 2 * number + 1, 3).replace(stride=(2, 1))


def test_offsets_of_what_is_not_read_may_leave_32_bits(monkeypatch):
    """Offsets of columns beyond the last one of a partial tile may exceed 32 bits."""
    far_apart = 50_000_000
    problem = ConvProblem((1, 2, 1, 33), (2, 1, 1, 1), groups=2, stride=(1, 8), dtype="float16")
    strides = Strides((66, 1, 66, far_apart), (1, 1, 1, 1), (10, 5, 5, 1))
    request = Request(problem, "forward", Device.of("sm_80"), strides=strides)
    tiling, ragged = max(
        direct.geometries(request), key=lambda one: one[1].across.tiles * one[1].across.extent
    )
    last = (ragged.across.tiles * ragged.across.extent - 1) * problem.stride[1]
    assert index_type(problem, strides) == "int"
    assert last * far_apart >= 2**31
    monkeypatch.setattr(direct.CUDA_DIRECT, "tilings", lambda _: (tiling,))
    elements = memory.lazy((32 * far_apart + 2,), np.float16, "x", read_only=False)
    x = np.ndarray(problem.input_shape, np.float16, elements, 0, [2 * step for step in strides.x])
    x[...] = np.arange(x.size).reshape(x.shape)
    w = memory.like(np.ones(problem.filter_shape, np.float16), "w")
    with convolutions.installed(convolutions.backend("sm_80")):
        y = operations.conv_forward(x, w, stride=problem.stride, groups=2, impl="cuda-direct")
    assert (np.asarray(y) == x[..., ::8]).all()


# Family, pass, function from a number to a layer, largest supported number, and the reason why the
# next number is rejected.
EDGES = [
    ("cuda-gather", "forward", lambda n: ConvProblem((1, 16, n), (16, 16, 1)), 2**30,
     "counts up to 1,073,741,824 elements of an axis, not 1,073,741,825"),
    ("cuda-gather", "forward", padded, 2**30,
     "counts up to 1,073,741,824 elements of padding, not 1,073,741,825"),
    ("cuda-gather", "forward", lambda n: apart(DENSE, n), 2**29 - 5,
     "counts up to 1,073,741,824 rows or columns of a filter plus a dilation plus 8 strides, not "
     "1,073,741,825"),
    ("cuda-direct", "backprop_input", lambda n: apart(DEPTHWISE, n), 2**29 - 5,
     "counts up to 1,073,741,824 rows or columns of a filter plus a dilation plus 8 strides, not "
     "1,073,741,825"),
    ("cuda-direct", "forward", lambda n: striding(DEPTHWISE, n), 2**27 - 1,
     "counts up to 1,073,741,824 rows or columns of a filter plus a dilation plus 8 strides, not "
     "1,073,741,826"),
    ("cuda-toeplitz", "forward", tall, 2**31 - 1,
     "counts up to 2,147,483,647 blocks, not 2,147,483,648"),
    ("cuda-toeplitz", "backprop_filter", one_column, 786_420,
     "counts up to 65,535 parts of the filter's rows, not 65,536"),
    ("cuda-direct", "backprop_input", apart_by_stride, 32767,
     "counts up to 65,536 input rows under a tile, not 65,538"),
    ("cuda-hopper", "backprop_filter", taps_of, 32704,
     "counts up to 2,147,483,136 channels under all taps, not 2,147,483,648"),
    ("cuda-hopper", "forward", tiled, 2**22 - 1,
     "counts up to 2,147,483,383 tiles, not 2,147,483,648"),
    ("cuda-hopper-bf16x6", "forward", lambda n: tiled(n).replace(dtype="float32"), 2**22 - 1,
     "counts up to 2,147,483,383 tiles, not 2,147,483,648"),
    ("cuda-hopper-bf16x6", "forward", images, 715_827_882,
     "counts up to 715,827,882 images, not 715,827,883"),
    ("cuda-hopper-bf16x6", "forward", lambda n: images(1).replace(input_shape=(1, n, 1)),
     2**30 - 1, "counts up to 1,073,741,823 pixels, not 1,073,741,824"),
    ("cuda-generic", "forward", lambda n: apart(DEPTHWISE, n), 2**60 - 8228,
     "elements that windows and padding span, not 9,223,372,036,854,775,814"),
]  # fmt: skip


@pytest.mark.quick
@pytest.mark.parametrize(("impl", "pass_", "layer", "largest", "said"), EDGES)
def test_a_family_takes_what_it_can_count(impl, pass_, layer, largest, said):
    device = Device.of("sm_90a" if "hopper" in impl else "sm_80")
    precision = "bf16x6" if impl == "cuda-hopper-bf16x6" else "ieee"

    def refusal(number):
        return FAMILIES[impl].refuses(Request(layer(number), pass_, device, precision))

    assert refusal(largest) is None
    assert said in refusal(largest + 1)


@pytest.mark.parametrize("impl", ["auto", "cuda-generic", "cuda-direct"])
def test_what_no_family_takes_is_an_error(impl):
    with pytest.raises(ConvError) as error:
        plan_pass(Request(apart(DEPTHWISE, 2**61), "forward", Device.of("sm_80")), impl)
    assert error.value.rule == "at least one implementation must support the problem"
    assert "elements that windows and padding span" in error.value.values
    assert error.value.remedy == "Compute the layer in parts, or with less padding"


@pytest.mark.parametrize(
    ("number", "index"), [(2**26, "int"), (2**27 - 2**12, "long long"), (2**27, "long long")]
)
def test_rows_that_only_blocks_have_are_counted(number, index):
    """The kernel pads each of 2^27 images to 16 rows, so it counts 2^31 rows."""
    problem, device = tall(number), Device.of("sm_80")
    planned = plan_pass(Request(problem, "forward", device), "cuda-toeplitz")
    strides = Strides.contiguous(problem)
    (product,) = launches.prepare(planned, problem, strides, device)
    assert dict(product.defines)["ALIGNED"] == 1
    assert dict(product.defines)["INDEX"] == index


def test_tiles_of_all_splits_are_counted():
    """Tiles are counted even for more splits than any workspace allows."""
    pixels, channels = 2**25, 2**17
    rules = {"data_format": "NWC", "filter_format": "OWI", "dtype": "float16"}
    problem = ConvProblem((1, pixels, channels), (channels, 1, channels), **rules)
    device = Device.of("sm_90a")
    request = Request(problem, "backprop_filter", device)
    hopper = FAMILIES["cuda-hopper"]
    for tile in hopper.fitting_tiles(request):
        of_split = hopper.candidate(request, Choices(tile=tile)).blocks
        most = (2**31 - 1 - 2 * device.resident_blocks) // of_split
        assert most < pixels // tile.block_k // LEAST_SPLIT_STEPS
        assert hopper.candidate(request, Choices(tile=tile, splits=most)).splits == most
        assert hopper.candidate(request, Choices(tile=tile, splits=most + 1)) is None


def test_cuda_generic_counts_blocks_before_launching():
    device = Device.of("sm_80")

    def prepare(groups):
        problem = ConvProblem((1, groups, 1), (groups, 1, 1), groups=groups)
        planned = plan_pass(Request(problem, "backprop_filter", device), "cuda-generic")
        return launches.prepare(planned, problem, Strides.contiguous(problem), device)

    (launch,) = prepare(2**31 - 1)
    assert launch.grid == (2**31 - 1,)
    with pytest.raises(ConvError, match="counts up to 2,147,483,647 blocks, not 2,147,483,648"):
        prepare(2**31)


PATCH = ConvProblem((1, 4, 9, 9), (8, 4, 3, 3), dtype="float16")
TOEPLITZ = ConvProblem((1, 8, 9, 9), (8, 1, 3, 3), groups=8, dtype="float16")


@pytest.mark.parametrize(
    ("layer", "changes", "pass_", "reason"),
    [
        (PATCH, {}, "backprop_input", "computes forward and backprop_filter"),
        (PATCH, {"dtype": "float32"}, "forward", "precision='tf32' permits"),
        (PATCH, {"dtype": "float64"}, "forward", "tensor cores for float64"),
        (PATCH, {"filter_shape": (8, 2, 3, 3), "groups": 2}, "forward", "single group, not 2"),
        (PATCH, {"input_shape": (1, 9, 9, 9), "filter_shape": (8, 9, 3, 3)}, "forward", "not 9"),
        (PATCH, {"input_shape": (1, 4, 99, 99), "filter_shape": (8, 4, 33, 33)}, "forward",
         "do not fit"),
        (TOEPLITZ, {"dtype": "float32"}, "forward", "16-bit"),
        (TOEPLITZ, {"stride": 2}, "forward", "stride 1"),
        (TOEPLITZ, {"dilation": 2}, "forward", "dilation 1"),
        (TOEPLITZ, {"filter_shape": (16, 1, 3, 3)}, "forward", "one filter per channel"),
        (TOEPLITZ, {"input_shape": (1, 8, 9, 300), "filter_shape": (8, 1, 3, 65)}, "forward",
         "up to 64 taps, not 65"),
    ],
)  # fmt: skip
def test_unsupported_layers_are_refused_with_a_reason(layer, changes, pass_, reason):
    family = FAMILIES["cuda-patch" if layer is PATCH else "cuda-toeplitz"]
    assert reason in family.refuses(Request(layer.replace(**changes), pass_, Device.of("sm_86")))
