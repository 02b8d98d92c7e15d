"""The documentation: its sources, and the pages that Sphinx builds if it is installed.

Sphinx reports broken links between pages, and pages without a link to them.
"""

from __future__ import annotations

import builtins
import contextlib
import html
import importlib.util
import io
import json
import re
import shlex
import subprocess
import sys
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from importlib import import_module
from operator import attrgetter
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

import cupyconv
from cupyconv.cli import configuration
from cupyconv.cli.configuration import PRESETS, read_file
from cupyconv.cli.main import COMMANDS, main
from cupyconv.cli.main import _report as report_error
from cupyconv.markup import escape
from cupyconv.planning import Device, Request, plan_pass
from cupyconv.planning.families import FAMILIES
from tests import ROOT, browser

FOLDER = ROOT / "notebooks"
PAGES = sorted([*FOLDER.rglob("*.md"), ROOT / "CONTRIBUTING.md"])
PROSE = [*PAGES, ROOT / "README.md", *(ROOT / "tests").rglob("README.md")]
FENCE = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.M | re.S)
"""A Python block, and the ``text`` block directly below it, which shows what the code prints."""

LIBRARIES = ("torch", "dask", "scipy", "jax", "tensorflow", "keras", "onnx")
"""Libraries that the pages import and that may be missing."""

RUN = re.compile(r"^```\{run\} (.*?)\n(?::exit: (\d+)\n)?", re.M)


def named(path: Path) -> str:
    return str(path.relative_to(ROOT))


