"""What a plan needs to know of a device, and all that is known of a chip."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cached_property

from cupyconv.errors import ConvError, shown, unknown_word

# Instructions of these chips exist only in code built for exactly that chip.
_ARCHITECTURE_SPECIFIC = {(9, 0), (10, 0), (12, 0)}
_OLDEST = (7, 5)

CAPABILITIES = (
    *((7, 5), (8, 0), (8, 6), (8, 7), (8, 8), (8, 9), (9, 0)),
    *((10, 0), (10, 1), (10, 3), (11, 0), (12, 0), (12, 1)),
)
"""Of the chips that there are; a newer one that is found in a machine is taken all the same."""

DEVICES = ("cpu", *(f"sm_{major}{minor}" for major, minor in CAPABILITIES))
"""Words that a device may be given by."""


@dataclass(frozen=True)
class Chip:
    """An architecture's nominal chip, from its data sheet.

    Attributes:
        multiprocessors: how many.
        tensor_rate: TFLOP/s of 16-bit products summed in float32 through mma.sync; TF32 has half.
        group_tensor_rate: the same for products of a warpgroup (wgmma); 0 where there are none.
        float_rate: TFLOP/s of float32 outside the tensor cores.
        double_rate: TFLOP/s of float64 outside the tensor cores.
        double_tensor_rate: TFLOP/s of float64 on the tensor cores; 0 where they have none.
        bandwidth: of device memory, in GB/s.
        cache_bandwidth: of loads from L2, in GB/s; 0 where no plan asks for it.
        clock: of the multiprocessors, in GHz.
        block_shared: KiB of shared memory that a block may have.
        shared: KiB of it that a multiprocessor has for blocks.
        threads: that a multiprocessor holds.
    """

    multiprocessors: int
    tensor_rate: float
    group_tensor_rate: float
    float_rate: float
    double_rate: float
    double_tensor_rate: float
    bandwidth: float
    cache_bandwidth: float
    clock: float
    block_shared: int
    shared: int
    threads: int


CHIPS = {
    (7, 5): Chip(40, 65, 0, 8.1, 0.25, 0, 320, 0, 1.59, 64, 64, 1024),
    (8, 0): Chip(108, 312, 0, 19.5, 9.7, 19.5, 1555, 0, 1.41, 163, 164, 2048),
    (8, 6): Chip(84, 150, 0, 37.4, 0.6, 0, 696, 0, 1.74, 99, 100, 1536),
    (8, 9): Chip(142, 362, 0, 91.1, 1.4, 0, 864, 0, 2.52, 99, 100, 1536),
    # From L2, what others have measured of a card with 114 multiprocessors, for each of them.
    # Through mma.sync, about 60 % of the wgmma rate.
    (9, 0): Chip(132, 620, 989, 67.0, 33.5, 67.0, 3350, 6500, 1.98, 227, 228, 2048),
    (10, 0): Chip(148, 620, 0, 75.0, 37.0, 37.0, 8000, 0, 1.98, 227, 228, 2048),
    # Products summed in float32 are half as fast as in float16, which data sheets lead with.
    (12, 0): Chip(170, 210, 0, 104.0, 1.6, 0, 1790, 0, 2.41, 99, 100, 1536),
}
"""By compute capability; one between takes the newest that is older."""

RESERVED_SHARED = 1 << 10
"""Bytes of a multiprocessor's shared memory that each block takes besides its own."""


@dataclass(frozen=True)
class Device:
    """A processor that a plan is made for.

    Attributes:
        name: "cpu", or the name of a GPU.
        architecture: what kernels are compiled for, such as "sm_80" or "sm_90a"; None for the CPU.
        multiprocessors: of the card, for grids of blocks that stay; None is the nominal chip's.
        has_tensor_maps: whether tensor maps for TMA can be made, where the chip has it.
    """

    name: str
    architecture: str | None = None
    multiprocessors: int | None = None
    has_tensor_maps: bool = True

    @property
    def is_gpu(self) -> bool:
        return self.architecture is not None

    @cached_property
    def capability(self) -> tuple[int, int]:
        """Compute capability of a GPU, such as (9, 0)."""
        digits = (self.architecture or "sm_00").removeprefix("sm_").rstrip("a")
        return int(digits[:-1]), int(digits[-1])

    @cached_property
    def nominal(self) -> tuple[int, int]:
        """Compute capability of the chip that estimates are for: a GPU's own, or one before it."""
        return max(known for known in CHIPS if known <= self.capability)

    @property
    def chip(self) -> Chip:
        """The nominal chip of a GPU's architecture."""
        return CHIPS[self.nominal]

    @property
    def resident_blocks(self) -> int:
        """Blocks that stay on a GPU, one on each multiprocessor."""
        return self.multiprocessors or self.chip.multiprocessors

    @staticmethod
    def of(word: str | Device) -> Device:
        """The device a word stands for: "cpu", or an architecture such as "sm_80".

        Raises:
            ConvError: it is neither, or no chip that there is.
        """
        if isinstance(word, Device):
            return word
        text = word if isinstance(word, str) else ""
        if text == "cpu":
            return CPU
        match = re.fullmatch(r"sm_([0-9]{1,3})([0-9])a?", text)
        if match is None:
            raise ConvError(
                "a device is 'cpu' or an architecture",
                f"got {shown(word)}",
                "Use for example 'sm_80'",
            )
        capability = int(match[1]), int(match[2])
        if capability > _OLDEST and capability not in CAPABILITIES:
            raise unknown_word("device", word, DEVICES)
        return Device.of_capability(word, capability)

    @staticmethod
    def of_capability(
        name: str,
        capability: tuple[int, int],
        multiprocessors: int | None = None,
        has_tensor_maps: bool = True,
    ) -> Device:
        """A GPU by its compute capability, such as (8, 0).

        Raises:
            ConvError: the chip is older than the kernels support.
        """
        if capability < _OLDEST:
            raise ConvError(
                "kernels need a GPU of compute capability 7.5 or later",
                f"{name} has {capability[0]}.{capability[1]}",
                "Use a newer one, or the CPU, where NumPy arrays are computed",
            )
        suffix = "a" if capability in _ARCHITECTURE_SPECIFIC else ""
        architecture = f"sm_{capability[0]}{capability[1]}{suffix}"
        return Device(name, architecture, multiprocessors, has_tensor_maps)


CPU = Device("cpu")
