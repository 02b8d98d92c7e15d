"""The picture and the page: well formed, and the page as a real browser shows it."""

from __future__ import annotations

import base64
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem
from cupyconv.cli.configuration import PRESETS, read_file
from tests import browser
from tests.configurations import random_problems

SAME = ConvProblem((1, 5, 5, 3), (3, 3, 3, 4), stride=2, padding="same", data_format="NHWC")
UNREAD = ConvProblem((1, 6, 6, 3), (3, 3, 3, 4), stride=2, data_format="NHWC")
SIGNAL = ConvProblem((2, 2, 12), (2, 2, 3), stride=3, padding=1)
VOLUME = ConvProblem((1, 2, 8, 7, 40), (2, 2, 3, 2, 3), stride=2, padding="same")
LARGE = ConvProblem((1, 5, 100, 100), (10, 5, 5, 5))
PADDED = ConvProblem((1, 5, 100, 100), (10, 5, 5, 5), padding=2)

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


def kinds_of(root: ElementTree.Element) -> list[str]:
    return [cell.get("class") for cell in root.iter(f"{SVG}rect")]


def test_what_makes_an_element_is_marked():
    kinds = kinds_of(drawing(SAME))
    # The result: one of each, and the pair of channels.
    assert kinds.count("r") == 3 + 1
    # x under the tap, dy that comes back, x under the window; and the channel of x.
    assert kinds.count("a") == 9 + 4 + 9 + 1
    # All dy, the taps that these meet, all taps; and the channel of dy.
    assert kinds.count("b") == 9 + 4 + 9 + 1
    # Padding of x twice and of the spread dy, in whose window are hatched zeros.
    assert kinds.count("pad") == 3 * (49 - 25)
    assert kinds.count("ap") == 9 - 4
    assert kinds.count("zero") == 25 - 9 - (9 - 4)


def test_cells_hold_the_numbers_and_none_is_blank():
    problem = ConvProblem((1, 2, 4, 4), (3, 2, 2, 2))
    explanation = cupyconv.explain(problem, values="integers")
    root = ElementTree.fromstring(explanation.svg("dx[0,1,2,3]"))
    texts = [e.text for e in root.iter(f"{SVG}text") if "in" in e.get("class").split()]
    cells = [kind for kind in kinds_of(root) if kind != "paper"]
    rulers = sum("rule" in e.get("class") for e in root.iter(f"{SVG}text"))
    assert len(texts) == len(cells) + rulers // 2
    plane = [f"{number:.0f}" for number in explanation.data["dx"][0, 1].ravel()]
    assert any(texts[i : i + 15] == plane[:11] + plane[12:] for i in range(len(texts)))
    assert f"Inverted: dx[0,1,2,3] is the sum of {2} products for each of 3 filters" in words(root)
    assert f"gives {plane[11]}." in words(root)


def test_an_element_far_from_the_border_is_drawn_with_its_window():
    root = ElementTree.fromstring(cupyconv.explain(LARGE).svg("O[0,7,40,50]"))
    assert "Inverted: y[0,7,40,50] is the sum of 25 products" in words(root)
    numbers = [e.text for e in root.iter(f"{SVG}text") if "rule" in e.get("class")]
    assert {"40", "44", "50", "54"} <= set(numbers)


def test_a_signal_has_a_line_for_every_product():
    root = drawing(SIGNAL)
    pairs = sum(len(SIGNAL.axes[0].outputs_of_tap(tap)) for tap in range(3))
    assert len(list(root.iter(f"{SVG}line"))) == 2 * pairs


def test_rows_and_columns_are_numbered():
    numbers = [e.text for e in drawing(LARGE).iter(f"{SVG}text") if "rule" in e.get("class")]
    assert {"0", "5", "94", "99", "95"} <= set(numbers)
    small = [e.text for e in drawing(SAME).iter(f"{SVG}text") if "rule" in e.get("class")]
    # Of x, dy, dw; of the spread dy, the flipped w, dx; of x, w, y; both ways, not in the padding.
    ends = [5, 3, 3, 3, 3, 5, 5, 3, 3]
    assert sum(map(bool, small)) == 2 * sum(ends)


