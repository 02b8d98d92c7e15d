"""Take pictures of the page, the figure, notebooks and the documentation, for visual inspection:

    python -m tests.screenshots FOLDER [--jupyter PYTHON] [--docs build/docs]

The pictures show the page of each preset and pass on a phone and on a desktop, in light and in dark
mode; the dark pages show a step in the middle of a sum.  Other pictures show changed settings, each
step of each story, and the figures.  With a Python that has JupyterLab, nbconvert and cupyconv,
they also show notebooks: trusted and untrusted in JupyterLab, and converted to HTML.  With the
folder of the built documentation, only some of its pages are shown.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import tempfile
import time
from pathlib import Path

import cupyconv
from cupyconv.cli.configuration import PRESETS, read_file
from tests.browser import photograph, run

SIZES = {"phone": (390, 2400), "desktop": (1280, 1500)}

# Steps into the sum that the page opens with, so that a product is shown.
_STEPPED = "<script>stepTo(4)</script></body>"

# Opens the knobs on a phone, too.
_OPENED = "<script>document.getElementById('turn').open = true</script></body>"

TURNED = {
    "grouped": "input=2x8x9x9&filter=8x4x3x3&groups=2&stride=2&dilation=1,2&padding=1:0,2:1",
    "same": "input=1x9x9x3&filter=3x3x3x4&stride=2&padding=same&data_format=NHWC&values=dy",
    "volume": "input=1x2x5x6x7&filter=3x2x3x2x3&padding=1&values=integers&y=0,1,2,3,4",
    "line": "input=1x3x1000&filter=8x3x11&stride=4&dx=0,1,500",
    "too-large": "input=8x64x56x56&filter=256x64x3x3&padding=1",
    "no-fit": "input=1x3x4x4&filter=4x3x5x5&dilation=2",
}
"""Query strings of pages with changed settings, valid and invalid, by name of the picture."""

STORIES = {"channels": 8, "size": 9, "flip": 8, "number": 8}
"""Number of steps of each story."""


def main(folder: Path) -> None:
    """Write all pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    _knobs_and_stories(folder)
    for layer in read_file(PRESETS):
        explanation = cupyconv.explain(layer.problem(), title=layer.heading, values=layer.values)
        for tensor in ("dw", "dx", "y"):
            zeros = ",".join("0" * (2 + explanation.problem.spatial_rank))
            page = explanation.page("" if tensor == "dw" else f"{tensor}[{zeros}]")
            stepped = page.replace("</body>", _STEPPED)
            _pictures(folder, f"{layer.name}-{tensor}", page, stepped)
        figure = f'<body style="margin:0">{explanation.svg()}'
        for dark in (False, True):
            target = folder / f"{layer.name}-figure-{'dark' if dark else 'light'}.png"
            photograph(figure, target, width=1280, height=1800, dark=dark)


def _pictures(folder: Path, name: str, light: str, dark: str, place: str = "") -> None:
    """Write pictures of a page for each size, in light and in dark mode."""
    for size, (width, height) in SIZES.items():
        for mode, page in (("light", light), ("dark", dark)):
            target = folder / f"{name}-{size}-{mode}.png"
            is_dark = mode == "dark"
            photograph(page, target, width=width, height=height, dark=is_dark, place=place)


def _knobs_and_stories(folder: Path) -> None:
    places = {f"knobs-{name}": address for name, address in TURNED.items()}
    for name, count in STORIES.items():
        places |= {f"story-{name}-{step}": f"story={name},{step}" for step in range(1, count + 1)}
    problem = cupyconv.ConvProblem((1, 2, 4, 4), (3, 2, 2, 2))
    page = cupyconv.explain(problem, values="integers").page().replace("</body>", _OPENED)
    for name, place in places.items():
        _pictures(folder, name, page, page, f"#{place}")


_CELLS = (
    "import cupyconv\nproblem = cupyconv.ConvProblem("
    "(1, 5, 5, 3), (3, 3, 3, 4), stride=2, padding='same', data_format='NHWC')\nproblem",
    "cupyconv.plan(problem, 'sm_90a')",
    "cupyconv.explain(problem, values='integers').element('dw[0,0,1,1]')",
    "cupyconv.explain(problem, values='integers')",
)


def notebooks(folder: Path, python: str) -> None:
    """Write pictures of how Jupyter shows the library's objects into a folder."""
    import nbformat

    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "trusted.ipynb"
        cells = [nbformat.v4.new_code_cell(source) for source in _CELLS]
        nbformat.write(nbformat.v4.new_notebook(cells=cells), path)

        def jupyter(*args: str) -> None:
            subprocess.run([python, "-m", *args], cwd=place, check=True, capture_output=True)

        jupyter("nbconvert", "--to", "notebook", "--execute", "--inplace", path.name)
        jupyter("nbconvert", "--to", "html", path.name, "--output", "converted.html")
        # Jupyter does not trust a changed notebook, as if another user had run it.
        other = nbformat.read(path, as_version=4)
        other.cells[0].source += "  # changed"
        nbformat.write(other, Path(place) / "untrusted.ipynb")
        jupyter("jupyter", "trust", path.name)
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        options = [
            "--allow-root",
            "--no-browser",
            f"--port={port}",
            f"--ServerApp.root_dir={place}",
        ]
        options += ["--ServerApp.token=", "--ServerApp.password="]
        server = subprocess.Popen(
            [python, "-m", "jupyterlab", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            for _ in range(100):
                with socket.socket() as waiting:
                    if waiting.connect_ex(("127.0.0.1", port)) == 0:
                        break
                time.sleep(0.3)
            for name in ("trusted", "untrusted"):
                for dark in (False, True):
                    target = folder / f"jupyterlab-{name}-{'dark' if dark else 'light'}.png"
                    address = f"http://127.0.0.1:{port}/lab/tree/{name}.ipynb"
                    run(address, f"--screenshot={target}", width=1400, height=2600, dark=dark)
        finally:
            server.terminate()
            server.wait()
        target = folder / "nbconvert.png"
        page = (Path(place) / "converted.html").as_uri()
        run(page, f"--screenshot={target}", width=1200, height=2600)


PAGES = ("index", "quick-start", "explanation/gradient-shapes", "reference/glossary")
PAGES += ("reference/functions", "02-filter-gradient", "contributing/kernels/cuda-gather")
"""Pages of the documentation to show: the first ones to read, and one of each kind."""


def documentation(folder: Path, built: Path) -> None:
    """Write pictures of pages of the built documentation into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for page in PAGES:
        address = (built / f"{page}.html").resolve().as_uri()
        for name, (width, height) in SIZES.items():
            size = f"width:{width}px;height:{height}px;border:0"
            shown = f'<body style="margin:0"><iframe style="{size}" src="{address}"></iframe>'
            for dark in (False, True):
                target = folder / f"{Path(page).name}-{name}-{'dark' if dark else 'light'}.png"
                photograph(shown, target, width=max(width, 500), height=height, dark=dark)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("folder", type=Path, help="folder to write to")
    parser.add_argument("--jupyter", metavar="PYTHON", help="Python that shows notebooks")
    parser.add_argument("--docs", type=Path, help="folder of the built documentation")
    options = parser.parse_args()
    if options.docs:
        documentation(options.folder, options.docs)
    else:
        main(options.folder)
    if options.jupyter:
        notebooks(options.folder, options.jupyter)
