"""The types of arguments, for programs that are type-checked.

A function that passes its own arguments on says what they are::

    from cupyconv.typing import Padding, Size

    def halve(x: NDArray[np.float32], padding: Padding = "same") -> NDArray[np.float32]: ...

Words are ``Literal``s, so that a type checker finds those that are none.  In a program that runs
they are checked too, by ``cupyconv.ConvError``, and those of paddings and formats in any case.
"""

from cupyconv.formats import DataFormat, FilterFormat
from cupyconv.operations import Gradient
from cupyconv.planning import Activation, Precision
from cupyconv.problem import Dtype, DtypeName, Padding, Rules, Size

__all__ = [
    "Activation",
    "DataFormat",
    "Dtype",
    "DtypeName",
    "FilterFormat",
    "Gradient",
    "Padding",
    "Precision",
    "Rules",
    "Size",
]
