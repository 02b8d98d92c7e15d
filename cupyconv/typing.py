"""Types of arguments, for programs that use a type checker.

Use them in functions that pass their arguments on to cupyconv::

    import numpy as np
    from numpy.typing import NDArray

    from cupyconv.typing import Padding

    def halve(x: NDArray[np.float32], padding: Padding = "same") -> NDArray[np.float32]: ...

Option values are literal types, so a type checker reports unknown values.  The functions also check
option values at run time, where padding modes and formats may be in upper or lower case.
"""

from cupyconv.formats import DataFormat, FilterFormat
from cupyconv.operations import Gradient
from cupyconv.planning import Activation, Impl, Implementation, Precision
from cupyconv.problem import Dtype, DtypeName, Padding, Rules, Size

__all__ = [
    "Activation",
    "DataFormat",
    "Dtype",
    "DtypeName",
    "FilterFormat",
    "Gradient",
    "Impl",
    "Implementation",
    "Padding",
    "Precision",
    "Rules",
    "Size",
]


def __dir__() -> list[str]:
    return sorted(__all__)
