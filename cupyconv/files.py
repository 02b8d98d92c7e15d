"""Atomic writes, and folders that nobody else can write."""

from __future__ import annotations

import errno
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import BinaryIO

_LINKS = 40
"""Most symbolic links on a path (Linux's rule)."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

# -- writing ---------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """A file to write, which takes the place of ``path`` once it is complete.

    Whatever ends the writing earlier, what was at ``path`` stays as it was, and nothing is left
    beside it.  Of a symbolic link, the target is replaced.  What is no plain file, such as a device
    or a pipe, is written to as it comes, and so are this process's own streams under ``/dev``.

    Args:
        path: the file.
        mode: its permissions; by default those of what was there, or of any new file.

    Raises:
        OSError: it cannot be written; its ``filename`` is ``path``.
    """
    try:
        target, stream = _destination(path)
        opened: AbstractContextManager[BinaryIO]
        if stream is not None:
            opened = os.fdopen(os.dup(stream), "wb")
        elif path.exists() and not path.is_file():
            opened = path.open("wb")  # raises for a folder
        else:
            opened = _whole(target, mode)
        with opened as file:
            yield file
    except OSError as error:
        error.filename, error.filename2 = str(path), None
        raise


@contextmanager
def _whole(target: Path, mode: int | None) -> Iterator[BinaryIO]:
    # The temporary name has a fixed length: the target's name may be as long as names can be.
    temporary = target.with_name(f".cupyconv-{secrets.token_hex(8)}")
    if mode is None and target.exists():
        mode = stat.S_IMODE(target.stat().st_mode)
    try:
        created = os.O_WRONLY | os.O_CREAT | os.O_EXCL | _BINARY
        with os.fdopen(os.open(temporary, created, 0o666 if mode is None else 0o600), "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        if mode is not None:
            temporary.chmod(mode)
        os.replace(temporary, target)
    finally:
        temporary.unlink(missing_ok=True)


_BINARY = getattr(os, "O_BINARY", 0)  # on Windows


def put(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file, as ``replacing`` does."""
    with replacing(path, mode) as file:
        file.write(content)


def is_replaced(path: Path) -> bool:
    """Return whether ``replacing`` creates a file, instead of writing to a device or pipe."""
    _, stream = _destination(path)
    return stream is None and (path.is_file() or not path.exists())


def unwritable(path: Path) -> str | None:
    """Return why a file cannot be put at ``path``, as far as that can be said before; else None."""
    if path.is_dir():
        return f"{path} is a folder"
    if not is_replaced(path):
        return None if os.access(path, os.W_OK) else f"{path} cannot be written"
    folder = _destination(path)[0].parent
    if not folder.is_dir():
        return f"there is no folder {folder} for {path.name}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def _destination(path: Path) -> tuple[Path, int | None]:
    """Return the target of symbolic links, or the number of this process's stream there."""
    streams = Path(f"/proc/{os.getpid()}/fd")
    target = Path(os.path.abspath(path))
    for _ in range(_LINKS):
        folder = Path(os.path.realpath(target.parent))
        if folder == streams and target.name.isdigit():
            return target, int(target.name)
        if not target.is_symlink():
            return folder / target.name, None
        target = folder / os.readlink(target)
    raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))


# -- keeping to oneself ----------------------------------------------------------------------------


def expanded(text: str) -> Path | None:
    """Return a path with ``~`` expanded as in a shell; None if the home folder is unknown."""
    path = os.path.expanduser(text)
    return None if path.startswith("~") else Path(os.path.abspath(path))


def make_private(folder: Path) -> None:
    """Make a folder and its missing parents, accessible to the user only."""
    for missing in reversed([one for one in (folder, *folder.parents) if not one.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def read_private(path: Path) -> bytes:
    """Return the content of a file in a folder that ``distrusted`` accepts.

    Raises:
        OSError: it cannot be read, or somebody else owns it or may write it.
    """
    if _has_owners():
        found = path.lstat()
        if not stat.S_ISREG(found.st_mode) or _foreign(found) or found.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"others may write {path}")
    return path.read_bytes()


def distrusted(folder: Path) -> tuple[Path, str] | None:
    """Return why another user could replace the content of a folder; None if nobody could.

    Other users can if they own, or may write, a folder or symbolic link on the path; the folder
    itself need not exist yet.  A folder on the way may be writable by all if it is sticky, like
    /tmp.  The system's administrator is trusted.

    Returns:
        The untrusted path and the reason, or None.
    """
    if not _has_owners():
        return None
    at, links = Path(folder.anchor), 0
    rest = list(folder.parts[1:])
    while True:
        found = at.lstat() if os.path.lexists(at) else None
        if found is None:
            return None  # it is to be made, in what was looked at before
        if _foreign(found):
            return at, f"belongs to {_user(found.st_uid)}"
        if stat.S_ISLNK(found.st_mode):
            links += 1
            if links > _LINKS:
                return at, "leads round in a circle"
            pointed = at.parent / os.readlink(at)
            at, rest = Path(pointed.anchor), [*pointed.parts[1:], *rest]
            continue
        shared = bool(found.st_mode & _OTHERS_WRITE)
        if shared and not (rest and found.st_mode & stat.S_ISVTX):
            return at, "can be written by others"
        if not rest:
            return None
        name = rest.pop(0)
        at = at.parent if name == ".." else at / name


def _has_owners() -> bool:
    return hasattr(os, "geteuid")  # not on Windows, where a user's folders are the user's


def _foreign(found: os.stat_result) -> bool:
    """Return whether it belongs neither to this user nor to the administrator."""
    return found.st_uid not in (0, os.geteuid())


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
