"""Translation of PTX kernels to C++ on the emulator's runtime.

``syntax`` parses the text.  ``table`` holds the opcodes, which ``arithmetic``, ``data_movement``,
``warps`` and ``asynchronous`` define.  ``kernels`` writes the C++ of a kernel, ``counting`` the
counters of executed instructions, and ``nvrtc`` compiles the library's sources to PTX.
"""

from . import arithmetic, asynchronous, data_movement, table, warps
from .syntax import PtxError
from .translation import Translation, translate

__all__ = ["PtxError", "Translation", "arithmetic", "asynchronous", "data_movement", "table",
           "translate", "warps"]  # fmt: skip
