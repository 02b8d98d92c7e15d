"""The picture and the page: well formed, and the page as a real browser shows it."""

from __future__ import annotations

import re
import shutil
import subprocess
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path

import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem
from tests.configurations import random_problems

SAME = ConvProblem((1, 5, 5, 3), (3, 3, 3, 4), stride=2, padding="same", data_format="NHWC")
UNREAD = ConvProblem((1, 6, 6, 3), (3, 3, 3, 4), stride=2, data_format="NHWC")
SIGNAL = ConvProblem((2, 2, 12), (2, 2, 3), stride=3, padding=1)
VOLUME = ConvProblem((1, 2, 8, 7, 40), (2, 2, 3, 2, 3), stride=2, padding="same")
LARGE = ConvProblem((1, 5, 100, 100), (10, 5, 5, 5))

SVG = "{http://www.w3.org/2000/svg}"


def drawing(problem: ConvProblem, title: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(cupyconv.explain(problem, title=title).svg())


def words(root: ElementTree.Element) -> str:
    return " ".join(element.text or "" for element in root.iter(f"{SVG}text"))


# -- the picture -----------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", list(random_problems(25, seed=3)), ids=str)
def test_every_layer_can_be_drawn_inside_its_frame(problem):
    root = drawing(problem, "<&>")
    width, height = float(root.get("width")), float(root.get("height"))
    for cell in root.iter(f"{SVG}rect"):
        assert float(cell.get("x", 0)) + float(cell.get("width")) <= width
        assert float(cell.get("y", 0)) + float(cell.get("height")) <= height
    assert "http" not in ElementTree.tostring(root, encoding="unicode").replace(
        "http://www.w3.org/2000/svg", ""
    )


def test_the_window_of_an_output_and_what_flows_back_are_marked():
    kinds = [cell.get("class") for cell in drawing(SAME).iter(f"{SVG}rect")]
    # Nine inputs and one output; one input, four of dy and four taps.  Green: the pairs of a tap,
    # and one part of dw with the two channels it is made of.
    assert kinds.count("c") == (9 + 9 + 1) + 3
    assert kinds.count("a") == 9 + 1 + 1 + 4 + 4
    # Forward's padding around 5x5, and that of dy spread to 5x5.
    assert kinds.count("pad") == (49 - 25) + (49 - 25) + (49 - 25)
    assert kinds.count("zero") == 25 - 9


def test_inputs_under_no_window_are_hatched_and_said():
    root = drawing(UNREAD)
    assert "Hatched inputs are under no window" in words(root)
    kinds = [cell.get("class") for cell in root.iter(f"{SVG}rect")]
    assert kinds.count("zero") == 11 + (9 - 4)  # of dx, and between the dy's


def test_a_signal_has_a_line_for_every_product():
    root = drawing(SIGNAL)
    pairs = sum(len(SIGNAL.axes[0].outputs_of_tap(tap)) for tap in range(3))
    assert len(list(root.iter(f"{SVG}line"))) == 2 * pairs


def test_rows_and_columns_are_numbered():
    numbers = [e.text for e in drawing(LARGE).iter(f"{SVG}text") if "rule" in e.get("class")]
    assert {"0", "5", "94", "99", "95"} <= set(numbers)
    small = [e.text for e in drawing(SAME).iter(f"{SVG}text") if "rule" in e.get("class")]
    # Of x, w, y; of the spread dy, the flipped w, dx; of x, dy, dw; both ways, not in the padding.
    ends = [5, 3, 3, 3, 3, 5, 5, 3, 3]
    assert sum(map(bool, small)) == 2 * sum(ends)


def test_channels_are_drawn_as_an_outer_product():
    text = words(drawing(LARGE))
    assert "dw[2,1] come from channel 1 of x and channel 2 of dy, and from no other." in text
    assert "10 channels of dy times 5 of x are 50 such parts" in text
    cells = [e.text for e in drawing(LARGE).iter(f"{SVG}text") if "," in (e.text or "")]
    assert {f"{k},{c}" for k in range(10) for c in range(5)} <= set(cells)
    assert "Channels:" not in words(drawing(ConvProblem((1, 1, 9), (1, 1, 3))))
    grouped = words(drawing(ConvProblem((1, 4, 9), (4, 2, 3), groups=2)))
    assert "first of 2 groups" in grouped


def test_a_window_too_wide_for_a_strip_is_said():
    assert "A window spans 101 inputs" in words(drawing(ConvProblem((1, 1, 900), (1, 1, 101))))
    assert "none fits whole" not in words(drawing(ConvProblem((1, 1, 900), (1, 1, 41))))


def test_a_volume_says_what_is_drawn_instead():
    text = words(drawing(VOLUME))
    assert "Three axes, drawn one by one" in text
    assert all(f"Axis {name}" in text for name in "DHW")


def test_a_large_layer_is_drawn_at_both_ends():
    root = drawing(LARGE)
    assert len(list(root.iter(f"{SVG}rect"))) < 1400
    assert "·" in words(root)
    kinds = [cell.get("class") for cell in root.iter(f"{SVG}rect")]
    # No window is cut: that of y, its taps apart; and of dx the dy's and the taps, beside the two.
    assert kinds.count("a") == (25 + 1) + (25 + 25 + 1)
    with pytest.raises(ConvError, match="axis W"):
        cupyconv.explain(ConvProblem((1, 1, 10**6), (1, 1, 3))).svg()


@pytest.mark.parametrize("problem", [SAME, SIGNAL, VOLUME, LARGE, UNREAD], ids=str)
@pytest.mark.parametrize("tensor", ["dx", "dw", "y"])
def test_maps_can_be_drawn(problem, tensor):
    counted = cupyconv.explain(problem).map(tensor)
    root = ElementTree.fromstring(counted.svg())
    assert counted.svg() == counted._repr_svg_()
    assert counted.legend in words(root)
    kinds = [cell.get("class") for cell in root.iter(f"{SVG}rect")]
    if problem is UNREAD and tensor == "dx":
        assert kinds.count("zero") == counted.zeros
    if problem is SAME:
        shown = [element.text for element in root.iter(f"{SVG}text") if element.get("style")]
        expected = counted.array().ravel() // counted.factor
        assert list(map(int, shown)) == expected.tolist()
    assert f"{counted.verdict}." in " ".join(words(root).split())


def test_the_style_of_a_picture_reaches_nothing_else_on_a_page():
    (style,) = drawing(SAME).iter(f"{SVG}style")
    for selectors in re.findall(r"([^{}]+)\{[^{}]*\}", style.text):
        for selector in selectors.split(","):
            assert selector.strip().startswith(".cupyconv-figure "), selector


def test_files_are_written_by_their_name(tmp_path):
    explanation = cupyconv.explain(SAME)
    explanation.save(tmp_path / "layer.svg")
    explanation.save(str(tmp_path / "layer.html"))
    assert (tmp_path / "layer.svg").read_text() == explanation.svg()
    assert (tmp_path / "layer.html").read_text() == explanation.page()
    with pytest.raises(ConvError, match=r"as \.svg"):
        explanation.save(tmp_path / "layer.png")


# -- the page --------------------------------------------------------------------------------------


def test_the_page_is_whole_and_fetches_nothing():
    page = cupyconv.explain(SAME, title="</script><script>{{layer}}").page()
    assert "{{" not in page.replace("{{layer}}", "")
    assert not re.search(r"""(src|href)\s*=|@import|url\((?!#)|fetch\(|https?:""", page)
    assert page.count("<script") == 2
    assert "default-src &#x27;none&#x27;" in page
    assert '<html lang="en">' in page


def test_a_page_too_large_for_a_browser_is_refused():
    with pytest.raises(ConvError, match="axis W"):
        cupyconv.explain(ConvProblem((1, 1, 10**7), (1, 1, 3))).page()


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Opens a page in a headless browser; gives its document after the scripts have run."""
    program = shutil.which("chromium") or shutil.which("chromium-browser")
    if program is None:
        pytest.skip("chromium is not installed")
    folder = tmp_path_factory.mktemp("pages")

    def opened(
        problem: ConvProblem,
        place: str = "",
        script: str = "",
        width: int = 1280,
        dark: bool = False,
    ) -> str:
        page = cupyconv.explain(problem).page()
        path: Path = folder / "page.html"
        path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
        profile = tmp_path_factory.mktemp("profile")
        options = [
            *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
            *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
        ]
        if dark:
            options += ["--force-dark-mode", "--blink-settings=preferredColorScheme=0"]
        options += [f"--user-data-dir={profile}", f"--window-size={width},900", "--dump-dom"]
        run = subprocess.run(
            [program, *options, f"{path.as_uri()}{place}"],
            capture_output=True,
            text=True,
            timeout=600,
        )
        if run.returncode or 'data-ready="true"' not in run.stdout:
            if "<html" not in run.stdout:
                pytest.skip(f"chromium does not start here: {run.stderr[-200:]}")
            raise AssertionError(f"the page's script failed: {run.stdout[-500:]}")
        return run.stdout

    return opened


def told(document: str) -> str:
    return unescape(re.search(r'<p id="told"[^>]*>(.*?)</p>', document, re.DOTALL)[1])


def chosen(document: str, kind: str) -> list[str]:
    """The names of cells with a class."""
    cells = re.findall(
        r'<button[^>]*class="([^"]*)"[^>]*aria-label="([^",]*(?:,[^",]*)*?), ', document
    )
    return [name for classes, name in cells if kind in classes.split()]


def test_an_output_shows_its_window(browse):
    document = browse(SAME, "#y=0,0")
    assert chosen(document, "sel") == ["y[0,0]"]
    hits = chosen(document, "hit")
    assert {name for name in hits if name[0] == "x"} == {"x[0,0]", "x[0,1]", "x[1,0]", "x[1,1]"}
    assert {name for name in hits if name[0] == "w"} == {"w[1,1]", "w[1,2]", "w[2,1]", "w[2,2]"}
    assert told(document) == (
        "y[k,0,0] is the sum of 4 products for each of 3 input channels c: x[c,0,0]·w[k,c,1,1] + "
        "x[c,0,1]·w[k,c,1,2] + x[c,1,0]·w[k,c,2,1] + x[c,1,1]·w[k,c,2,2]. 5 taps of its window lie "
        "in the padding, which is zero."
    )
    assert document.count('class="p hit"') == 5


def test_an_input_shows_where_its_gradient_comes_from(browse):
    document = browse(SAME, "#x=1,1")
    assert told(document).startswith("dx[c,1,1] is the sum of 4 products for each of 4 filters k: ")
    assert {name for name in chosen(document, "hit") if name[0] == "y"} == {
        "y[0,0]",
        "y[0,1]",
        "y[1,0]",
        "y[1,1]",
    }
    zero = browse(UNREAD, "#x=5,0")
    assert told(zero) == (
        "dx[c,5,0] is zero: no window reads x[c,5,0], so it changes nothing in y."
    )
    assert len(chosen(zero, "none")) == 11


def test_a_tap_shows_its_pairs(browse):
    document = browse(LARGE, "#w=0,1")
    assert told(document).startswith(
        "dw[k,c,0,1] is the sum of 9,216 products: dy[k,0,0]·x[c,0,1] + dy[k,0,1]·x[c,0,2] + "
    )
    assert told(document).endswith(
        "… 9,210 more. Channel c of x and channel k of dy alone have a part in it."
    )
    assert 'id="sampled"' in document
    assert "both ends of its long axes are drawn" in document


def test_keyboard_pointer_and_escape(browse):
    script = """
      const log = [];
      const note = () => log.push(document.getElementById('told').textContent.split(' is ')[0]);
      const key = (name) => document.activeElement.dispatchEvent(
        new KeyboardEvent('keydown', { key: name, bubbles: true, cancelable: true }));
      const grids = [...document.querySelectorAll('[role=grid]')];
      log.push(grids.map((g) => g.querySelectorAll('[tabindex="0"]').length).join());
      grids[0].querySelector('[tabindex="0"]').focus(); note();
      key('ArrowRight'); note(); key('ArrowDown'); note(); key('End'); note(); key('Home'); note();
      log.push(grids[0].querySelectorAll('[tabindex="0"]').length);
      const out = grids[2].querySelectorAll('button');
      out[1].dispatchEvent(new PointerEvent('pointerenter', { pointerType: 'mouse' })); note();
      out[2].click(); note(); log.push(location.hash);
      out[1].dispatchEvent(new PointerEvent('pointerenter', { pointerType: 'mouse' })); note();
      key('Escape'); note(); log.push(document.querySelectorAll('.c.sel').length);
      log.push(grids[2].querySelector('button').textContent);
      document.getElementById('heat').click();
      log.push(document.querySelectorAll('.c.warm').length);
      log.push(grids[2].querySelector('button').textContent);
      document.body.dataset.log = log.join(' | ');
    """
    document = browse(SAME, script=script)
    log = unescape(re.search(r'data-log="([^"]*)"', document)[1])
    assert log == (
        "1,1,1 | dx[c,0,0] | dx[c,0,1] | dx[c,1,1] | dx[c,1,4] | dx[c,1,0] | 1 | y[k,0,1] | "
        "y[k,0,2] | #y=0,2 | y[k,0,2] | Nothing | 0 | 4 | 0 | "
    )


@pytest.mark.parametrize("problem", [SIGNAL, VOLUME], ids=["1-D", "3-D"])
def test_other_ranks(browse, problem):
    document = browse(problem, "#x=2")
    volume = problem.spatial_rank == 3
    assert told(document).startswith("Along D, dx[2] has " if volume else "dx[c,2] is the sum of ")
    assert ("along the other axes" in told(document)) == volume
    assert document.count('role="grid"') == 3 * (3 if problem.spatial_rank == 3 else 1)
    assert ('<p class="note">Three axes' in document) == (problem.spatial_rank == 3)


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_nothing_is_wider_than_the_window_and_all_of_it_can_be_read(browse, width, dark):
    # A window cannot be as narrow as a phone, a frame can.
    script = """
      const ratio = (a, b) => {
        const light = (text) => {
          const [r, g, b] = text.match(/[\\d.]+/g).map((n) => n / 255).map(
            (v) => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
          return 0.2126 * r + 0.7152 * g + 0.0722 * b + 0.05;
        };
        const [x, y] = [light(a), light(b)];
        return Math.max(x, y) / Math.min(x, y);
      };
      if (top === window) {
        const frame = document.createElement('iframe');
        frame.style = 'width:WIDTHpx;height:800px;border:0';
        frame.onload = () => {
          const inner = frame.contentWindow, page = inner.document.documentElement;
          const paper = inner.getComputedStyle(inner.document.body).backgroundColor;
          const read = ['h1', '.help', '#told', '.rule', '.c.hit', '.c.sel', 'summary',
            '.cupyconv p'];
          const contrast = read.map((name) => {
            const style = inner.getComputedStyle(inner.document.querySelector(name));
            const clear = style.backgroundColor === 'rgba(0, 0, 0, 0)';
            return ratio(style.color, clear ? paper : style.backgroundColor);
          });
          const cells = [...inner.document.querySelectorAll('.c')];
          const target = Math.min(...cells.map((cell) => cell.getBoundingClientRect().width));
          document.body.dataset.seen = [inner.innerWidth, page.scrollWidth, target,
            Math.min(...contrast).toFixed(1), paper].join(';');
        };
        frame.srcdoc = document.documentElement.outerHTML;
        document.body.append(frame);
      }
    """
    document = browse(LARGE, script=script.replace("WIDTH", str(width)), width=1400, dark=dark)
    found = re.search(r'data-seen="([^"]*)"', document)
    if found is None:
        pytest.skip("this chromium does not load frames in time")
    inner, scrolled, target, contrast, paper = unescape(found[1]).split(";")
    assert int(inner) == width
    assert int(scrolled) <= width
    assert float(target) >= 24  # pixels, which a finger can still hit
    assert float(contrast) >= 4.5
    assert (paper == "rgb(255, 255, 255)") == (not dark)
