"""Read ONNX files up to the largest size of protobuf, and name files of other kinds."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import BinaryIO

from cupyconv.errors import ConvError
from cupyconv.files import LARGEST_TEXT
from cupyconv.problem import bytes_text

MOST_BYTES = (1 << 31) - 1
"""Largest number of bytes of a model file (the limit of protobuf)."""

_RULE = "a model must be a complete ONNX file"
_FROM_PYTORCH = "Export the model from PyTorch with torch.onnx.export"
_UNPACK = "Unpack it first"
_GIVE = "Give the path of an .onnx file"

_ZIP = rb"PK\x03\x04"

_KINDS = (
    (rb"\Z", "is empty", "Download it or export it again"),
    (rb"version https://git-lfs", "is a Git LFS pointer, without the content", "Run git lfs pull"),
    (rb"\s*<(?i:!doctype html|html)", "is an HTML page", "Download the file itself"),
    (_ZIP, "is a ZIP archive", _UNPACK),
    (rb"\x80[\x02-\x05]", "is a Python pickle, such as an old PyTorch checkpoint", _FROM_PYTORCH),
    (rb"\x1f\x8b", "is compressed with gzip", _UNPACK),
    (rb"BZh\d", "is compressed with bzip2", _UNPACK),
    (rb"\xfd7zXZ\0", "is compressed with xz", _UNPACK),
    (rb"\x28\xb5\x2f\xfd", "is compressed with zstd", _UNPACK),
    (rb".{257}ustar", "is a tar archive", _UNPACK),
    (
        rb".{4}TFL3",
        "is a TensorFlow Lite model",
        "Convert it with python -m tf2onnx.convert --tflite FILE --output model.onnx",
    ),
    (
        rb".{4}ORTM",
        "is in the ORT format of ONNX Runtime",
        "Use the .onnx file from which it was made",
    ),
    (
        rb"\x08\x01\x12.*\x22\x05serve",
        "is a TensorFlow SavedModel",
        "Convert its folder with python -m tf2onnx.convert --saved-model FOLDER --output "
        "model.onnx",
    ),
    (
        rb"\n.{1,500}?\x12(\x0bPlaceholder|\x05Const)",
        "is a TensorFlow graph",
        "Convert it with tf2onnx",
    ),
    (rb".{5}\0{3}\{", "is a safetensors file, which has weights but no graph", _GIVE),
    (rb"GGUF", "is a GGUF file, which has weights but no graph", _GIVE),
    (rb"\x89HDF\r\n", "is an HDF5 file, such as a Keras model", "Convert it with tf2onnx"),
    (rb"\x93NUMPY", "is a NumPy array", _GIVE),
    (rb"\s*[{\[]\s*[]}\[{\"\d]", "is JSON text", _GIVE),
    (rb"\s*<\?xml", "is XML text", _GIVE),
    (rb"[\t\n\r -~]{16,}", "is a text file", _GIVE),
)
"""Patterns of the start of a file, with the kind of the file and the way to an ONNX file."""

_PYTORCH_FIELD = b"FB"
"""Field with which PyTorch aligns the tensors in its ZIP archives, after a member's name."""


def read_content(path: str | Path, file: BinaryIO | None = None) -> bytes:
    """Return the content of a model file.

    Args:
        path: path of the file, for the message if ``file`` is passed.
        file: the file, if it is open already.

    Raises:
        ConvError: the file is larger than MOST_BYTES.
        OSError: the file cannot be read.
    """
    if file is None:
        with Path(path).open("rb") as opened:
            return read_content(path, opened)
    size = _size(file)
    if size > MOST_BYTES:
        raise other_kind(path, file.read(LARGEST_TEXT)) or too_large(path, bytes_text(size))
    if size:
        return file.read()
    parts, total = [], 0  # a pipe, which may be endless
    while total <= MOST_BYTES and (part := file.read(LARGEST_TEXT)):
        parts.append(part)
        total += len(part)
    if total > MOST_BYTES:
        raise other_kind(path, parts[0]) or too_large(path, "more")
    return b"".join(parts)


def _size(file: BinaryIO) -> int:
    """Return the size of a file; 0 if it is unknown, as for a pipe."""
    try:
        return os.fstat(file.fileno()).st_size
    except (OSError, ValueError):  # a stream in memory
        return 0


def too_large(path: str | Path, size: str) -> ConvError:
    """Return an error for a model of this size, which is more than MOST_BYTES."""
    return ConvError(
        f"a model file must have at most {bytes_text(MOST_BYTES)}, the limit of protobuf",
        f"{path} has {size}",
        "Store the weights as external data",
    )


def other_kind(path: str | Path, content: bytes) -> ConvError | None:
    """Return an error that names the kind of a file that is not ONNX; None for an unknown kind."""
    head = content[:LARGEST_TEXT].removeprefix(b"\xef\xbb\xbf")  # the mark of UTF-8
    for pattern, what, remedy in _KINDS:
        if re.match(pattern, head, re.DOTALL):
            name_end = 30 + int.from_bytes(head[26:28], "little")
            if pattern == _ZIP and head[name_end:].startswith(_PYTORCH_FIELD):
                what, remedy = "is a PyTorch file", _FROM_PYTORCH
            return ConvError(_RULE, f"{path} {what}", remedy)
    return None


def damaged(path: str | Path, what: str) -> ConvError:
    """Return an error for a file that has the format of ONNX but is damaged."""
    return ConvError(_RULE, f"{path}: {what}", "Export it again, or check the path")