def load(name: str):
    """Import a module from the folder of the pages, which is no package."""
    spec = importlib.util.spec_from_file_location(name, FOLDER / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses look up the module here
    try:
        spec.loader.exec_module(module)
    finally:
        del sys.modules[name]
    return module


pictures = load("pictures")
links = load("links")
diagrams = load("diagrams")
PROBLEMS = {layer.name: layer.problem() for layer in read_file(PRESETS)}


# -- code, commands, links -------------------------------------------------------------------------


WITH_CODE = [page for page in (*PAGES, ROOT / "README.md") if FENCE.search(page.read_text())]


@pytest.mark.parametrize("page", WITH_CODE, ids=named)
def test_code_blocks_run(monkeypatch, tmp_path, page):
    """The code blocks of a page run with NumPy instead of CuPy, and print what it shows."""
    monkeypatch.chdir(tmp_path)
    blocks = FENCE.findall(page.read_text(encoding="utf-8"))
    for library in LIBRARIES:
        if any(re.search(rf"(?:import|from) (?:cupyconv\.)?{library}\b", b) for b, _ in blocks):
            pytest.importorskip(library)
    monkeypatch.setattr(cupyconv, "workspace_limit", None)
    names = {"__name__": "page"}
    for block, shown in blocks:
        source = block.replace("import cupy as cp", "import numpy as cp")
        with contextlib.redirect_stdout(io.StringIO()) as printed:
            exec(compile(source, page, "exec"), names)
        if shown:
            lines = [line.rstrip() for line in printed.getvalue().splitlines()]
            assert lines == shown.splitlines(), block
    checking = any(shown or re.search(r"^\s*assert ", block, re.M) for block, shown in blocks)
    assert checking or page.name == "README.md", "the page checks nothing"


def test_toml_layers_in_pages_are_valid(tmp_path):
    """The TOML blocks of the pages can be read, and they show every key of a layer."""
    shown, blocks = set(), 0
    for page in PAGES:
        for block in re.findall(
            r"^```toml\n(.*?)^```$", page.read_text(encoding="utf-8"), re.M | re.S
        ):
            path = tmp_path / "layers.toml"
            path.write_text(block)
            shown |= {key for table in tomllib.loads(block)["layer"] for key in table}
            assert [layer.problem() for layer in read_file(path)]
            blocks += 1
    assert blocks
    assert shown == {*configuration._READERS, *configuration._LABELS}


def commands() -> list[tuple[str, int]]:
    """Return the commands whose output the pages show, with their exit codes."""
    found = [match for page in PAGES for match in RUN.findall(page.read_text(encoding="utf-8"))]
    return sorted({(arguments, int(code or 0)) for arguments, code in found})


def test_tutorial_program_writes_the_stored_model(monkeypatch, tmp_path):
    onnx = pytest.importorskip("onnx")
    monkeypatch.chdir(tmp_path)
    ((program, _),) = FENCE.findall((FOLDER / "check-a-model.md").read_text(encoding="utf-8"))
    exec(compile(program, "check-a-model.md", "exec"), {})
    assert onnx.load("net.onnx") == onnx.load(FOLDER / "net.onnx")


@pytest.mark.parametrize(("arguments", "code"), commands())
def test_commands_in_pages_have_the_documented_exit_code(monkeypatch, arguments, code):
    monkeypatch.chdir(FOLDER)
    if ".onnx" in arguments:
        pytest.importorskip("onnx")
    result = CliRunner().invoke(main, shlex.split(arguments))
    assert result.exit_code == code, result.output


def options_of(command: list[str]) -> set[str]:
    """Return the options of the command that begins with these words."""
    if command[:2] != ["python", "-m"]:
        found = main.get_command(
            click.Context(main), command[1] if command[1] in COMMANDS else "explain"
        )
        return {option for one in found.params for option in (*one.opts, *one.secondary_opts)}
    if command[2:4] == ["tests.device", "-m"]:  # runs another program on emulated devices
        return options_of(["python", *command[3:]])
    spec = importlib.util.find_spec(command[2])
    assert spec is not None, f"no module {command[2]}"
    folder = spec.submodule_search_locations
    source = Path(folder[0], "__main__.py") if folder else Path(spec.origin)
    return set(re.findall(r"\"(--[a-z-]+)\"", source.read_text()))


@pytest.mark.parametrize("page", PROSE, ids=named)
def test_commands_in_texts_use_existing_options(page):
    inline = re.findall(r"`((?:cupyconv|python -m) [^`]+)`", page.read_text(encoding="utf-8"))
    for command in map(shlex.split, inline):
        wanted = {word for word in command if word.startswith("--")}
        assert wanted <= options_of(command), " ".join(command)


@pytest.mark.parametrize("page", PROSE, ids=named)
def test_links_have_existing_targets(page):
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.S)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?://", link):
            continue
        place, _, anchor = link.partition("#")
        target = (page.parent / place).resolve() if place else page
        assert target.exists(), f"{link} does not exist"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", target.read_text(encoding="utf-8"), re.M)
            slugs = [re.sub(r"[^\w -]", "", h.lower()).replace(" ", "-") for h in headings]
            assert anchor in slugs, f"{link} has no such heading"


def test_error_table_matches_the_program():
    """The page on errors has each class with its builtin and the exit code that it leads to."""
    page = (FOLDER / "how-to" / "errors.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| `(\w+)` \| `(\w+)` \| (\d+) \|", page, re.M)
    classes = {name for name in cupyconv.__all__ if name.endswith("Error")} - {"CupyconvError"}
    assert {name for name, _, _ in rows} == classes
    for name, builtin, code in rows:
        kind = getattr(cupyconv, name)
        assert kind.__bases__ == (cupyconv.CupyconvError, getattr(builtins, builtin))
        values = {"ConvError": ("rule", "values"), "KernelCompileError": ("text", "log")}
        assert report_error(kind(*values.get(name, ("text",)))) == int(code)
    for error in (MemoryError(), FileNotFoundError(2, "missing", "x.npy")):
        assert report_error(error) == 2


