"""The kernel sources: their folder, and the headers that each source includes."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_INCLUDE = re.compile(r'^\s*#\s*include\s+"([^"]+)"', re.MULTILINE)


@dataclass(frozen=True)
class KernelSource:
    """A .cu file with all headers that it includes, directly or indirectly.

    Attributes:
        name: file name, for the compiler's messages.
        text: text of the file.
        headers: (name in ``#include``, text) of each header, sorted by name.
    """

    name: str
    text: str
    headers: tuple[tuple[str, str], ...]


def kernel_sources() -> Path:
    """Return the folder of the .cu files; their headers are in its subfolder ``include``.

    Raises:
        FileNotFoundError: the installation is incomplete.

    >>> (cupyconv.kernel_sources() / "conv_forward.cu").is_file()
    True
    """
    return directory()


@cache
def directory() -> Path:
    """Return the folder of the .cu files: inside the package, or beside the package in a checkout.

    Raises:
        FileNotFoundError: neither folder exists, so the installation is incomplete.
    """
    package = Path(__file__).parent.parent
    for folder in (package / "cuda", package.parent / "cuda"):
        if (folder / "conv_forward.cu").is_file():
            return folder
    raise FileNotFoundError(
        f"the kernel sources are neither in {package / 'cuda'} nor beside the package: "
        "reinstall cupyconv"
    )


@cache
def load(file_name: str) -> KernelSource:
    """Return the source of one kernel file with the headers that it includes."""
    folder = directory()
    text = (folder / file_name).read_text(encoding="utf-8")
    headers: dict[str, str] = {}
    pending = _INCLUDE.findall(text)
    while pending:
        name = pending.pop()
        if name not in headers:
            headers[name] = (folder / "include" / name).read_text(encoding="utf-8")
            pending += _INCLUDE.findall(headers[name])
    return KernelSource(file_name, text, tuple(sorted(headers.items())))
