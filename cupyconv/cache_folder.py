"""The cache folder of compiled code and measured choices, which only the user may write."""

from __future__ import annotations

import os
import shlex
import stat
import warnings
from functools import cache
from pathlib import Path

from cupyconv import files

CACHE_VARIABLE = "CUPYCONV_CACHE_DIR"


def cache_directory() -> Path | None:
    """Return the cache folder: $CUPYCONV_CACHE_DIR, else ``cupyconv`` in the user's cache folder.

    Return None for a user without a home folder.
    """
    path = os.environ.get(CACHE_VARIABLE)
    if path:
        return files.expanded(path)
    base = os.environ.get("XDG_CACHE_HOME", "")
    if not base.startswith("~") and not os.path.isabs(base):
        base = "~/.cache"  # the XDG specification says to ignore a relative path
    home = files.expanded(base)
    return None if home is None else home / "cupyconv"


def trusted_directory(name: str = "") -> Path | None:
    """Return the cache folder, or its subfolder ``name``, if no other user can write it.

    Otherwise warn once, with a command that solves the problem, and return None.  Also return None
    for a user without a home folder.
    """
    base = cache_directory()
    folder = base and base / name
    problem = folder and distrust(folder)
    if problem:
        _warn("compiled code is kept for this process only: {}. To fix this: {}".format(*problem))
        return None
    return folder


def distrust(folder: Path) -> tuple[str, str] | None:
    """Return the reason why other users can write a cache folder, and a remedy.

    Return None if no other user can write it.
    """
    distrusted = files.distrusted(folder)
    if distrusted is None:
        return None
    place, reason = distrusted
    remedy = f"set {CACHE_VARIABLE} to a folder of your own"
    status = place.lstat()
    # A sticky folder, such as /tmp, is shared on purpose.
    is_private = stat.S_ISDIR(status.st_mode) and not status.st_mode & stat.S_ISVTX
    if is_private and status.st_uid == os.geteuid():
        remedy = f"chmod go-w {shlex.quote(str(place))}, or {remedy}"
    return f"{place}, which leads to the cache {folder}, {reason}", remedy


def unwritable(folder: Path) -> str | None:
    """Return the reason why a cache folder cannot be written or created; None if it can be."""
    nearest = next(path for path in (folder, *folder.parents) if path.exists())
    if not nearest.is_dir():
        return f"{nearest} is not a folder"
    return None if os.access(nearest, os.W_OK | os.X_OK) else f"{nearest} cannot be written"


@cache
def _warn(text: str) -> None:
    """Warn, at most once per process for each text."""
    warnings.warn(text, RuntimeWarning, stacklevel=2)


def keep(path: Path, content: bytes) -> None:
    """Write a file into a cache folder, which is created if it does not exist.

    Raises:
        OSError: the file cannot be written, or another user could write it.
    """
    files.make_private(path.parent)
    if problem := distrust(path.parent):
        raise PermissionError(problem[0])  # for example, if another user created the folder first
    if path.is_symlink():
        path.unlink()  # a link could lead to a file outside the cache
    files.put(path, content, mode=0o600)