def test_make_targets_in_pages_exist():
    makefile = (ROOT / "Makefile").read_text()
    told = "".join(path.read_text() for path in (*PAGES, ROOT / "README.md"))
    wanted = set(re.findall(r"(?:`|^\$ |, )make ([a-z-]+)", told, re.M))
    assert {"docs", "release", "test"} <= wanted
    assert [word for word in wanted if not re.search(rf"^{word}:", makefile, re.M)] == []


# -- completeness ----------------------------------------------------------------------------------


def test_reference_has_every_public_name():
    text = "".join(path.read_text() for path in (FOLDER / "reference").glob("*.md"))
    modules = set(re.findall(r"automodule:: cupyconv\.(\w+)\n +:members:", text))
    bridges = set(re.findall(r"^```\{bridge\} (\w+)$", text, re.M))
    assert bridges == set(cupyconv._OPTIONAL_MODULES)
    single = re.findall(r"auto(?:function|class|exception|data):: cupyconv\.(\w+)$", text, re.M)
    assert len(single) == len(set(single))
    assert {*single, *modules} == set(cupyconv.__all__)
    # autodoc documents the names in __all__.
    for name in modules | {bridge for bridge in bridges if importlib.util.find_spec(bridge)}:
        assert import_module(f"cupyconv.{name}").__all__


def test_reference_has_every_command():
    text = (FOLDER / "reference" / "command-line.md").read_text()
    assert re.findall(r"^```\{run\} (\w+) --help$", text, re.M) == list(COMMANDS)
    _, table, _ = re.split("<!-- /?commands -->", (ROOT / "README.md").read_text())
    assert re.findall(r"^\| `cupyconv (\w+)` ", table, re.M) == list(COMMANDS)


def test_kernel_families_all_have_a_page():
    families = {name for name, family in FAMILIES.items() if family.on_gpu}
    folder = FOLDER / "contributing" / "kernels"
    assert {path.stem for path in folder.glob("*.md")} == families == set(pictures.EXAMPLES)
    for name in families:
        assert f"```{{kernel}} {name}\n```" in (folder / f"{name}.md").read_text()


# -- summaries and links of the reference ----------------------------------------------------------

REFERENCE = [page for page in PAGES if links.described(page.read_text(encoding="utf-8"))]


@pytest.mark.parametrize("page", REFERENCE, ids=named)
def test_reference_pages_begin_with_a_summary(page):
    """The build fills the directive; the page of types has another table."""
    text = page.read_text(encoding="utf-8")
    names = links.described(text)
    if page.name == "typing.md":
        before, _, _ = text.partition("```")
        assert re.findall(r"^\| \{py:obj\}`\w+ <(.*?)>` \| \S", before, re.M) == names
        return
    assert re.search(r"^```.*$", text, re.M)[0] == "```{summary}"
    table = links.rows(names)
    assert [re.search("<(.*)>", name)[1] for name, _ in table] == names
    for _, purpose in table:
        assert 10 < len(re.sub(r":py:obj:`([^<`]*) <[^`]*>`", r"\1", purpose)) <= 120
        assert "\n" not in purpose


def test_references_to_other_docstrings_become_links():
    """Each ``as for NAME`` in a public docstring names something that the reference describes."""
    phrase = re.compile(r"\b(?:as for|those of) (``[a-z]\w*``|[A-Z][a-z]+[A-Z]\w+)")
    found = 0
    for name in sorted(set(links.targets().values())):
        value = attrgetter(name.removeprefix("cupyconv."))(cupyconv)
        text = " ".join((value.__doc__ or "").split())
        for words in phrase.findall(text):
            found += 1
            target = links.target(words.strip("`"), name)
            assert target is not None, f"{name}: {words}"
    # Without PyTorch, the reference describes nothing of cupyconv.torch.
    assert found > (40 if importlib.util.find_spec("torch") else 30)


# -- pictures of kernels ---------------------------------------------------------------------------


