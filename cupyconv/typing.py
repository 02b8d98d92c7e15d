"""The types of arguments, for programs that are type-checked.

A function that passes its own arguments on says what they are::

    from cupyconv.typing import Padding, Size

    def halve(x: NDArray[np.float32], padding: Padding = "same") -> NDArray[np.float32]: ...

Option values are literals, so that a type checker finds unknown ones.  When a program runs they are
checked as well, and those of paddings and formats may then be in upper or lower case.
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
