"""Rules of imports: a room imports only lower rooms, and only one module imports CuPy.

A room is a module or a folder of cupyconv/, or the command line."""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.quick

ROOT = Path(__file__).resolve().parent.parent
PACKAGE = ROOT / "cupyconv"

ROOMS = (
    "errors",
    "records",
    "signals",
    "files",
    "cache_folder",
    "formats",
    "markup",
    "svg",
    "foreign",
    "arrays",
    "remedies",
    "problem",
    "launch",
    "kernels",
    "cpu",
    "planning",
    "gpu",
    "backends",
    "measuring",
    "prepared",
    "operations",
    "warming",
    "typing",
    "checking",
    "raw_ops",
    "torch",
    "onnx",
    "cudnn",
    "dask",
    "explaining",
    "bench",
    "cli",
    "__main__",
)
"""Rooms from the lowest to the highest."""


PAGE = ROOT / "notebooks" / "contributing" / "architecture.md"


def python_files() -> list[Path]:
    """Return the files of the library and the command line, except ``cupyconv/__init__.py``."""
    inside = [path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py"]
    return sorted([*inside, *(ROOT / "cli").rglob("*.py")])


def room_of(path: Path) -> str:
    """Return a file's room: a module or a folder of cupyconv/, or cli."""
    if path.is_relative_to(ROOT / "cli"):
        return "cli"
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def imported_modules(path: Path) -> list[tuple[str, int]]:
    """Return the names and lines of all imports in a file; ``from a import b`` is named a.b."""
    found = []
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node in ast.walk(tree):
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


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_run_downwards(path):
    own = room_of(path)
    assert own in ROOMS, f"{path.name} is in no known room"
    height = ROOMS.index(own)
    upwards = [
        f"line {line}: {own} imports {room}"
        for room, line in rooms_used(path)
        if ROOMS.index(room) > height
    ]
    assert upwards == []


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_rooms_do_not_come_in_by_the_front_door(path):
    if room_of(path) in ("bench", "cli"):
        return  # these rooms use the public library
    ours = [name for name, _ in imported_modules(path) if name.startswith("cupyconv.")]
    assert [name for name in ours if name.split(".")[1] not in (*ROOMS, "__version__")] == []


ON_THE_PACKAGE = {"benchmark", "workspace_limit", "__version__"}
"""Settings that users assign to attributes of the package, and its version."""


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_the_library_goes_to_its_front_door_for_settings_only(path):
    if room_of(path) in ("bench", "cli"):
        return
    wanted = {
        node.attr
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Attribute)
        and isinstance(node.value, ast.Name)
        and node.value.id == "cupyconv"
    }
    assert wanted <= ON_THE_PACKAGE


def test_the_architecture_page_has_these_rooms_in_this_order():
    listed = re.findall(r"^\| `(\w+)` \|", PAGE.read_text(encoding="utf-8"), re.M)
    assert tuple(listed) == ROOMS


def test_every_room_is_there():
    inside = {room_of(path) for path in python_files()}
    assert inside == set(ROOMS)


def modules_used() -> dict[str, set[str]]:
    """Return the library's modules that each of its modules imports at run time, keyed by name."""
    names = {
        ".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in python_files()
    }
    found = {}
    for name, path in names.items():
        tree = ast.parse(path.read_text(encoding="utf-8"))
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


CIRCLES = {frozenset(f"cupyconv.explaining.{name}" for name in ("maps", "scene", "figure"))}
"""Permitted import cycle: ``TermMap.svg`` draws the map with modules that import ``TermMap``."""


def test_no_modules_import_each_other_in_a_circle():
    used, order = modules_used(), []
    left = dict(used)
    while left:
        free = [name for name, others in left.items() if not others & left.keys()]
        if not free:
            break
        order += free
        left = {name: others for name, others in left.items() if name not in free}
    # The remaining modules are in an import cycle, or import a module that is.
    reached = {name: set(others) for name, others in left.items()}
    for _ in left:
        for others in reached.values():
            others |= set().union(*(reached[one] for one in others & reached.keys()))
    circles = {
        frozenset(two for two in left if one in reached[two] and two in reached[one])
        for one in left
    }
    assert {circle for circle in circles if circle} == CIRCLES


def test_the_lowest_room_imports_nothing_of_the_library():
    assert rooms_used(PACKAGE / "errors.py") == []


def test_downward_imports_are_seen_at_all():
    used = {room for room, _ in rooms_used(PACKAGE / "operations.py")}
    assert {"arrays", "backends", "problem", "planning"} <= used


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_only_arrays_imports_cupy(path):
    of_cupy = [line for name, line in imported_modules(path) if name.split(".")[0] == "cupy"]
    assert bool(of_cupy) == (path == PACKAGE / "arrays.py")


FRAMEWORKS = {"torch", "jax", "tensorflow", "onnx", "keras", "dask", "distributed", "zarr"}


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_frameworks_are_imported_in_their_packages_only(path):
    used = {name.split(".")[0] for name, _ in imported_modules(path)} & FRAMEWORKS
    allowed = {
        "torch": {"torch"},
        "dask": {"dask", "distributed", "zarr"},
        "bench": FRAMEWORKS,
        "cli": {"dask"},
    }
    assert used <= allowed.get(room_of(path), set())


@pytest.mark.parametrize("path", python_files(), ids=lambda path: str(path.relative_to(ROOT)))
def test_every_import_is_the_library_a_dependency_or_optional(path):
    known = {"cupyconv", "numpy", "ml_dtypes", "threadpoolctl", "click", "rich", "cupy", "cuda"}
    known |= FRAMEWORKS
    if room_of(path) == "bench":
        known.add("matplotlib")
    if path.name == "loops_numba.py":  # imported only if Numba is installed
        known.add("numba")
    roots = {name.split(".")[0] for name, _ in imported_modules(path)}
    assert roots <= known | sys.stdlib_module_names


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


def test_the_front_door_imports_nothing_when_it_is_opened():
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    at_once = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    names = [
        alias.name if isinstance(node, ast.Import) else str(node.module)
        for node in at_once
        for alias in node.names
    ]
    assert all(name.split(".")[0] in sys.stdlib_module_names for name in names)


def test_the_kernel_folder_is_no_python_package():
    # A package called cuda would shadow NVIDIA's namespace of that name and break CuPy.
    assert list((ROOT / "cuda").rglob("*.cu"))
    assert list((ROOT / "cuda").rglob("*.py")) == []