@pytest.mark.parametrize("family", sorted(pictures.EXAMPLES))
def test_pictures_match_the_launches(family):
    for example in pictures.EXAMPLES[family]:
        drawn = pictures.launched(family, example)
        texts = " ".join(
            element.text or ""
            for element in ElementTree.fromstring(drawn.svg).iter()
            if element.tag.endswith("}text")
        )
        planned = plan_pass(
            Request(example.problem, example.pass_, Device.of(example.device), example.precision),
            family,
        )
        if planned.tile is not None:
            assert f"{planned.tile.block_m} x {planned.tile.block_n}" in texts
        for macro, words in (
            ("TILE_P", "{} x"),
            ("STAGES", "{} "),
            ("TILE_COLUMNS", "x {} pixels"),
        ):
            found = re.search(rf"\b{macro}=(\d+)", drawn.facts["macros"])
            if found:
                assert words.format(found[1]) in texts


def shapes_of(svg: str) -> Counter:
    """Return the number of shapes of each class in a picture."""
    return Counter(element.get("class") for element in ElementTree.fromstring(svg).iter())


def test_diagram_of_pairs_matches_the_layer():
    svg = diagrams.pairs(PROBLEMS["multi-channel"])
    shapes = shapes_of(svg)
    assert (shapes["x"], shapes["dy"], shapes["dw"]) == (1, 1, 5 * 5)
    assert shapes["cell"] == 4 + 3 + (4 * 5 - 1) * 25  # four channels of dy are drawn
    assert "100x100 correlated with 96x96 gives 5x5" in svg
    assert "10 x 5 pairs give dw, 10x5x5x5" in svg


@pytest.mark.parametrize("name", ["same-stride", "valid-stride", "valid-dilation"])
def test_diagram_of_windows_matches_the_layer(name):
    problem = PROBLEMS[name]
    axes = [problem.axes[0].of_input(size) for size in (5, 6)]
    shapes = shapes_of(diagrams.windows([problem]))
    assert shapes["window"] == sum(axis.output for axis in axes)
    assert shapes["tap"] == 3 * shapes["window"]
    assert shapes["pad"] == sum(axis.pad_before + axis.pad_after for axis in axes)
    assert shapes["unread"] == sum(axis.unread_inputs for axis in axes)
    assert shapes["x"] == 5 + 6 - shapes["unread"]


COLOURS = """
  addEventListener('load', () => {
    const seen = [...document.querySelectorAll('.paper')].map((p) => getComputedStyle(p).fill);
    const frame = document.querySelector('iframe').contentDocument;
    seen.push(frame.defaultView.getComputedStyle(frame.body).backgroundColor);
    document.body.dataset.seen = seen.join(';');
  });
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light system", "dark system"])
@pytest.mark.parametrize("theme", ["light", "dark", "auto"])
def test_pictures_follow_the_theme(tmp_path, theme, dark):
    """A figure, a kernel's picture, a diagram and an embedded page are checked in a browser."""
    explanation = cupyconv.explain(cupyconv.ConvProblem((1, 1, 5), (1, 1, 3)))
    kernel = pictures.launched("cuda-gather", pictures.EXAMPLES["cuda-gather"][0])
    diagram = diagrams.pairs(PROBLEMS["multi-channel"])
    page = tmp_path / "page.html"
    page.write_text(
        f"<style>{(FOLDER / 'static' / 'site.css').read_text()}</style>"
        f'<body data-theme="{theme}">{explanation.svg()}{kernel.svg}{diagram}'
        f'<iframe srcdoc="{escape(explanation.page())}"></iframe><script>{COLOURS}</script>'
    )
    found = re.search(r'data-seen="([^"]*)"', browser.document(page.as_uri(), dark=dark))
    wanted = dark if theme == "auto" else theme == "dark"
    paper = "rgb(20, 24, 29)" if wanted else "rgb(255, 255, 255)"
    assert found[1].split(";") == [paper] * 4


# -- built pages -----------------------------------------------------------------------------------


