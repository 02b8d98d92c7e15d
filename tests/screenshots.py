"""Pictures of the page and the figure, to be looked at:

    python -m tests.screenshots FOLDER

The page of each preset and direction on a phone and on a desktop, in light and in dark, one of them
in the middle of a sum; and the figures.
"""

from __future__ import annotations

import sys
from pathlib import Path

import cupyconv
from cupyconv.cli.configuration import PRESETS, read_file
from tests.browser import photograph

SIZES = {"phone": (390, 2400), "desktop": (1280, 1500)}

# Steps into the sum that the page opens with, so that a product is being multiplied.
_STEPPED = "<script>stepTo(4)</script></body>"


def main(folder: Path) -> None:
    """Write all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for layer in read_file(PRESETS):
        explanation = cupyconv.explain(layer.problem(), title=layer.heading, values=layer.values)
        for tensor in ("dw", "dx", "y"):
            zeros = ",".join("0" * (2 + explanation.problem.spatial_rank))
            page = explanation.page("" if tensor == "dw" else f"{tensor}[{zeros}]")
            for name, (width, height) in SIZES.items():
                for dark in (False, True):
                    target = folder / f"{layer.name}-{tensor}-{name}-{'dark' if dark else 'light'}"
                    shown = page.replace("</body>", _STEPPED) if dark else page
                    photograph(
                        shown, target.with_suffix(".png"), width=width, height=height, dark=dark
                    )
        figure = f'<body style="margin:0">{explanation.svg()}'
        for dark in (False, True):
            target = folder / f"{layer.name}-figure-{'dark' if dark else 'light'}.png"
            photograph(figure, target, width=1280, height=1800, dark=dark)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
