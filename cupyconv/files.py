"""Functions that read files of limited size, write files atomically, and check their owners."""

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
"""Largest number of symbolic links that the resolution of a path may follow (Linux's limit)."""

_OTHERS_WRITE = stat.S_IWGRP | stat.S_IWOTH

LARGEST_TEXT = 64 << 20
"""Largest number of bytes of a text, record or kernel that is read, of the start of a model that
shows its kind, and of a model's evaluated constants and copied functions (hand-set)."""

# -- reading ---------------------------------------------------------------------------------------


def read(path: Path, largest: int = LARGEST_TEXT) -> bytes:
    """Return the content of a file.

    Raises:
        OSError: the file cannot be read, or has more than ``largest`` bytes, as a device may have.
    """
    with path.open("rb") as file:
        return read_stream(file, str(path), largest)


def read_stream(file: BinaryIO, name: str, largest: int = LARGEST_TEXT) -> bytes:
    """Return the content of an open file; ``name`` is its name in the error, as for ``read``."""
    content = file.read(largest + 1)
    if len(content) > largest:
        raise OSError(
            errno.EFBIG, f"it has more than {largest:,} bytes, the most that is read", name
        )
    return content


# -- writing ---------------------------------------------------------------------------------------


@contextmanager
def replacing(path: Path, mode: int | None = None) -> Iterator[BinaryIO]:
    """Yield a temporary file to write, which replaces ``path`` when the block ends.

    If the block raises an exception, ``path`` does not change, and the temporary file is deleted.
    If ``path`` is a symbolic link, its target is replaced.  Devices, pipes and streams of this
    process, such as ``/dev/stdout``, are not replaced but written to directly.

    Args:
        path: file to create or to replace.
        mode: permissions of the file, such as 0o600.  By default, an existing file keeps its
            permissions, and a new file gets those that the user's umask leaves.

    Raises:
        OSError: the file cannot be written; the error's ``filename`` is ``path``.
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
    # The temporary name does not contain the target's name, which may have the maximal length.
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


_BINARY = getattr(os, "O_BINARY", 0)  # a flag of Windows


def put(path: Path, content: bytes, mode: int | None = None) -> None:
    """Write a file completely or not at all; the arguments are those of ``replacing``."""
    with replacing(path, mode) as file:
        file.write(content)


def is_replaced(path: Path) -> bool:
    """Return whether ``replacing`` creates or replaces a file at ``path``.

    The result is False for a folder, and for a device, pipe or stream, which is written directly.
    """
    _, stream = _destination(path)
    return stream is None and (path.is_file() or not path.exists())


def unwritable(path: Path) -> str | None:
    """Return the reason why a file cannot be written at ``path``; None if no reason is known."""
    if path.is_dir():
        return f"{path} is a folder"
    if not is_replaced(path):
        return None if os.access(path, os.W_OK) else f"{path} cannot be written"
    folder = _destination(path)[0].parent
    if not folder.is_dir():
        return f"there is no folder {folder} for {path.name}"
    return None if os.access(folder, os.W_OK | os.X_OK) else f"{folder} cannot be written"


def _destination(path: Path) -> tuple[Path, int | None]:
    """Return the file that ``path`` leads to through symbolic links, and its file descriptor.

    The descriptor is None unless the file is an open stream of this process, such as
    ``/dev/stdout``.
    """
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


# -- private folders -------------------------------------------------------------------------------


def expanded(text: str) -> Path | None:
    """Return a path with ``~`` expanded as in a shell; None if the home folder is unknown."""
    path = os.path.expanduser(text)
    return None if path.startswith("~") else Path(os.path.abspath(path))


def make_private(folder: Path) -> None:
    """Create a folder and its missing parents with permissions for the user only (0o700)."""
    for missing in reversed([path for path in (folder, *folder.parents) if not path.exists()]):
        missing.mkdir(mode=0o700, exist_ok=True)


def read_private(path: Path) -> bytes:
    """Return the content of a file that only this user and the administrator can write.

    The caller has checked the folder with ``distrusted``.

    Raises:
        OSError: the file cannot be read, is not a regular file, or another user owns it or may
            write it.
    """
    if _has_owners():
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode) or _foreign(status) or status.st_mode & _OTHERS_WRITE:
            raise PermissionError(f"other users may write {path}")
    return read(path)


def distrusted(folder: Path) -> tuple[Path, str] | None:
    """Return why another user could replace the content of a folder.

    A user who owns or may write a folder or symbolic link on the path could replace the content.
    The folder itself need not exist yet.  A parent folder that all users may write is trusted if it
    is sticky, as /tmp is.  The system's administrator is trusted.

    Returns:
        The untrusted path and the reason; None if no other user could replace the content.
    """
    if not _has_owners():
        return None
    at, links = Path(folder.anchor), 0
    rest = list(folder.parts[1:])
    while True:
        status = at.lstat() if os.path.lexists(at) else None
        if status is None:
            return None  # the folder does not exist yet; its parents were checked above
        if _foreign(status):
            return at, f"belongs to {_user(status.st_uid)}"
        if stat.S_ISLNK(status.st_mode):
            links += 1
            if links > _LINKS:
                return at, "is part of a loop of symbolic links"
            pointed = at.parent / os.readlink(at)
            at, rest = Path(pointed.anchor), [*pointed.parts[1:], *rest]
            continue
        if not stat.S_ISDIR(status.st_mode):
            return None  # a file or device, below which no folder can be
        shared = bool(status.st_mode & _OTHERS_WRITE)
        if shared and not (rest and status.st_mode & stat.S_ISVTX):
            return at, "can be written by other users"
        if not rest:
            return None
        name = rest.pop(0)
        at = at.parent if name == ".." else at / name


def _has_owners() -> bool:
    return hasattr(os, "geteuid")  # missing on Windows, where users' folders are private


def _foreign(status: os.stat_result) -> bool:
    """Return whether a file's owner is neither this user nor the administrator."""
    return status.st_uid not in (0, os.geteuid())


def _user(number: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"
