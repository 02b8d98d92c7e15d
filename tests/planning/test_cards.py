"""Cards by name: their data-sheet figures, and the estimates from these figures."""

from __future__ import annotations

import pytest

from cupyconv import ConvError, ConvProblem, Plan, plan
from cupyconv.kernels.device import CARDS, CHIPS, Device, card_named
from tests.cli.test_cli import run

LAYER = ConvProblem((32, 128, 28, 28), (128, 128, 3, 3), padding=1, dtype="float16")

DATA_SHEETS = {
    "RTX 2080 Ti": (53.8, 13.4),
    "RTX 3090": (71.2, 35.6),
    "RTX 4090": (165.2, 82.6),
    "RTX 5080": (112.6, 56.3),
    "A10": (125, 31.2),
    "A30": (165, 10.3),
    "L4": (121, 30.3),
    "RTX A6000": (154.8, 38.7),
    "RTX 2060": (25.8, 6.5),
    "RTX 3080 Ti": (68.2, 34.1),
    "RTX 4060 Ti": (44.1, 22.1),
    "RTX 4070 Ti": (80.2, 40.1),
    "RTX 5060": (38.4, 19.2),
    "L40": (181, 90.5),
    "A10G": (70, 35),
    "Orin": (42.5, 5.3),
}
"""TFLOP/s on data sheets: tensor cores (float16, summed in float32), and float32, keyed by card."""


@pytest.mark.parametrize("card", DATA_SHEETS)
def test_rates_are_those_of_the_data_sheet(card):
    tensor_rate, float_rate = DATA_SHEETS[card]
    chip = CARDS[card].chip
    assert chip.tensor_rate == pytest.approx(tensor_rate, rel=0.02)
    assert chip.float_rate == pytest.approx(float_rate, rel=0.02)


def test_an_h800_has_limited_float64_units():
    assert CARDS["H800"].chip.double_rate == CARDS["H800"].chip.double_tensor_rate == 1


def test_a_nominal_chip_is_one_of_its_cards():
    for capability, chip in CHIPS.items():
        figures = chip.multiprocessors, chip.clock, chip.tensor_rate, chip.bandwidth
        cards = [card.chip for card in CARDS.values() if card.capability == capability]
        own = [(one.multiprocessors, one.clock, one.tensor_rate, one.bandwidth) for one in cards]
        assert any(one == pytest.approx(figures, rel=0.01) for one in own), capability


@pytest.mark.parametrize(
    ("name", "card"),
    [
        ("RTX 4090", "RTX 4090"),
        ("4090", "RTX 4090"),
        ("RTX4090", "RTX 4090"),
        ("h100pcie", "H100 PCIe"),
        ("a10080gb", "A100 80GB"),
        ("h100 pcie", "H100 PCIe"),
        ("A100-80GB", "A100 80GB"),
        ("NVIDIA A100-SXM4-40GB", "A100"),
        ("NVIDIA A100 80GB PCIe", "A100 PCIe 80GB"),
        ("NVIDIA H100 80GB HBM3", "H100"),
        ("Tesla T4", "T4"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "RTX 4090 Laptop"),
        ("NVIDIA GeForce RTX 3080 Ti Laptop GPU", None),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti Super"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("Jetson AGX Orin", "Orin"),
        ("Jetson Orin Nano", "Orin Nano"),
        ("NVIDIA A10G", "A10G"),
        ("RTX 4090 D", None),
        ("NVIDIA H100 NVL", None),
        ("", None),
        ("NVIDIA", None),
    ],
)
def test_cards_are_known_by_their_names(name, card):
    assert card_named(name) == card


def test_a_card_has_the_kernels_of_its_architecture():
    for name, card in CARDS.items():
        own = Device.of(name)
        assert own.capability == card.capability
        planned, nominal = plan(LAYER, name), plan(LAYER, str(own.architecture))
        for one, other in zip(planned, nominal, strict=True):
            assert (one.implementation, one.tile, one.splits, one.copies) == (
                other.implementation, other.tile, other.splits, other.copies,
            )  # fmt: skip


def microseconds(device: str) -> float:
    time = plan(LAYER, device)["forward"].microseconds
    assert time is not None
    return time


def test_estimates_are_those_of_the_card():
    assert microseconds("L40S") == microseconds("sm_89")
    assert microseconds("L4") > microseconds("RTX 4090") > microseconds("L40S")
    assert "from the L4's data sheet" in str(plan(LAYER, "L4"))
    assert "data sheet" not in str(plan(LAYER, "sm_89"))


def test_an_unknown_card_gets_the_nearest_names():
    with pytest.raises(ConvError, match="'RTX 4090'") as caught:
        plan(LAYER, "RTX 4091")
    assert "sm_80" in str(caught.value)


@pytest.mark.parametrize("name", ["V100", "Tesla V100-SXM2-16GB", "P100", "1080ti", "Titan V"])
def test_old_card_is_rejected_like_its_architecture(name):
    with pytest.raises(ConvError, match=r"compute capability 7\.5 .* has [67]\.[01]\. Use"):
        Device.of(name)


DESCRIBED = {
    "sm_89, 128 SMs, 2.52 GHz, 1008 GB/s, 165.2 TFLOP/s": CARDS["RTX 4090"],
    "sm_90a, 132 sms, 1980 MHz, 4.8 TB/s": CARDS["H200"],
    "sm_89,142SMs": CARDS["L40S"],
}
"""Cards, keyed by their figures as text."""


@pytest.mark.parametrize("text", DESCRIBED)
def test_any_card_is_known_by_its_figures(text):
    device = Device.of(text)
    assert device.multiprocessors == DESCRIBED[text].multiprocessors
    own, other = device.figures, DESCRIBED[text].chip
    assert vars(own) == pytest.approx(vars(other), rel=0.015)
    assert "modelled from the card's figures" in str(plan(LAYER, text))
    restored = Plan.from_json(plan(LAYER, text).to_json())
    assert restored == plan(LAYER, text)


@pytest.mark.parametrize(
    "text", ["sm_89, 76", "sm_89, 0 SMs", "sm_89, 2 GHz, 3 GHz", "sm_89, ", "sm_89, nan GHz"]
)
def test_an_invalid_figure_is_named(text):
    with pytest.raises(ConvError, match="one figure of each kind: SMs, GHz, GB/s or TFLOP/s: got"):
        Device.of(text)


def test_the_command_line_takes_cards():
    arguments = ("--input", "1x3x8x8", "--filter", "4x3x3x3", "--device", "rtx 4090")
    assert "on RTX 4090 sm_89" in run("plan", *arguments).output
    figures = "sm_89, 76 SMs, 2.5 GHz, 672 GB/s"
    assert f"on {figures}" in run("plan", *arguments[:-1], figures).output
