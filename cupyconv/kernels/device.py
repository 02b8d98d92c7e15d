"""Devices, the data-sheet values of their chips, and the compiler's targets.

The nominal chip of an architecture is the one chip, such as the H100 for compute capability 9.0,
whose data-sheet values stand for all cards of the architecture when a plan is chosen.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from functools import cache, cached_property
from math import inf
from typing import NamedTuple

from cupyconv.errors import ConvError, shown, unknown_word

# Chips whose newest instructions need an architecture-specific target, such as sm_90a.
_ARCHITECTURE_SPECIFIC = {(9, 0), (10, 0), (12, 0)}
_OLDEST = (7, 5)

_TEGRA = {(8, 7), (8, 8), (10, 1), (11, 0)}
"""Compute capabilities of Tegra chips, which run no cubin of another chip (CUDA's rule)."""

_LARGEST_MAJOR = 69
"""Largest major version accepted in a chip's name.  Names with a superfluous digit, such as sm_800,
have a larger major version, 75 or more, and are rejected."""

CAPABILITIES = (
    *((7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0)),
    *((10, 0), (10, 1), (10, 3), (10, 7), (11, 0), (12, 0), (12, 1)),
)
"""Compute capabilities of the known chips; newer chips are supported too."""

DEVICES = ("cpu", *(f"sm_{major}{minor}" for major, minor in CAPABILITIES))
"""Names of the CPU and of the known architectures; cards are in CARDS."""


RESERVED_SHARED = 1 << 10
"""Bytes of shared memory that the system reserves per block (CUDA's rule)."""

BLOCKS_PER_SM = 16
"""Number of resident blocks that a multiprocessor of every chip supports (CUDA's rule)."""


@dataclass(frozen=True)
class Chip:
    """Data-sheet values of an architecture's nominal chip.

    Attributes:
        multiprocessors: number of multiprocessors.
        tensor_rate: TFLOP/s of mma.sync for 16-bit products summed in float32; TF32 reaches half.
        group_tensor_rate: TFLOP/s of wgmma for 16-bit products summed in float32; 0 on chips
            without wgmma.
        float_rate: TFLOP/s of float32 outside the tensor cores.
        double_rate: TFLOP/s of float64 outside the tensor cores.
        double_tensor_rate: TFLOP/s of float64 on the tensor cores; 0 on chips without support.
        bandwidth: bandwidth of device memory, in GB/s.
        clock: clock of the multiprocessors, in GHz.
        block_shared: largest shared memory per block, in KiB.
        shared: shared memory per multiprocessor, in KiB.
        threads: largest number of resident threads per multiprocessor.
    """

    multiprocessors: int
    tensor_rate: float
    group_tensor_rate: float
    float_rate: float
    double_rate: float
    double_tensor_rate: float
    bandwidth: float
    clock: float
    block_shared: int
    shared: int
    threads: int

    def blocks_by_shared(self, shared_bytes: int) -> int:
        """Return how many blocks fit into the shared memory of a multiprocessor.

        Args:
            shared_bytes: shared memory per block, in bytes.
        """
        return (self.shared << 10) // (shared_bytes + RESERVED_SHARED)


CHIPS = {
    (7, 5): Chip(40, 65, 0, 8.1, 0.25, 0, 320, 1.59, 64, 64, 1024),
    (8, 0): Chip(108, 312, 0, 19.5, 9.7, 19.5, 1555, 1.41, 163, 164, 2048),
    (8, 6): Chip(84, 150, 0, 37.4, 0.6, 0, 696, 1.74, 99, 100, 1536),
    (8, 9): Chip(142, 362, 0, 91.1, 1.4, 0, 864, 2.52, 99, 100, 1536),
    # mma.sync reaches about 60 % of the wgmma rate.
    (9, 0): Chip(132, 620, 989, 67.0, 33.5, 67.0, 3350, 1.98, 227, 228, 2048),
    (10, 0): Chip(148, 620, 0, 75.0, 37.0, 37.0, 8000, 1.98, 227, 228, 2048),
    # The data sheet's first figure is for products summed in float16; sums in float32 are half as
    # fast.
    (12, 0): Chip(170, 210, 0, 104.0, 1.6, 0, 1790, 2.41, 99, 100, 1536),
}
"""Nominal chips by compute capability; other capabilities use the newest older chip."""


def _nominal(capability: tuple[int, int]) -> tuple[int, int]:
    """Return the compute capability of a GPU's nominal chip: the largest one that it reaches."""
    return max(known for known in CHIPS if known <= capability)


class Card(NamedTuple):
    """Data-sheet values of a graphics card.

    Attributes:
        capability: compute capability.
        multiprocessors: number of multiprocessors.
        clock: boost clock in GHz; the data sheet states the rate of the tensor cores at this clock.
        bandwidth: bandwidth of device memory, in GB/s.
        tensor_share: rate of 16-bit products summed in float32, relative to the nominal chip of the
            architecture at the same clock and number of multiprocessors.
        double_limit: largest rate of float64 in TFLOP/s, for a card with limited float64 units.
    """

    capability: tuple[int, int]
    multiprocessors: int
    clock: float
    bandwidth: float
    tensor_share: float = 1.0
    double_limit: float = inf

    @property
    def chip(self) -> Chip:
        """Data-sheet values of the card.

        Rates are those of the nominal chip, scaled to the card's multiprocessors and clock.
        """
        nominal = CHIPS[_nominal(self.capability)]
        scale = self.multiprocessors * self.clock / (nominal.multiprocessors * nominal.clock)
        tensor = scale * self.tensor_share
        return replace(
            nominal,
            multiprocessors=self.multiprocessors,
            tensor_rate=tensor * nominal.tensor_rate,
            group_tensor_rate=tensor * nominal.group_tensor_rate,
            float_rate=scale * nominal.float_rate,
            double_rate=min(scale * nominal.double_rate, self.double_limit),
            double_tensor_rate=min(scale * nominal.double_tensor_rate, self.double_limit),
            bandwidth=self.bandwidth,
            clock=self.clock,
        )


CARDS = {
    "T4": Card((7, 5), 40, 1.59, 320),
    "RTX 2060": Card((7, 5), 30, 1.68, 336, 0.5),
    "RTX 2070": Card((7, 5), 36, 1.62, 448, 0.5),
    "RTX 2080": Card((7, 5), 46, 1.71, 448, 0.5),
    "RTX 2080 Ti": Card((7, 5), 68, 1.545, 616, 0.5),
    "A100": Card((8, 0), 108, 1.41, 1555),
    "A100 80GB": Card((8, 0), 108, 1.41, 2039),
    "A100 PCIe 80GB": Card((8, 0), 108, 1.41, 1935),
    "A30": Card((8, 0), 56, 1.44, 933),
    "A10": Card((8, 6), 72, 1.695, 600),
    "A10G": Card((8, 6), 80, 1.71, 600, 0.5),
    "A40": Card((8, 6), 84, 1.74, 696),
    "RTX A6000": Card((8, 6), 84, 1.8, 768),
    "RTX 3060": Card((8, 6), 28, 1.777, 360, 0.5),
    "RTX 3060 Ti": Card((8, 6), 38, 1.665, 448, 0.5),
    "RTX 3070": Card((8, 6), 46, 1.725, 448, 0.5),
    "RTX 3070 Ti": Card((8, 6), 48, 1.77, 608, 0.5),
    "RTX 3080": Card((8, 6), 68, 1.71, 760, 0.5),
    "RTX 3080 Ti": Card((8, 6), 80, 1.665, 912, 0.5),
    "RTX 3090": Card((8, 6), 82, 1.695, 936, 0.5),
    "RTX 3090 Ti": Card((8, 6), 84, 1.86, 1008, 0.5),
    "RTX 3060 Laptop": Card((8, 6), 30, 1.703, 336, 0.5),
    "RTX 3070 Laptop": Card((8, 6), 40, 1.62, 448, 0.5),
    "RTX 3080 Laptop": Card((8, 6), 48, 1.71, 448, 0.5),
    "Orin": Card((8, 7), 16, 1.3, 204.8, 2.0),
    "Orin NX": Card((8, 7), 8, 0.918, 102.4, 2.0),
    "Orin Nano": Card((8, 7), 8, 0.625, 68, 2.0),
    "Orin Nano Super": Card((8, 7), 8, 1.02, 102, 2.0),
    "L4": Card((8, 9), 58, 2.04, 300),
    "L40": Card((8, 9), 142, 2.49, 864, 0.5),
    "L40S": Card((8, 9), 142, 2.52, 864),
    "RTX 6000 Ada": Card((8, 9), 142, 2.505, 960),
    "RTX 4060": Card((8, 9), 24, 2.46, 272, 0.5),
    "RTX 4060 Ti": Card((8, 9), 34, 2.535, 288, 0.5),
    "RTX 4070": Card((8, 9), 46, 2.475, 504, 0.5),
    "RTX 4070 Super": Card((8, 9), 56, 2.475, 504, 0.5),
    "RTX 4070 Ti": Card((8, 9), 60, 2.61, 504, 0.5),
    "RTX 4070 Ti Super": Card((8, 9), 66, 2.61, 672, 0.5),
    "RTX 4080": Card((8, 9), 76, 2.505, 717, 0.5),
    "RTX 4080 Super": Card((8, 9), 80, 2.55, 736, 0.5),
    "RTX 4090": Card((8, 9), 128, 2.52, 1008, 0.5),
    "RTX 4060 Laptop": Card((8, 9), 24, 2.37, 256, 0.5),
    "RTX 4070 Laptop": Card((8, 9), 36, 2.175, 256, 0.5),
    "RTX 4080 Laptop": Card((8, 9), 58, 2.28, 432, 0.5),
    "RTX 4090 Laptop": Card((8, 9), 76, 2.04, 576, 0.5),
    "H100": Card((9, 0), 132, 1.98, 3350),
    "H100 PCIe": Card((9, 0), 114, 1.755, 2000),
    "H800": Card((9, 0), 132, 1.98, 3350, double_limit=1.0),
    "H200": Card((9, 0), 132, 1.98, 4800),
    "GH200": Card((9, 0), 132, 1.98, 4000),
    "B200": Card((10, 0), 148, 1.98, 8000),
    "GB200": Card((10, 0), 152, 2.06, 8000),
    "RTX 5060": Card((12, 0), 30, 2.497, 448),
    "RTX 5060 Ti": Card((12, 0), 36, 2.572, 448),
    "RTX 5070": Card((12, 0), 48, 2.51, 672),
    "RTX 5070 Ti": Card((12, 0), 70, 2.452, 896),
    "RTX 5080": Card((12, 0), 84, 2.62, 960),
    "RTX 5090": Card((12, 0), 170, 2.41, 1792),
    "RTX PRO 6000": Card((12, 0), 188, 2.6, 1792, 2.0),
}
"""Common cards, from NVIDIA's data sheets and architecture white papers.

The boost clock of a laptop's GPU depends on its power limit; the highest one is used.  The SMs of
A10G and GB200 are those that the driver reports.
"""

OLD_CARDS = {
    **dict.fromkeys(("V100", "Titan V"), (7, 0)),
    "Xavier": (7, 2),
    "P100": (6, 0),
    **dict.fromkeys(("GTX 1080", "GTX 1080 Ti", "GTX 1070", "GTX 1070 Ti", "GTX 1060"), (6, 1)),
    **dict.fromkeys(("GTX 1050", "GTX 1050 Ti", "Titan Xp", "P40", "P4"), (6, 1)),
    "TX2": (6, 2),
    **dict.fromkeys(("M40", "M60", "GTX 980", "GTX 980 Ti", "GTX 970"), (5, 2)),
    **dict.fromkeys(("TX1", "Jetson Nano"), (5, 3)),
    "K80": (3, 7),
}
"""Compute capability of cards that are older than the kernels support, from NVIDIA's lists."""

_DECORATION = frozenset(
    [
        *("nvidia", "geforce", "tesla", "quadro", "rtx", "blackwell", "generation", "gpu"),
        *("workstation", "server", "edition", "sxm", "sxm4", "sxm5"),
        *("jetson", "agx", "developer", "kit", "480gb"),
        *("hbm2", "hbm2e", "hbm3", "hbm3e", "24gb", "40gb", "48gb", "80gb"),
    ]
)
"""Words that may be part of a card's name and do not change its values."""


@cache
def _joined(name: str) -> str:
    """Return the name in lower case without spaces and hyphens."""
    return "".join(name.lower().replace("-", " ").split())


def card_named(name: str) -> str | None:
    """Return the key in CARDS of the card with a given name; None if CARDS lacks the card.

    >>> card_named("A100-SXM4-80GB"), card_named("rtx4090"), card_named("RTX 4090 D")
    ('A100 80GB', 'RTX 4090', None)
    """
    fitting = {card: words for card, words in _words_in(name, CARDS) if words <= _DECORATION}
    return min(fitting, key=lambda card: len(fitting[card]), default=None)


def _words_in(name: str, cards: Iterable[str]) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the cards whose words a name has, each with the name's other words."""
    joined, words = _joined(name), frozenset(name.lower().replace("-", " ").split())
    for card in cards:
        own = frozenset(card.lower().split()) - {"rtx", "gtx"}
        if joined in (_joined(card), _joined(card).removeprefix("rtx").removeprefix("gtx")):
            yield card, frozenset()
        elif own <= words:
            yield card, words - own


_ARCHITECTURE = re.compile(r"sm_([0-9]{1,3})([0-9])a?")
_FIGURE = re.compile(r"([0-9]{1,5}(?:\.[0-9]{1,4})?) *(sms?|[gm]hz|[gt]b/s|tflop/?s)")
_FIGURES_EXAMPLE = "sm_89, 76 SMs, 2.5 GHz, 672 GB/s"


def _described_card(text: str) -> Card | None:
    """Return a card that its figures describe, such as "sm_89, 76 SMs, 2.5 GHz, 672 GB/s".

    Figures that are left out are those of the nominal chip.  The figure in TFLOP/s is the rate of
    16-bit products summed in float32.

    Returns:
        The card; None if the text is not an architecture with figures.

    Raises:
        ConvError: a figure is invalid.
    """
    architecture, *figures = (part.strip() for part in text.split(","))
    match = _ARCHITECTURE.fullmatch(architecture)
    if match is None or not figures or (int(match[1]), int(match[2])) < _OLDEST:
        return None
    capability = int(match[1]), int(match[2])
    nominal = CHIPS[_nominal(capability)]
    found: dict[str, float] = {}
    for figure in figures:
        number = _FIGURE.fullmatch(figure.lower())
        unit = "" if number is None else number[2][:2].replace("mh", "gh").replace("gb", "tb")
        if number is None or unit in found or not float(number[1]):
            raise ConvError(
                "a card must have one figure of each kind: SMs, GHz, GB/s or TFLOP/s",
                f"got {shown(figure)}",
                f"Write, for example, {_FIGURES_EXAMPLE!r}",
            )
        scale = {"mhz": 1e-3, "tb/s": 1e3}.get(number[2], 1)
        found[unit] = float(number[1]) * scale
    card = Card(
        capability,
        int(found.get("sm", nominal.multiprocessors)),
        found.get("gh", nominal.clock),
        found.get("tb", nominal.bandwidth),
    )
    share = found.get("tf", card.chip.tensor_rate) / card.chip.tensor_rate
    return card._replace(tensor_share=share)


def _capability_of(target: str) -> tuple[int, int]:
    """Return the compute capability in the name of a target."""
    digits = target.rpartition("_")[2].rstrip("a")
    return int(digits[:-1]), int(digits[-1])


@dataclass(frozen=True)
class Device:
    """A processor that a plan is made for.

    Attributes:
        name: "cpu", or the name of a GPU.
        architecture: architecture of the chip, such as "sm_80" or "sm_90a"; None for the CPU.
        multiprocessors: number of multiprocessors of the card, which determines the number of
            persistent blocks; None to use the number of the nominal chip.
        has_tensor_maps: whether tensor maps for TMA can be encoded.
        fallback: target for a compiler that does not know the chip: an older chip with compatible
            cubins, such as "sm_100", or PTX, such as "compute_90"; else None.

    >>> device = cupyconv.Device.of("RTX 4090")
    >>> device.architecture, device.capability, device.multiprocessors, device.is_gpu
    ('sm_89', (8, 9), 128, True)
    """

    name: str
    architecture: str | None = None
    multiprocessors: int | None = None
    has_tensor_maps: bool = True
    fallback: str | None = None

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.architecture is not None

    @cached_property
    def capability(self) -> tuple[int, int]:
        """Compute capability of a GPU, such as (9, 0)."""
        return _capability_of(self.architecture or "sm_00")

    @cached_property
    def target(self) -> str | None:
        """Target that kernels are compiled for, such as "sm_90a"; None for the CPU."""
        return self.fallback or self.architecture

    @cached_property
    def instructions(self) -> tuple[int, int]:
        """Compute capability of the target, whose instructions kernels may use."""
        return _capability_of(self.target or "sm_00")

    def compiled_by(self, known: Collection[tuple[int, int]]) -> Device | None:
        """Return the device with a target that the compiler supports; None without such a target.

        The target is the chip's own architecture, if the compiler knows it.  Otherwise it is the
        newest older chip with compatible cubins, or else the newest PTX.

        Args:
            known: compute capabilities that the compiler has targets for.

        >>> device = cupyconv.Device.of("sm_89")
        >>> device.compiled_by([(8, 0), (8, 6)]).target, device.compiled_by([(7, 5)]).target
        ('sm_86', 'compute_75')
        """
        own = self.capability
        if own in known:
            return replace(self, fallback=None)
        older = [chip for chip in known if _OLDEST <= chip < own]
        if not older:
            return None
        compatible = [chip for chip in older if chip[0] == own[0] and not {chip, own} & _TEGRA]
        kind, (major, minor) = ("sm", max(compatible)) if compatible else ("compute", max(older))
        return replace(self, fallback=f"{kind}_{major}{minor}")

    @cached_property
    def nominal(self) -> tuple[int, int]:
        """Compute capability of the nominal chip: the largest in CHIPS that the GPU reaches."""
        return _nominal(self.capability)

    @cached_property
    def chip(self) -> Chip:
        """The nominal chip of a GPU's architecture."""
        return CHIPS[self.nominal]

    @cached_property
    def card(self) -> Card | None:
        """Figures of a GPU's card; None if its name is neither in CARDS nor consists of figures."""
        key = card_named(self.name) if self.is_gpu else None
        return CARDS[key] if key else _described_card(self.name)

    @property
    def figures(self) -> Chip:
        """Data-sheet values of a GPU's card, or of the nominal chip if the card is unknown."""
        return self.card.chip if self.card else self.chip

    @property
    def resident_blocks(self) -> int:
        """Number of persistent blocks of a GPU: one per multiprocessor."""
        return self.multiprocessors or self.chip.multiprocessors

    @staticmethod
    def of(word: str | Device) -> Device:
        """Return the device with this name: "cpu", an architecture such as "sm_80", or a card.

        Chips newer than all known chips are supported.  Supported cards are the keys of CARDS, such
        as "RTX 4090", and figures such as "sm_89, 76 SMs, 2.5 GHz, 672 GB/s"; a card has the same
        plans as its architecture.

        Raises:
            ConvError: the name is unknown.

        >>> cupyconv.Device.of("cpu").name, cupyconv.Device.of("sm_90").architecture
        ('cpu', 'sm_90a')
        >>> cupyconv.Device.of("H100 PCIe").multiprocessors
        114
        """
        if isinstance(word, Device):
            return word
        text = word if isinstance(word, str) else ""
        if text == "cpu":
            return CPU
        card = card_named(text)
        if card is not None:
            figures = CARDS[card]
            return Device.of_capability(card, figures.capability, figures.multiprocessors)
        for card, _ in _words_in(text, OLD_CARDS):
            return Device.of_capability(text, OLD_CARDS[card])  # raises an error
        described = _described_card(text)
        match = _ARCHITECTURE.fullmatch(text.partition(",")[0].strip())
        is_old = match is not None and (int(match[1]), int(match[2])) < _OLDEST
        if match is None or (described is None and "," in text and not is_old):
            from difflib import get_close_matches  # imported only for errors

            near = get_close_matches(text.lower(), [*map(str.lower, CARDS)], n=3, cutoff=0.5)
            cards = [card for card in CARDS if card.lower() in near] or ["RTX 4090"]
            raise ConvError(
                "a device must be 'cpu', an architecture or a card",
                f"got {shown(word)}",
                f"Use, for example, 'sm_80', {', '.join(map(repr, cards))} or the card's figures, "
                f"{_FIGURES_EXAMPLE!r}",
            )
        capability = int(match[1]), int(match[2])
        is_newer = capability > CAPABILITIES[-1] and capability[0] <= _LARGEST_MAJOR
        if capability > _OLDEST and capability not in CAPABILITIES and not is_newer:
            raise unknown_word("device", word, DEVICES)
        return Device.of_capability(word, capability, described and described.multiprocessors)

    @staticmethod
    def of_capability(
        name: str,
        capability: tuple[int, int],
        multiprocessors: int | None = None,
        has_tensor_maps: bool = True,
    ) -> Device:
        """Return a GPU by its compute capability, such as (8, 0).

        Raises:
            ConvError: the chip is older than the kernels support.

        >>> cupyconv.Device.of_capability("my GPU", (8, 6)).architecture
        'sm_86'
        """
        if capability < _OLDEST:
            raise ConvError(
                "the GPU must have compute capability 7.5 or later",
                f"{name} has {capability[0]}.{capability[1]}",
                "Use a newer GPU, or compute NumPy arrays on the CPU",
            )
        suffix = "a" if capability in _ARCHITECTURE_SPECIFIC else ""
        architecture = f"sm_{capability[0]}{capability[1]}{suffix}"
        return Device(name, architecture, multiprocessors, has_tensor_maps)


CPU = Device("cpu")
