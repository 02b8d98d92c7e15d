"""Registry of the implementations, whose modules are imported when they are used.

A kernel family ``cuda-{name}`` is named in ``kernels.request.Implementation`` and has two files,
``cupyconv/kernels/{name}.py`` and ``cuda/conv_{name}.cu``.  cuda-generic has a .cu file per pass;
cuda-hopper-bf16x6 uses the kernel of cuda-hopper.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from typing import Any, get_args

from cupyconv.kernels.family import Family
from cupyconv.kernels.request import Implementation


class _Families(Mapping[str, Family]):
    """All implementations by name, in the order of ``Implementation``."""

    def __getitem__(self, name: str) -> Family:
        if name not in get_args(Implementation):
            raise KeyError(name)
        family: Family = _family(name)
        return family

    def __iter__(self) -> Iterator[str]:
        return iter(get_args(Implementation))

    def __len__(self) -> int:
        return len(get_args(Implementation))


@cache
def _family(name: str) -> Any:
    constant = name.replace("-", "_")
    module = f"kernels.{constant.removeprefix('cuda_')}" if is_kernel(name) else "cpu.families"
    return getattr(import_module(f"cupyconv.{module}"), constant.upper())


def is_kernel(name: str) -> bool:
    """Return whether the implementation with this name runs on a GPU."""
    return name.startswith("cuda-")


FAMILIES = _Families()
"""All implementations by name."""