FITTING = """
  const faults = [];
  const lines = (block) => block.textContent.replace(/\\n$/, '').split('\\n');
  const rows = (block) => {
    const style = getComputedStyle(block);
    const padding = parseFloat(style.paddingTop) + parseFloat(style.paddingBottom);
    return Math.round((block.clientHeight - padding) / parseFloat(style.lineHeight));
  };
  const inspect = (shown, page, width, columns) => {
    if (shown.documentElement.scrollWidth > width) faults.push(`${page}: wider than ${width}`);
    for (const block of shown.querySelectorAll('pre')) {
      if (!block.offsetParent) continue;
      const printed = block.closest('.narrow, .scrolled');
      const cut = block.scrollWidth > block.clientWidth && !printed;
      const room = columns - (block.closest('dd') ? 4 : 0);  // a description is indented
      const short = Math.max(...lines(block).map((line) => line.length)) <= room;
      const wrapped = short && rows(block) > lines(block).length;
      if (cut || wrapped) faults.push(`${page} at ${width}: ${lines(block)[0]}`);
    }
    for (const table of shown.querySelectorAll('article table')) {
      if (width > 1000 && table.scrollWidth > table.parentElement.clientWidth)
        faults.push(`${page} at ${width}: table ${table.textContent.slice(0, 60)}`);
    }
  };
  const jobs = PAGES.flatMap((page) => [[page, 390, 52], [page, 1280, 102]]);
  const load = (job) => {
    if (job === jobs.length) {
      document.body.dataset.faults = JSON.stringify(faults);
      return;
    }
    const [page, width, columns] = jobs[job];
    const frame = document.createElement('iframe');
    frame.style = `width:${width}px;height:900px;border:0`;
    frame.onload = () => {
      inspect(frame.contentDocument, page, width, columns);
      load(job + 1);
      frame.remove();
    };
    frame.src = page;
    document.body.append(frame);
  };
  load(0);
"""


def misfits(folder: Path, pages: list[Path]) -> list[str]:
    """Return what does not fit on a phone or a desktop: pages, tables, and code.

    Lines of 52 columns fit on a phone, and lines of 102 columns on a desktop.  Wide tables are
    scrolled on a phone, and so are long printed lines.
    """
    if browser.program() is None:
        return []
    names = json.dumps([str(page.relative_to(folder)) for page in pages])
    harness = folder / "fitting.htm"
    harness.write_text(f"<body><script>const PAGES = {names};{FITTING}</script></body>")
    shown = browser.document(
        harness.as_uri(), "--allow-file-access-from-files", until="[data-faults]"
    )
    return json.loads(html.unescape(re.search(r'data-faults="([^"]*)"', shown)[1]))


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    """Build the pages, where a warning is an error, and return their folder."""
    for module in ("sphinx", "myst_nb", "furo", "markdownify"):
        pytest.importorskip(module)
    folder = tmp_path_factory.mktemp("site")
    options = ("-W", "--keep-going", "-q", "-d", str(tmp_path_factory.mktemp("doctrees")))
    subprocess.run([sys.executable, "-m", "sphinx", *options, str(FOLDER), str(folder)], check=True)
    return folder


@pytest.mark.thorough
def test_pages_fit_and_load_nothing(site):
    built = list(site.rglob("*.html"))
    assert len(built) > len(PAGES)
    assert misfits(site, [page for page in built if "gallery" not in page.parts]) == []
    loaded = re.compile(
        r"<(?:script|img|iframe|source)[^>]*\ssrc=\"(https?:)?//[^\"]*\""
        r"|<link[^>]*(?:stylesheet|preload)[^>]*href=\"(https?:)?//"
    )
    assert [page.name for page in built if loaded.search(page.read_text())] == []


