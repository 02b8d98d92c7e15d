"""Rules of rooms: a room imports only lower rooms, and CONTRIBUTING.md maps each to its tests.

A room is a module or a folder of cupyconv/, or the command line."""

from __future__ import annotations

import ast
import functools
import graphlib
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

from tests import ROOT

PACKAGE = ROOT / "cupyconv"
PAGE = ROOT / "notebooks" / "contributing" / "architecture.md"

ROOMS = tuple(re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M))
"""Rooms from the lowest to the highest, as the architecture page lists them."""


def python_files() -> list[Path]:
    """Return the files of the library and the command line, except ``cupyconv/__init__.py``."""
    inside = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return sorted([*inside, *(ROOT / "cli").rglob("*.py")])


def room_of(path: Path) -> str:
    """Return a file's room: a module or a folder of cupyconv/, or cli."""
    if path.is_relative_to(ROOT / "cli"):
        return "cli"
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


@functools.cache
def tree_of(path: Path) -> ast.Module:
    """Return a file's syntax tree."""
    return ast.parse(path.read_text(encoding="utf-8"))


@functools.cache
def imported_modules(path: Path) -> list[tuple[str, int]]:
    """Return the names and lines of all imports in a file; ``from a import b`` is named a.b."""
    found = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(alias.name, node.lineno) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno} is a relative import"
            module = node.module or ""
            found += [(f"{module}.{alias.name}", node.lineno) for alias in node.names]
    return found


def rooms_used(path: Path) -> list[tuple[str, int]]:
    """Return the library's rooms that a file imports from."""
    return [
        (name.split(".")[1], line)
        for name, line in imported_modules(path)
        if name.startswith("cupyconv.") and name.split(".")[1] in ROOMS
    ]


def where(path: Path, line: int) -> str:
    """Return the place of an offence as an editor opens it."""
    return f"{path.relative_to(ROOT)}:{line}"


def test_imports_run_downwards():
    upwards = [
        f"{where(path, line)}: {room_of(path)} imports {room}"
        for path in python_files()
        for room, line in rooms_used(path)
        if ROOMS.index(room) > ROOMS.index(room_of(path))
    ]
    assert upwards == []


def test_rooms_import_rooms_and_not_the_package():
    fronts = [
        f"{where(path, line)}: {name}"
        for path in python_files()
        if room_of(path) not in ("bench", "cli")  # these rooms use the public library
        for name, line in imported_modules(path)
        if name.startswith("cupyconv.") and name.split(".")[1] not in (*ROOMS, "__version__")
    ]
    assert fronts == []


SETTINGS = {"benchmark", "workspace_limit", "__version__"}
"""Settings that users assign to attributes of the package, and its version."""


def test_rooms_read_only_settings_of_the_package():
    others = [
        f"{where(path, node.lineno)}: cupyconv.{node.attr}"
        for path in python_files()
        if room_of(path) not in ("bench", "cli")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "cupyconv"
        and node.attr not in SETTINGS
    ]
    assert others == []


RUNS_PASSES = ("launch", "kernels", "cpu", "gpu", "backends", "measuring", "prepared", "foreign")
"""Modules that plan, prepare and run passes, which the command line leaves to the library."""

NOT_RUNNING = {
    "cpu.choice.has_numba": "shown by env",
    "gpu.compiler": "shown by env",
    "gpu.sources": "shown by env",
    "kernels.cost.duration": "text of a time",
    "kernels.device.CARDS": "names that --device takes",
    "kernels.device.DEVICES": "names that --device takes",
}
"""Names in these modules that the command line uses all the same, with the reason."""


def test_the_command_line_runs_no_passes_itself():
    used = {
        name.removeprefix("cupyconv.")
        for path in python_files()
        if room_of(path) == "cli"
        for name, _ in imported_modules(path)
        if name.startswith("cupyconv.") and name.split(".")[1] in RUNS_PASSES
    }
    assert used == set(NOT_RUNNING)


def test_the_command_line_uses_no_private_names():
    private = [
        f"{where(path, line)}: {name}"
        for path in python_files()
        if room_of(path) == "cli"
        for name, line in imported_modules(path)
        if name.startswith("cupyconv.") and any(one.startswith("_") for one in name.split("."))
    ]
    assert private == []


def test_the_map_has_every_room_and_folder_of_tests_once():
    _, section = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8").split("## Tests by room")
    rows = re.findall(r"^\| `(\w+)` \| (.*) \|$", section.partition("\n## ")[0], re.M)
    rooms = Counter(room for _, last in rows for room in re.findall(r"`(\w+)`", last))
    assert rooms == Counter(ROOMS)
    folders = {path.parent for path in (ROOT / "tests").rglob("test_*.py")}
    assert Counter(folder for folder, _ in rows) == Counter(
        str(folder.relative_to(ROOT / "tests")) for folder in folders
    )


