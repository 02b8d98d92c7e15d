"""Contents of the wheel and the sdist, and use of the wheel outside the checkout."""

import contextlib
import re
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import cupyconv
from tests import ROOT, release


@pytest.fixture(scope="module")
def distributions(tmp_path_factory):
    """Build an sdist and a wheel as for a release, and return their paths."""
    folder = tmp_path_factory.mktemp("dist")
    with contextlib.chdir(folder):
        built = release.build(Path("made"))
    assert all(path.is_relative_to(folder) for path in built)  # absolute paths
    return built


def kernel_files():
    return {
        str(path.relative_to(ROOT))
        for pattern in ("*.cu", "include/*.cuh")
        for path in (ROOT / "cuda").glob(pattern)
    }


def test_wheel_contains_kernels_and_types(distributions):
    names = set(zipfile.ZipFile(distributions[1]).namelist())
    assert {f"cupyconv/{name}" for name in kernel_files()} <= names
    assert "cupyconv/py.typed" in names
    assert not [name for name in names if name.startswith("tests")]
    assert "cupyconv/cuda/__init__.py" not in names, "the file would shadow NVIDIA's cuda package"


def test_description_on_the_package_index_has_no_relative_links(distributions):
    with zipfile.ZipFile(distributions[1]) as wheel:
        (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
        shown = wheel.read(name).decode()
    links = re.findall(r"\]\(([^)]+)\)", shown) + re.findall(r"(?:src|href)=[\"']([^\"']+)", shown)
    code = re.sub(r"```.*?```", "", shown, flags=re.DOTALL)
    links = [link for link in links if link in code]
    assert not [link for link in links if not link.startswith(("https://", "#"))]


def test_sdist_contains_kernels(distributions):
    with tarfile.open(distributions[0]) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert kernel_files() | {"README.md", "LICENSE", "pyproject.toml"} <= names


def test_wheel_works_from_another_folder(distributions, tmp_path):
    site = tmp_path / "site"
    options = ["--quiet", "--no-deps", "--no-compile", "--target", str(site)]
    subprocess.run(
        [sys.executable, "-m", "pip", "install", *options, str(distributions[1])], check=True
    )
    program = (
        "import sys; sys.path.insert(0, sys.argv[1])\n"
        "import cupyconv, numpy\n"
        "from cupyconv.gpu import sources\n"
        "assert cupyconv.__file__.startswith(sys.argv[1]), cupyconv.__file__\n"
        "assert str(sources.directory()).startswith(sys.argv[1])\n"
        "assert dict(sources.load('conv_forward.cu').headers)['maps.cuh']\n"
        "x = numpy.ones((1, 2, 4, 4), 'float32'); w = numpy.ones((3, 2, 3, 3), 'float32')\n"
        "assert (cupyconv.conv_forward(x, w) == 18).all()\n"
        "from cupyconv.cli.main import main\n"
        "sys.argv = ['cupyconv', 'shapes', '--preset', 'multi-channel']; main()\n"
    )
    run = subprocess.run(
        [sys.executable, "-I", "-c", program, str(site)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    assert "1x10x96x96" in run.stdout


def test_wheel_lists_every_package():
    listed = set(
        tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]
    )
    found = {
        ".".join(path.parent.relative_to(ROOT).parts)
        for path in ROOT.glob("cupyconv/**/__init__.py")
    }
    assert found | {"cupyconv.cli", "cupyconv.cuda", "cupyconv.cuda.include"} == listed


def test_release_tries_the_named_pythons_and_extras():
    lowest = int(release.PROJECT["requires-python"].removeprefix(">=3."))
    assert release.pythons()[0] == f"3.{lowest}"
    assert set(release.PROGRAMS) < set(release.EXTRAS)
    for program in release.PROGRAMS.values():
        compile(release.PLAIN + program + release.VERSIONS, "program", "exec")
    assert all((ROOT / name.partition("::")[0]).exists() for name in release.SAMPLE)
    assert release.note().startswith(f"## {cupyconv.__version__} ")


@pytest.mark.parametrize("name", ["CITATION.cff", "SECURITY.md"])
def test_addresses_are_those_of_the_project(name):
    """The owner sets the addresses in pyproject.toml, and this test finds each copy."""
    found = set(re.findall(r"https://[^\s)>\"]*\w/?", (ROOT / name).read_text()))
    assert found <= set(release.PROJECT["urls"].values())


def test_citation_names_the_project():
    citation = (ROOT / "CITATION.cff").read_text()
    for key, value in (
        ("title", release.PROJECT["name"]),
        ("version", cupyconv.__version__),
        ("license", release.PROJECT["license"]),
        ("  - name", release.PROJECT["authors"][0]["name"]),
        ("keywords", f"[{', '.join(release.PROJECT['keywords'])}]"),
    ):
        assert re.search(rf"^{key}: (.*)$", citation, re.M)[1] == value


def test_repository_contains_no_machine_paths():
    files = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.split()
    pattern = re.compile(r"(?<![\w.])/(?:home|root|work)/\w")
    found = []
    for name in files:
        text = (ROOT / name).read_bytes().decode(errors="ignore")
        if name != "tests/pages/test_packaging.py" and pattern.search(text):
            found.append(name)
    assert not found
