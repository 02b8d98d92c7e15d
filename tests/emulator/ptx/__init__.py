"""Translation of PTX kernels to C++ on the emulator's runtime.

``syntax`` parses the text.  ``table`` holds the opcodes, which ``arithmetic``, ``data_movement``,
``warps`` and ``asynchronous`` define.  ``kernels`` writes the C++ of a kernel, and ``nvrtc``
compiles the library's sources to PTX.
"""

from . import arithmetic, asynchronous, data_movement, table, warps
from .syntax import PtxError
from .translation import translate

__all__ = ["PtxError", "arithmetic", "asynchronous", "data_movement", "table", "translate",
           "warps"]  # fmt: skip
