"""The cache folder of compiled code and measured choices, which only the user may write."""

from __future__ import annotations

import os
import shlex
import warnings
from functools import cache
from pathlib import Path

from cupyconv import files

CACHE_VARIABLE = "CUPYCONV_CACHE_DIR"


def cache_directory() -> Path | None:
    """Return the folder of compiled code: $CUPYCONV_CACHE_DIR, else cupyconv in the user's cache.

    None for a user without a home folder.
    """
    chosen = os.environ.get(CACHE_VARIABLE)
    if chosen:
        return files.expanded(chosen)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("~") and not os.path.isabs(base):
        base = "~/.cache"  # a relative one is to be ignored, by the XDG specification
    home = files.expanded(base)
    return None if home is None else home / "cupyconv"


def trusted_directory(name: str = "") -> Path | None:
    """Return the cache folder, or a folder in it, if nobody else can write there.

    Else warn once, with the command that mends it, and return None.
    """
    found = cache_directory()
    folder = found and found / name
    wrong = folder and distrust(folder)
    if wrong:
        _warn("compiled code is kept for this process only: {}. Mend it: {}".format(*wrong))
        return None
    return folder


def distrust(folder: Path) -> tuple[str, str] | None:
    """Report who else can write a cache folder and the command that mends it; None if nobody."""
    found = files.distrusted(folder)
    if found is None:
        return None
    place, wrong = found
    mending = f"set {CACHE_VARIABLE} to a folder that is yours"
    name = shlex.quote(str(place))
    if place.lstat().st_uid == os.geteuid():
        mending = f"chmod go-w {name}, or {mending}"
    elif str(place) == os.path.realpath(folder):  # what it is in may be somebody else's by right
        mending = f"sudo chown -R {os.geteuid()} {name}, or {mending}"
    return f"{place}, which leads to the cache {folder}, {wrong}", mending


def unwritable(folder: Path) -> str | None:
    """Return why a cache folder cannot be written; None if it can, or can be made."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is no folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"


@cache
def _warn(text: str) -> None:
    """Warn once in a process."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def keep(path: Path, content: bytes) -> None:
    """Write a file into a cache folder, which is made first if it is missing.

    Raises:
        OSError: it cannot be written, or somebody else could too.
    """
    files.make_private(path.parent)
    if wrong := distrust(path.parent):
        raise PermissionError(wrong[0])  # somebody was quicker to make it
    if path.is_symlink():
        path.unlink()  # it is not read, so it is not written through either
    files.put(path, content, mode=0o600)
