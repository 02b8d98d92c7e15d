"""What a plan needs to know of a device."""

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

    @staticmethod
    def of(word: str | Device) -> Device:
        """The device a word stands for: "cpu", or an architecture such as "sm_80".

        Raises:
            ConvError: it is neither, or no chip that there is.
        """
        if isinstance(word, Device):
            return word
        if word == "cpu":
            return CPU
        match = re.fullmatch(r"sm_([0-9]{1,3})([0-9])a?", str(word))
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
                "Use NumPy arrays, which are computed on the CPU",
            )
        suffix = "a" if capability in _ARCHITECTURE_SPECIFIC else ""
        architecture = f"sm_{capability[0]}{capability[1]}{suffix}"
        return Device(name, architecture, multiprocessors, has_tensor_maps)


CPU = Device("cpu")
