"""Types of arguments, for programs that use a type checker.

Use them in functions that pass their arguments on to cupyconv::

    from cupyconv.typing import Padding, Size

    def halve(x: NDArray[np.float32], padding: Padding = "same") -> NDArray[np.float32]: ...

Option values are literals, so a type checker finds unknown values.  The functions also check option
values at run time; they accept padding modes and formats in upper or lower case.
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