def test_the_rooms_are_those_on_disk():
    inside = {room_of(path) for path in python_files()}
    assert sorted(inside) == sorted(ROOMS)


def modules_used() -> dict[str, set[str]]:
    """Return the library's modules that each of its modules imports at run time, keyed by name."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python_files()
    }
    found = {}
    for name, path in names.items():
        tree = tree_of(path)
        for_types = {
            inner
            for node in ast.walk(tree)
            if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
            for inner in ast.walk(node)
        }
        found[name] = {
            module
            for node in ast.walk(tree)
            if isinstance(node, ast.ImportFrom) and node not in for_types
            for alias in node.names
            for module in (f"{node.module}.{alias.name}", node.module or "")
            if module in names and module != name
        }
    return found


def test_modules_import_in_no_circle():
    graphlib.TopologicalSorter(modules_used()).prepare()  # raises CycleError


def test_only_arrays_imports_cupy():
    users = {
        path
        for path in python_files()
        if any(name.split(".")[0] == "cupy" for name, _ in imported_modules(path))
    }
    assert users == {PACKAGE / "arrays.py"}


def permitted(path: Path) -> set[str]:
    """Return the packages beside the standard library that a file may import."""
    known = {"cupyconv", "numpy", "ml_dtypes", "threadpoolctl", "click", "rich", "cupy", "cuda"}
    known |= {
        "torch": {"torch"},
        "dask": {"dask", "distributed", "zarr"},
        "cli": {"dask"},
    }.get(room_of(path), set())
    if path.name in ("compiled.py", "loops_numba.py", "tiles_numba.py"):  # only with Numba
        known |= {"llvmlite", "numba"}
    return known


def test_packages_are_imported_only_where_permitted():
    strangers = [
        f"{where(path, line)}: {name}"
        for path in python_files()
        for name, line in imported_modules(path)
        if name.split(".")[0] not in permitted(path) | sys.stdlib_module_names
    ]
    assert strangers == []


def test_kernels_and_planning_run_nothing():
    pure = {"errors", "formats", "problem", "launch", "kernels"}
    for path in (PACKAGE / "launch.py", *(PACKAGE / "kernels").rglob("*.py")):
        assert {room for room, _ in rooms_used(path)} <= pure
    for path in (PACKAGE / "planning").rglob("*.py"):
        used = {room for room, _ in rooms_used(path)}
        assert used <= pure | {"cpu", "markup", "planning", "records"}
    for name in ("problem.py", "formats.py"):
        used = {room for room, _ in rooms_used(PACKAGE / name)}
        assert used <= {"errors", "formats", "markup", "remedies"}


def test_the_package_imports_only_the_standard_library():
    tree = tree_of(PACKAGE / "__init__.py")
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in at_once
        for alias in node.names
        if alias.name != "settings"  # settings imports nothing
    ]
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in names)


FIRST = """
import sys, numpy, cupyconv
x, w = numpy.ones((1, 8, 8, 8), "float32"), numpy.ones((8, 8, 3, 3), "float32")
cupyconv.conv_forward(x, w, padding=1)
print(*sys.modules)
"""


def test_first_call_imports_only_what_it_uses():
    """Importing the other modules, and Numba, would take longer than the call."""
    command = [sys.executable, "-c", FIRST]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    modules = found.stdout.split()
    ours = {name.removeprefix("cupyconv.") for name in modules if name.startswith("cupyconv.")}
    kernels = {"calibration", "cost", "device", "family", "limits", "request", "strides"}
    cpu = {"activations", "axis", "blocked", "choice", "correlation", "families", "scratch"}
    assert ours == {
        *("arrays", "backends", "binding", "calls", "errors", "foreign", "formats", "launch"),
        *("log", "operands", "operations", "prepared", "problem", "records", "settings", "signals"),
        *("planning", "planning.families", "planning.plan", "gpu", "gpu.capture", "gpu.driver"),
        *("kernels", *(f"kernels.{name}" for name in kernels)),
        *("cpu", *(f"cpu.{name}" for name in {*cpu, "threads", "views", "windows"})),
    }
    slow = {"concurrent", "difflib", "hashlib", "logging", "numba", "tempfile"}
    assert slow.isdisjoint(modules)


def test_the_kernel_folder_has_no_python():
    # A package called cuda would shadow NVIDIA's namespace of that name and break CuPy.
    assert list((ROOT / "cuda").rglob("*.cu"))
    assert list((ROOT / "cuda").rglob("*.py")) == []