def test_channels_are_drawn_as_an_outer_product():
    text = words(drawing(LARGE))
    assert "dw[2,1] come from channel 1 of x and channel 2 of dy, and from no other." in text
    assert "10 channels of dy times 5 of x are 50 such parts" in text
    cells = [e.text for e in drawing(LARGE).iter(f"{SVG}text") if "," in (e.text or "")]
    assert {f"{k},{c}" for k in range(10) for c in range(5)} <= set(cells)
    assert "Channels:" not in words(drawing(ConvProblem((1, 1, 9), (1, 1, 3))))
    grouped = drawing(ConvProblem((1, 4, 9), (4, 2, 3), groups=2))
    assert "The 2 groups never mix: they are the blocks" in words(grouped)
    # Of four by four pairs, two blocks of two by two meet.
    assert kinds_of(grouped).count("zero") == 16 - 8


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
    # No window is cut: that of y and of dx; the x that a tap reads for the dy that are drawn.
    assert kinds_of(root).count("a") == 25 + 25 + 25 + 1
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


def test_jupyter_shows_the_figure_and_the_text():
    shown = cupyconv.explain(SAME)._repr_html_()
    (image,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', shown)
    assert base64.b64decode(image).decode() == cupyconv.explain(SAME).svg()
    assert "Why is dx 5x5 when dy is 3x3?" in shown
    large = cupyconv.explain(ConvProblem((1, 1, 10**6), (1, 1, 3)), values=None)._repr_html_()
    assert "<img" not in large


def test_the_page_is_shown_where_one_is(monkeypatch):
    explanation, opened = cupyconv.explain(SAME), []
    monkeypatch.setattr("webbrowser.open", lambda address: opened.append(address) or True)
    page = explanation.show("dw[1,0,0,0]")
    written = Path(url2pathname(urlparse(opened[0]).path))
    assert written.read_text() == page.content == explanation.page("dw[1,0,0,0]")
    written.unlink()
    (frame,) = re.findall(r'srcdoc="([^"]*)"', page._repr_html_())
    assert unescape(frame) == page.content
    monkeypatch.setattr("webbrowser.open", lambda address: False)
    monkeypatch.setattr("cupyconv.explaining.page.in_notebook", lambda: True)
    assert explanation.show().content == explanation.page()  # and nothing is opened
    assert repr(page).startswith("<page of")


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


def test_pages_of_the_presets_are_small():
    for layer in read_file(PRESETS):
        page = cupyconv.explain(layer.problem(), title=layer.heading, values=layer.values).page()
        assert len(page.encode()) < 150_000, layer.name


@pytest.fixture(scope="module")
def browse(tmp_path_factory):
    """Opens a page in a headless browser; gives its document after the scripts have run."""
    if browser.program() is None:
        pytest.skip("chromium is not installed")
    folder = tmp_path_factory.mktemp("pages")

    def opened(
        problem: ConvProblem,
        place: str = "",
        script: str = "",
        width: int = 1280,
        dark: bool = False,
        values: str = "normal",
        element: str = "",
    ) -> str:
        page = cupyconv.explain(problem, values=values).page(element)
        path: Path = folder / "page.html"
        path.write_text(page.replace("</body>", f"<script>{script}</script></body>"))
        run = browser.run(f"{path.as_uri()}{place}", "--dump-dom", width=width, dark=dark)
        if run.returncode or 'data-ready="true"' not in run.stdout:
            if "<html" not in run.stdout:
                pytest.skip(f"chromium does not start here: {run.stderr[-200:]}")
            raise AssertionError(f"the page's script failed: {run.stdout[-500:]}")
        return run.stdout

    return opened


def told(document: str) -> str:
    return unescape(re.search(r'<p id="told"[^>]*>(.*?)</p>', document, re.DOTALL)[1])


def logged(document: str) -> list[str]:
    """What a script that was put into the page wrote down."""
    assert 'data-log="' in document, "the script failed"
    return unescape(re.search(r'data-log="([^"]*)"', document)[1]).split(" | ")


def acted(script: str) -> str:
    """A script that writes down what it sees; `log` takes a text, and `wait` milliseconds."""
    return f"""
      (async () => {{
        const seen = [], log = (...what) => seen.push(what.join(' ')), $$ = (s) =>
          [...document.querySelectorAll(s)], text = (id) => document.getElementById(id).textContent,
          wait = (ms) => new Promise((done) => setTimeout(done, ms)),
          press = (id) => document.getElementById(id).click(),
          cell = (name) => $$('.panel button').find((b) =>
            b.getAttribute('aria-label').startsWith(name + ' ')),
          marked = (kind) => $$(kind).map((b) => b.getAttribute('aria-label').split(' ')[0]).join(),
          key = (name) => document.activeElement.dispatchEvent(new KeyboardEvent('keydown',
            {{ key: name, bubbles: true, cancelable: true }}));
        try {{ {script} }} catch (error) {{ log('failed', error.message); }}
        document.body.dataset.log = seen.join(' | ');
      }})();
    """


def test_a_direction_and_a_pair_of_channels_choose_the_planes(browse):
    script = """
      const titles = () => $$('.panel h3').map((h) => h.textContent).join(' ');
      const parts = () => $$('#channels .summed').length + ' ' + $$('#channels .sel').length;
      log(titles()); log(text('pair').split(',')[0]); log(parts());
      $$('#channels button.pair').find((b) => b.textContent === '3,0').click();
      log(titles()); log(text('pair').split(',')[0]); log(location.hash);
      $$('input[value=dx]')[0].click(); log(titles()); log(parts());
      $$('input[value=y]')[0].click(); log(titles()); log(parts());
      log($$('input[name=direction]').map((r) => r.parentNode.textContent));
    """
    assert logged(browse(SAME, script=acted(script))) == [
        "x[1] dy[2] dw[2,1]",
        "Channel 1 of x and channel 2 of dy make dw[2",
        "0 3",  # a channel of x, one of dy, and their part of dw
        "x[0] dy[3] dw[3,0]",
        "Channel 0 of x and channel 3 of dy make dw[3",
        "#dw=3,0,1,1",
        "dy[3] w[3,0], flipped dx[0]",
        "3 3",  # the rest of the column
        "x[0] w[3,0] y[3]",
        "2 3",  # the rest of the row
        "x, dy → dw,dy, w → dx,x, w → y",
    ]


@pytest.mark.parametrize("element", ["dw[2,1,0,2]", "dx[0,1,2,3]", "y[0,2,1,1]"])
def test_products_are_added_one_by_one_to_the_library_s_number(browse, element):
    explanation = cupyconv.explain(SAME)
    found = explanation.element(element)
    script = """
      press('first'); log(text('told')); log(text('sum')); log($$('.panel .now').length);
      press('next'); log(text('sum')); log($$('.panel button.now').length);
      press('next'); press('back'); log(text('place')); log($$('#ledger tr.done').length);
      const slider = document.getElementById('step'); log(slider.max);
      slider.value = 2; slider.dispatchEvent(new Event('input')); log(text('sum'));
      press('last'); log(text('sum')); log(text('told')); log($$('.panel .now').length);
      press('play'); log(text('play')); await wait(30000); log(text('play'), text('place'));
      log($$('#ledger tbody tr').at(-1).lastChild.textContent);
      log(marked('.panel.result .sel'), marked('.panel.first .part').split(',x').length);
    """
    log = logged(browse(SAME, script=acted(script), element=element))
    terms = [
        float(a) * float(b)
        for a, b in zip(*(values.tolist() for values in found.values), strict=True)
    ]
    assert log[0] == f"{element}: nothing is added yet."
    assert log[1] == f"Running sum of {element}: 0"
    assert log[2] == "0"
    running = [float(log[place].rpartition(": ")[2]) for place in (3, 8)]
    assert running == pytest.approx([terms[0], sum(terms[:2])], rel=1e-4)
    assert log[4:8] == ["2", f"1 of {found.count}", "1", str(found.count)]
    given = float(re.search(r"gives (\S+) in float32", log[9])[1])
    total = float(re.search(r"products.*: (\S+)\.$", log[10])[1])
    assert given == pytest.approx(found.computed, rel=1e-5)
    assert total == pytest.approx(given, rel=1e-4)
    assert log[11:14] == ["0", "Pause", f"Play {found.count} of {found.count}"]
    assert float(log[14]) == total
    assert log[15].startswith(element)


def test_integers_are_added_exactly_and_a_channel_follows_the_other(browse):
    problem = ConvProblem((1, 2, 4, 4), (3, 2, 2, 2))
    explanation = cupyconv.explain(problem, values="integers")
    script = """
      for (const tensor of ['dw', 'dx', 'y']) {
        $$(`input[value=${tensor}]`)[0].click();
        for (const button of $$('.panel.result button').slice()) {
          button.click();
          log(button.getAttribute('aria-label'), text('told').match(/: (-?\\d+)\\./)?.[1],
            text('sum').match(/gives (-?\\d+) in/)?.[1]);
        }
      }
      press('first'); for (let i = 0; i < 5; i++) press('next');
      log($$('.panel h3')[0].textContent, $$('#channels button.sel')[0].textContent);
    """
    *cells, last = logged(browse(problem, script=acted(script), values="integers"))
    assert len(cells) == 4 + 16 + 9
    for cell in cells:
        name, _, shown, total, given = cell.split(" ")
        expected = f"{explanation.element(name).computed:.0f}"
        assert (shown, total, given) == (expected, expected, expected), cell
    assert last == "x[1] 2,1"  # four products of channel 0 of x, and then channel 1


def test_terms_that_are_not_drawn_are_counted_and_added(browse):
    explanation = cupyconv.explain(LARGE)
    script = "log(text('place')); log(text('told')); log(text('sum')); log(marked('.c.sel'));"
    log = logged(browse(LARGE, "#dw=3,1,0,1", acted(script)))
    assert log[0] == "25 of 25, and 9,191 not drawn"
    computed = explanation.element("dw[3,1,0,1]").computed
    assert log[1].startswith("dw[3,1,0,1] is the sum of 9,216 products: ")
    assert float(log[1].rpartition(": ")[2][:-1]) == pytest.approx(computed, rel=1e-4)
    assert float(log[2].split()[2]) == pytest.approx(computed, rel=1e-5)
    assert log[3] == "dw[3,1,0,1]"


def test_what_no_window_reads_is_said_to_be_zero(browse):
    assert told(browse(UNREAD, "#dx=0,1,5,0")) == (
        "dx[0,1,5,0] is zero: no window reads this number of x, so it changes nothing in y."
    )


def test_counts_are_a_layer_of_their_own_and_no_cell_is_blank(browse):
    script = """
      const blank = () => $$('.panel [role=gridcell]').filter((c) => !c.textContent).length;
      const shown = () => $$('.panel.result button').map((b) => b.textContent).join();
      log(blank()); const values = shown(); press('counts');
      log($$('.panel h3')[2].textContent); log(shown()); log(blank());
      log($$('.panel.result button')[0].getAttribute('aria-label'));
      log($$('.panel.first button')[0].textContent.includes('.'));
      press('counts'); log(shown() === values);
    """
    assert logged(browse(SAME, script=acted(script))) == [
        "0",
        "dw[2,1]: counts of products",
        "4,6,4,6,9,6,4,6,4",
        "0",
        "dw[2,1,0,0] 4 products",
        "true",
        "true",
    ]


def test_keyboard_pointer_and_escape(browse):
    script = """
      const grids = $$('[role=grid]'), at = () => document.activeElement.getAttribute('aria-label');
      log(grids.map((g) => g.querySelectorAll('[tabindex="0"]').length).join());
      grids[0].querySelector('[tabindex="0"]').focus(); log(at());
      key('ArrowRight'); log(at()); key('Home'); log(at()); key('ArrowDown'); log(at());
      document.activeElement.click(); log(text('pair').split(' make ')[0]);
      const result = $$('.panel.result [role=grid]')[0];
      result.querySelector('[tabindex="0"]').focus(); key('ArrowUp'); key('End');
      log(at().split(' ')[0]); document.activeElement.click(); log(location.hash);
      log(result.querySelectorAll('[tabindex="0"]').length);
      const tap = cell('dw[3,0,2,0]');
      tap.dispatchEvent(new PointerEvent('pointerenter', { pointerType: 'mouse' }));
      log(marked('.panel.result .sel'));
      result.dispatchEvent(new PointerEvent('pointerleave', { pointerType: 'mouse' }));
      log(marked('.panel.result .sel'));
      tap.dispatchEvent(new PointerEvent('pointerenter', { pointerType: 'touch' }));
      log(marked('.panel.result .sel')); tap.click(); log(marked('.panel.result .sel'));
      const part = $$('.panel.first .part')[2]; part.click(); log(text('place'));
      log(part.matches('.now')); key('Escape'); log(text('place'));
    """
    assert logged(browse(SAME, script=acted(script))) == [
        "1,1,1,1",
        "dw[2,1]",
        "dw[2,2]",
        "dw[2,0]",
        "dw[3,0]",
        "Channel 0 of x and channel 3 of dy",
        "dw[3,0,0,2]",
        "#dw=3,0,0,2",
        "1",
        "dw[3,0,2,0]",
        "dw[3,0,0,2]",
        "dw[3,0,0,2]",
        "dw[3,0,2,0]",
        "3 of 4",
        "true",
        "4 of 4",
    ]


def test_groups_are_blocks_of_the_grid(browse):
    depthwise = ConvProblem((1, 3, 5, 5), (6, 1, 3, 3), groups=3)
    script = """
      log($$('#channels button.pair').map((b) => b.textContent));
      log($$('#channels .apart').length);
      log(text('blocks')); $$('#channels button.pair')[5].click();
      log($$('.panel h3').map((h) => h.textContent).join(' ')); log(text('pair').split(',')[0]);
      log(text('told').split(' is ')[0]);
    """
    assert logged(browse(depthwise, script=acted(script))) == [
        "0,0,1,0,2,0,3,0,4,0,5,0",
        "12",
        "3 groups, the blocks of the grid, never meet.",
        "x[2] dy[5] dw[5,0]",
        "Channel 2 of x and channel 5 of dy make dw[5",
        "dw[5,0,1,1]",
    ]


@pytest.mark.parametrize("problem", [SIGNAL, VOLUME], ids=["1-D", "3-D"])
def test_other_ranks(browse, problem):
    script = """
      $$('input[value=dx]')[0].click(); log($$('[role=grid]').length);
      log($$('.panel h3').map((h) => h.textContent).join(', ')); log(text('told').split(' is ')[0]);
      log($$('.panel [role=gridcell]').filter((c) => !c.textContent).length);
      $$('.slices button').at(-1)?.click(); log(text('told').split(' is ')[0]);
    """
    log = logged(browse(problem, script=acted(script)))
    assert log[0] == "4"
    assert log[3] == "0"
    if problem is VOLUME:
        assert log[1].endswith("dx[1] at d = 2")
        assert log[4].startswith("dx[0,1,7,")


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
          const read = ['h1', '#rule', '#told', '.rule', '.first .part', '.second .part', '.c.sel',
            '.pad', '#play', '.pair.sel', 'fieldset :checked + span', 'summary', '.cupyconv p'];
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
    document = browse(PADDED, script=script.replace("WIDTH", str(width)), width=1400, dark=dark)
    found = re.search(r'data-seen="([^"]*)"', document)
    if found is None:
        pytest.skip("this chromium does not load frames in time")
    inner, scrolled, target, contrast, paper = unescape(found[1]).split(";")
    assert int(inner) == width
    assert int(scrolled) <= width
    assert float(target) >= 24  # pixels, which a finger can still hit
    assert float(contrast) >= 4.5
    assert (paper == "rgb(255, 255, 255)") == (not dark)


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem((1, 2, 4, 4), (3, 2, 2, 2), dtype="complex64"),
        ConvProblem((8, 64, 400, 400), (64, 64, 3, 3)),
        ConvProblem((1, 1, 1, 2, 2), (1, 1, 3, 1, 1), padding=(1, 0, 0)),
    ],
    ids=["complex", "too many to draw", "a slice of padding"],
)
def test_what_is_not_known_is_no_number(browse, problem):
    document = browse(
        problem, element="dw[0,0,0,0]" if problem.spatial_rank == 2 else "dw[0,0,0,0,0]"
    )
    text = document[document.index("<body") :]
    assert "NaN" not in re.sub(r"<script.*?</script>", "", text, flags=re.S)