@pytest.mark.thorough
def test_reference_describes_every_public_name(site):
    text = "".join(page.read_text() for page in (site / "reference").glob("*.html"))
    described = set(re.findall(r"<dt class=\"sig[^>]* id=\"cupyconv\.([\w.]+)\"", text))
    modules = [name for name in cupyconv.__all__ if cupyconv._MODULES.get(name) == ""]
    modules += [name for name in cupyconv._OPTIONAL_MODULES if importlib.util.find_spec(name)]
    names = {name for name in cupyconv.__all__ if name not in modules}
    for module in modules:
        names |= {f"{module}.{name}" for name in import_module(f"cupyconv.{module}").__all__}
    assert names - described == set()
    for page in REFERENCE:
        shown = (site / "reference" / f"{page.stem}.html").read_text()
        table = re.search(r"<table.*?</table>", shown, re.S)[0]
        for name in links.described(page.read_text(encoding="utf-8")):
            assert f'href="#{name}"' in table, f"{page.name}: {name}"
    assert 'as for <a class="reference internal"' in text


HTML_LINK = re.compile(r"(?:src|href)=\"([^\"#?:]*)(?:\?[^\"#]*)?(?:#([^\"]+))?\"")
MARKDOWN_LINK = re.compile(r"\]\(([^\s()#:]*)(?:#([^\s)]+))?[\s)]")


@pytest.mark.thorough
def test_links_of_the_site_lead_somewhere(site):
    """Addresses of interactive pages have a layer where others have an anchor."""
    anchors = {
        page.resolve(): set(re.findall(r"\bid=\"([^\"]+)\"", page.read_text()))
        for page in site.rglob("*.html")
    }
    twins = {page.with_suffix(".md") for page in anchors if page.with_suffix(".md").exists()}
    for page in (*anchors, *twins):
        text = page.read_text()
        if page in twins:
            found = MARKDOWN_LINK.findall(re.sub(r"```.*?```|`[^`\n]*`", "", text, flags=re.S))
        else:
            found = HTML_LINK.findall(text)
        for place, anchor in found:
            target = (page.parent / place).resolve() if place else page
            assert target.exists(), f"{page.name}: {place}"
            there = anchors.get(target.with_suffix(".html"))
            if anchor and there and "gallery" not in target.parts:
                assert anchor in there, f"{page.name}: {place}#{anchor}"


@pytest.mark.thorough
def test_every_page_is_listed_and_has_a_twin(site):
    names = {str(page.relative_to(FOLDER).with_suffix("")) for page in FOLDER.rglob("*.md")}
    names |= {page.stem for page in FOLDER.glob("*.ipynb")}
    places = re.findall("<loc>(.*)</loc>", (site / "sitemap.xml").read_text())
    base = load("conf").html_baseurl
    assert sorted(places) == sorted(f"{base}{name}.html" for name in names)
    listed = re.findall(r"^- \[.+\]\((.*)\): \S", (site / "llms.txt").read_text(), re.M)
    assert sorted(listed) == sorted(f"{base}{name}.md" for name in names - {"index"})
    twin = (site / "quick-start.md").read_text()
    assert "\n$ cupyconv shapes 1x5x100x100 10x5x5x5\n" in twin
    assert "\n```python\nimport numpy as np\n" in twin
    footer = re.search("<footer.*</footer>", (site / "faq.html").read_text(), re.S)[0]
    assert f"cupyconv {cupyconv.__version__}, license Apache-2.0" in footer


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("word", "page"),
    [
        ("SAME", "reference/glossary.html"),
        ("im2col", "reference/glossary.html"),
        ("Conv2DSlowBackpropInput", "how-to/from-tensorflow.html"),
        ("deconvolution", "how-to/transposed-layers.html"),
    ],
)
def test_search_finds_words_of_the_field(site, word, page):
    address = f"{(site / 'search.html').as_uri()}?q={word}"
    shown = browser.document(address, "--allow-file-access-from-files")
    assert page in re.findall(r'<li class="kind-[^"]*"><a href="([^"#?]*)', shown)
