"""PTX on the CPU: its kernels as C++ over the emulator's runtime.

``syntax`` reads the text, ``table`` knows which opcodes there are and ``arithmetic``,
``data_movement``, ``warps`` and ``asynchronous`` say what each of them does; ``kernels`` writes the
C++ of a kernel, ``counting`` the counters of what it executes, ``nvrtc`` makes PTX of our sources.
"""

from . import arithmetic, asynchronous, data_movement, table, warps
from .syntax import PtxError
from .translation import Translation, translate

__all__ = ["PtxError", "Translation", "arithmetic", "asynchronous", "data_movement", "table",
           "translate", "warps"]  # fmt: skip
