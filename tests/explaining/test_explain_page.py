"""The figure and the page of an explanation: the figure's SVG, and the page in a browser."""

from __future__ import annotations

import base64
import json
import random
import re
import xml.etree.ElementTree as ElementTree
from html import unescape
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import url2pathname

import numpy as np
import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem
from cupyconv.cli.configuration import PRESETS, read_file
from cupyconv.explaining import scene
from cupyconv.explaining.page import Page
from cupyconv.explaining.terms import extents, names
from tests import browser
from tests.browser import acted, logged
from tests.configurations import random_problems

pytestmark = pytest.mark.costly  # each case opens a page

SAME = ConvProblem((1, 5, 5, 3), (3, 3, 3, 4), stride=2, padding="same", data_format="NHWC")
UNREAD = ConvProblem((1, 6, 6, 3), (3, 3, 3, 4), stride=2, data_format="NHWC")
SIGNAL = ConvProblem((2, 2, 12), (2, 2, 3), stride=3, padding=1)
VOLUME = ConvProblem((1, 2, 8, 7, 40), (2, 2, 3, 2, 3), stride=2, padding="same")
LARGE = ConvProblem((1, 5, 100, 100), (10, 5, 5, 5))
PADDED = ConvProblem((1, 5, 100, 100), (10, 5, 5, 5), padding=2)
IN_PART = LARGE.replace(dtype="float64")  # a page computes all numbers of small float32 layers

SVG = "{http://www.w3.org/2000/svg}"


def drawing(problem: ConvProblem, title: str = "") -> ElementTree.Element:
    return ElementTree.fromstring(cupyconv.explain(problem, title=title).svg())


def words(root: ElementTree.Element) -> str:
    return " ".join(element.text or "" for element in root.iter(f"{SVG}text"))


# -- the figure ------------------------------------------------------------------------------------


@pytest.mark.parametrize("problem", list(random_problems(25, seed=3)), ids=str)
def test_figures_fit_their_frame(problem):
    root = drawing(problem, "<&>")
    width, height = float(root.get("width")), float(root.get("height"))
    for cell in root.iter(f"{SVG}rect"):
        assert float(cell.get("x", 0)) + float(cell.get("width")) <= width
        assert float(cell.get("y", 0)) + float(cell.get("height")) <= height
    assert "http" not in ElementTree.tostring(root, encoding="unicode").replace(
        "http://www.w3.org/2000/svg", ""
    )


def rulers(root: ElementTree.Element) -> list[str | None]:
    """Return the numbers beside the rows and above the columns."""
    return [e.text for e in root.iter(f"{SVG}text") if "rule" in e.get("class")]


def kinds_of(root: ElementTree.Element) -> list[str]:
    return [cell.get("class") for cell in root.iter(f"{SVG}rect")]


def test_figure_marks_the_terms_of_an_element():
    kinds = kinds_of(drawing(SAME))
    # One element of each result, and the pair of channels.
    assert kinds.count("r") == 3 + 1
    # First operands of dw, dx and y: x at the tap, dy that reaches dx, x in the window.  The
    # channel of x is marked too.
    assert kinds.count("a") == 9 + 4 + 9 + 1
    # Second operands of dw, dx and y: all of dy, the taps that meet it, all taps.  The channel of
    # dy is marked too.
    assert kinds.count("b") == 9 + 4 + 9 + 1
    # Padding of x is drawn twice, and of the spread dy once; its window contains hatched zeros.
    assert kinds.count("pad") == 3 * (49 - 25)
    assert kinds.count("ap") == 9 - 4
    assert kinds.count("zero") == 25 - 9 - (9 - 4)


def test_cells_show_numbers_and_only_padding_and_zeros_are_blank():
    problem = ConvProblem((1, 2, 4, 4), (3, 2, 2, 2))
    explanation = cupyconv.explain(problem, values="integers")
    root = ElementTree.fromstring(explanation.svg("dx[0,1,2,3]"))
    texts = [e.text for e in root.iter(f"{SVG}text") if "in" in e.get("class").split()]
    cells = [kind for kind in kinds_of(root) if kind not in ("paper", "pad", "zero", "ap")]
    assert len(texts) == len(cells) + len(rulers(root)) // 2
    plane = [f"{number:.0f}" for number in explanation.data["dx"][0, 1].ravel()]
    assert any(texts[i : i + 15] == plane[:11] + plane[12:] for i in range(len(texts)))
    said = f"dx[0,1,2,3] (inverted colours) is the sum of {2} products for each of 3 filters"
    assert said in words(root)
    assert f"gives {plane[11]}." in words(root)


def test_inner_element_is_drawn_with_its_window():
    root = ElementTree.fromstring(cupyconv.explain(LARGE).svg("O[0,7,40,50]"))
    assert "y[0,7,40,50] (inverted colours) is the sum of 25 products" in words(root)
    assert {"40", "44", "50", "54"} <= set(rulers(root))


def test_one_dimensional_figure_has_a_line_per_product():
    root = drawing(SIGNAL)
    pairs = sum(len(SIGNAL.axes[0].outputs_of_tap(tap)) for tap in range(3))
    assert len(list(root.iter(f"{SVG}line"))) == 2 * pairs


def test_rows_and_columns_are_numbered():
    assert {"0", "5", "94", "99", "95"} <= set(rulers(drawing(LARGE)))
    # Extents of (x, dy, dw), (spread dy, flipped w, dx) and (x, w, y), without padding.
    ends = [5, 3, 3, 3, 3, 5, 5, 3, 3]
    assert sum(map(bool, rulers(drawing(SAME)))) == 2 * sum(ends)


def test_channels_are_drawn_as_an_outer_product():
    text = words(drawing(LARGE))
    assert (
        "dw[5,2] has 5x5 values, which come only from channel 2 of x and channel 5 of dy." in text
    )
    assert "10 channels of dy times 5 channels of x give 50 slices" in text
    cells = [e.text for e in drawing(LARGE).iter(f"{SVG}text") if "," in (e.text or "")]
    assert {f"{k},{c}" for k in range(10) for c in range(5)} <= set(cells)
    assert "Channels:" not in words(drawing(ConvProblem((1, 1, 9), (1, 1, 3))))
    grouped = drawing(ConvProblem((1, 4, 9), (4, 2, 3), groups=2))
    assert "The 2 groups are separate blocks" in words(grouped)
    # Only two blocks of 2 x 2 of the 4 x 4 pairs are combined.
    assert kinds_of(grouped).count("zero") == 16 - 8


def test_window_too_wide_to_draw_is_reported():
    assert "A window spans 101 inputs" in words(drawing(ConvProblem((1, 1, 900), (1, 1, 101))))
    assert "too wide to draw" not in words(drawing(ConvProblem((1, 1, 900), (1, 1, 41))))


def test_volume_is_drawn_axis_by_axis():
    text = words(drawing(VOLUME))
    assert "The three axes are drawn separately" in text
    assert all(f"Axis {name}" in text for name in "DHW")


def test_large_layer_is_drawn_at_both_ends():
    root = drawing(LARGE)
    assert len(list(root.iter(f"{SVG}rect"))) < 1400
    assert "…" in words(root)
    # The windows of y and dx are complete, and so is the x that a tap reads for the dy shown.
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
    assert ("Drawn: rows 0–14, 86–99 of 100 (71 hidden)" in words(root)) == (
        problem is LARGE and tensor == "dx"
    )
    assert f"{counted.verdict}." in " ".join(words(root).split())


def test_figure_style_applies_only_to_the_figure():
    (style,) = drawing(SAME).iter(f"{SVG}style")
    for selectors in re.findall(r"([^{}]+)\{[^{}]*\}", style.text):
        for selector in selectors.split(","):
            assert re.match(r"\.cupyconv-figure[ :]", selector.strip()), selector


def test_saved_format_follows_the_file_name(tmp_path):
    explanation = cupyconv.explain(SAME)
    explanation.save(tmp_path / "layer.svg")
    explanation.save(str(tmp_path / "layer.html"))
    assert (tmp_path / "layer.svg").read_text() == explanation.svg()
    assert (tmp_path / "layer.html").read_text() == explanation.page()
    with pytest.raises(ConvError, match=r"in \.svg"):
        explanation.save(tmp_path / "layer.png")


def test_jupyter_shows_the_figure_and_the_text():
    shown = cupyconv.explain(SAME)._repr_html_()
    (image,) = re.findall(r'src="data:image/svg\+xml;base64,([^"]+)"', shown)
    assert base64.b64decode(image).decode() == cupyconv.explain(SAME).svg()
    assert "Why is dx 5x5 when dy is 3x3?" in shown
    large = cupyconv.explain(ConvProblem((1, 1, 10**6), (1, 1, 3)), values=None)._repr_html_()
    assert "<img" not in large


def test_page_opens_in_a_browser_or_notebook(monkeypatch):
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
    assert explanation.show().content == explanation.page()  # opens no browser
    assert repr(page).startswith("<page of")


# -- the page --------------------------------------------------------------------------------------


def test_page_is_complete_and_loads_nothing():
    page = cupyconv.explain(SAME, title="</script><script>{{layer}}").page()
    assert "{{" not in page.replace("{{layer}}", "")
    assert not re.search(r"""(src|href)\s*=|@import|url\((?!#)|fetch\(|https?:""", page)
    assert page.count("<script") == 2
    script = page.rpartition('"use strict";\n')[2].partition("\n\nstart();")[0]
    assert len(script) > 10_000
    assert not re.search(r" // |^//|^ |^$", script, re.M), "comments and indentation are left out"
    assert "default-src &#x27;none&#x27;" in page
    assert '<html lang="en">' in page


def test_page_too_large_for_a_browser_is_rejected():
    with pytest.raises(ConvError, match="axis W"):
        cupyconv.explain(ConvProblem((1, 1, 10**5), (1, 1, 3), padding=1)).page()


@pytest.mark.parametrize(
    "problem",
    [
        ConvProblem((8, 64, 56, 56), (256, 64, 3, 3)),
        ConvProblem((1, 64, 28, 28), (64, 64, 3, 3), padding=1),
        ConvProblem((1, 3, 224, 224), (64, 3, 7, 7), stride=2, padding=3),
        ConvProblem((8, 64, 56, 56), (128, 64, 3, 3), stride=2, padding="same"),
        ConvProblem((1, 256, 14, 14), (256, 256, 3, 3), padding=1),
        ConvProblem((2, 32, 28, 28), (64, 32, 3, 3), dtype="float64"),
        ConvProblem((1, 64, 16, 32, 32), (64, 64, 3, 3, 3), padding=1),
        ConvProblem((2, 3, 16, 112, 112), (64, 3, 3, 7, 7), stride=(1, 2, 2), padding=(1, 3, 3)),
        ConvProblem((8, 16, 24, 24, 24), (16, 16, 3, 3, 3), stride=2, padding="same"),
        ConvProblem((1, 32, 20, 20, 20), (32, 32, 5, 5, 5), padding=2, dtype="float16"),
        ConvProblem((1, 16, 40, 40, 40), (16, 16, 7, 7, 7), padding=3),
        ConvProblem((1, 1, 60, 60, 60), (1, 1, 24, 24, 24), dtype="float64"),
        ConvProblem((1, 2, 50, 50, 50), (2, 2, 5, 5, 5), dilation=5, dtype="float64"),
        ConvProblem((1, 4, 30, 30, 30), (4, 4, 20, 20, 20), padding=10, dtype="float64"),
        ConvProblem((1, 48, 30, 20, 12), (12, 8, 1, 4, 1), stride=3, padding="same", groups=6),
        ConvProblem((1, 64, 24, 24), (64, 64, 11, 11), padding=5, dtype="float16"),
        *(layer.problem() for layer in read_file(PRESETS)),
    ],
    ids=str,
)
def test_pages_of_common_layers_are_small(problem):
    assert len(cupyconv.explain(problem).page().encode()) < 200_000


def test_boolean_arrays_are_drawn():
    x = np.eye(6, dtype=bool)[None, None]
    assert "page" in cupyconv.explain(ConvProblem((1, 1, 6, 6), (1, 1, 2, 2)), x=x).page()


def test_direction_and_channels_choose_the_planes(browse):
    script = """
      const titles = () => $$('.panel h3').map((h) => h.textContent).join(' ');
      const parts = () => $$('#channels .summed').length + ' ' + $$('#channels .sel').length;
      log(titles()); log(text('pair').split('.')[0]); log(parts());
      $$('#channels button.pair').find((b) => b.textContent === '3,0').click();
      log(titles()); log(text('pair').split('.')[0]); log(location.hash);
      direct('dx'); log(titles()); log(parts());
      direct('y'); log(titles()); log(parts());
      log($$('input[name=direction]').map((r) => r.parentNode.textContent));
    """
    assert logged(browse(SAME, "#dw=2,1,1,1", acted(script))) == [
        "x[1] dy[2] dw[2,1]",
        "dw[2,1] depends on channel 1 of x and channel 2 of dy only",
        "0 3",  # a channel of x, a channel of dy, and their slice of dw
        "x[0] dy[3] dw[3,0]",
        "dw[3,0] depends on channel 0 of x and channel 3 of dy only",
        "#dw=3,0,1,1",
        "dy[3] w[3,0], flipped dx[0], the sum over 4 filters",
        "3 3",  # the other filters of the column
        "x[0] w[3,0] y[3], the sum over 3 channels",
        "2 3",  # the other channels of the row
        "x, dy → dw,dy, w → dx,x, w → y",
    ]


@pytest.mark.parametrize("element", ["dw[2,1,0,2]", "dx[0,1,2,3]", "y[0,2,1,1]"])
def test_steps_add_products_up_to_the_librarys_result(browse, element):
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
    assert log[0] == f"{element}: no product is added yet."
    assert log[1] == f"Running sum of {element}: 0"
    assert log[2] == "0"
    running = [float(log[place].rpartition(": ")[2]) for place in (3, 8)]
    assert running == pytest.approx([terms[0], sum(terms[:2])], rel=1e-4)
    assert log[4:8] == ["2", f"step 1 of {found.count}", "1", str(found.count)]
    given = float(re.search(r"gives (\S+) in float32", log[9])[1])
    total = float(re.search(r"products.*: (\S+)\.$", log[10])[1])
    assert given == pytest.approx(found.computed, rel=1e-5)
    assert total == pytest.approx(given, rel=1e-4)
    assert log[11:14] == ["0", "Pause", f"Play step {found.count} of {found.count}"]
    assert float(log[14]) == total
    assert log[15].startswith(element)


def test_integer_products_sum_exactly(browse):
    problem = ConvProblem((1, 2, 4, 4), (3, 2, 2, 2))
    explanation = cupyconv.explain(problem, values="integers")
    script = """
      for (const tensor of ['dw', 'dx', 'y']) {
        direct(tensor);
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
    assert last == "x[1] 1,1"  # the fifth product is the first one of channel 1


def test_terms_not_drawn_are_counted_and_added(browse):
    explanation = cupyconv.explain(LARGE)
    script = "log(text('place')); log(text('told')); log(text('sum')); log(marked('.c.sel'));"
    log = logged(browse(LARGE, "#dw=3,1,0,1", acted(script)))
    assert log[0] == "step 25 of 25 (9,191 products not shown)"
    computed = explanation.element("dw[3,1,0,1]").computed
    assert log[1].startswith("dw[3,1,0,1] is the sum of 9,216 products: ")
    assert float(log[1].rpartition(": ")[2][:-1]) == pytest.approx(computed, rel=1e-4)
    assert float(log[2].split()[2]) == pytest.approx(computed, rel=1e-5)
    assert log[3] == "dw[3,1,0,1]"


def test_unread_input_is_explained_as_zero(browse):
    assert logged(browse(UNREAD, "#dx=0,1,5,0", acted("log(text('told'));"))) == [
        "dx[0,1,5,0] is zero: no window reads this element of x, so it does not affect y."
    ]


def test_counts_button_shows_product_counts(browse):
    script = """
      const blank = () => $$('.panel .c').filter((c) => !c.textContent).length;
      const shown = () => $$('.panel.result button').map((b) => b.textContent).join();
      log(blank()); const values = shown(); press('counts');
      log($$('.panel h3')[2].textContent); log(shown()); log(blank());
      log($$('.panel.result button')[0].getAttribute('aria-label'));
      log($$('.panel.first button')[0].textContent.includes('.'));
      press('counts'); log(shown() === values);
    """
    assert logged(browse(SAME, "#dw=2,1,1,1", acted(script))) == [
        "0",
        "dw[2,1]: counts of products",
        "4,6,4,6,9,6,4,6,4",
        "0",
        "dw[2,1,0,0] 4 products",
        "true",
        "true",
    ]


def test_keyboard_and_pointer_select_elements(browse):
    script = """
      const grids = $$('[role=grid]'), at = () => document.activeElement.getAttribute('aria-label');
      log(grids.map((g) => g.querySelectorAll('[tabindex="0"]').length).join());
      grids[0].querySelector('[tabindex="0"]').focus(); log(at());
      key('ArrowRight'); log(at()); key('Home'); log(at()); key('ArrowDown'); log(at());
      document.activeElement.click(); log(text('pair').split('.')[0]);
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
    assert logged(browse(SAME, "#dw=2,1,1,1", acted(script))) == [
        "1,1,1,1",
        "dw[2,1]",
        "dw[2,2]",
        "dw[2,0]",
        "dw[3,0]",
        "dw[3,0] depends on channel 0 of x and channel 3 of dy only",
        "dw[3,0,0,2]",
        "#dw=3,0,0,2",
        "1",
        "dw[3,0,2,0]",
        "dw[3,0,0,2]",
        "dw[3,0,0,2]",
        "dw[3,0,2,0]",
        "step 3 of 4",
        "true",
        "step 4 of 4",
    ]


def test_groups_are_drawn_as_blocks(browse):
    depthwise = ConvProblem((1, 3, 5, 5), (6, 1, 3, 3), groups=3)
    script = """
      log($$('#channels button.pair').map((b) => b.textContent));
      log($$('#channels .apart').length);
      log(text('blocks')); $$('#channels button.pair')[5].click();
      log($$('.panel h3').map((h) => h.textContent).join(' ')); log(text('pair').split('.')[0]);
      log(text('told').split(' is ')[0]);
    """
    assert logged(browse(depthwise, script=acted(script))) == [
        "0,0,1,0,2,0,3,0,4,0,5,0",
        "12",
        "The 3 groups are separate blocks of the grid.",
        "x[2] dy[5] dw[5,0]",
        "dw[5,0] depends on channel 2 of x and channel 5 of dy only",
        "dw[5,0,1,1]",
    ]


@pytest.mark.parametrize("problem", [SIGNAL, VOLUME], ids=["1-D", "3-D"])
def test_page_supports_one_and_three_axes(browse, problem):
    script = """
      direct('dx'); log($$('[role=grid]').length);
      log($$('.panel h3').map((h) => h.textContent).join(', ')); log(text('told').split(' is ')[0]);
      log($$('.panel .c').filter((c) => !c.textContent).length);
      $$('.slices button').at(-1)?.click(); log(text('told').split(' is ')[0]);
    """
    log = logged(browse(problem, script=acted(script)))
    assert log[0] == "4"
    assert log[3] == "0"
    if problem is VOLUME:
        assert log[1].endswith("dx[1] at d = 2, the sum over 2 filters")
        assert log[4].startswith("dx[0,1,7,")


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 700, 1280])
def test_page_fits_the_window_with_enough_contrast(browse, width, dark):
    # A frame can be as narrow as a phone; a window cannot.
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
          for (const part of inner.document.querySelectorAll('details')) part.open = true;
          const paper = inner.getComputedStyle(inner.document.body).backgroundColor;
          const read = ['h1', '#rule', '#told', '.rule', '.first .part', '.second .part', '.c.sel',
            '.pad', '#play', '.pair.sel', 'fieldset :checked + span', 'summary', '.cupyconv p',
            '.shape', '.shape small', '.dial input', '.dial button', '.choice select',
            '#front button', 'figcaption', '#check'];
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
    assert float(target) >= 24  # pixels: large enough for a finger
    assert float(contrast) >= 4.5
    assert (paper == "rgb(255, 255, 255)") == (not dark)


def test_running_sum_after_an_unknown_product_is_unknown(browse):
    """An unknown product precedes known products."""
    script = """
      const rows = () => $$('#ledger tbody tr').map((row) => row.lastChild.textContent);
      location.hash = '#dw=3,0,4,4'; await wait(100);
      location.hash = '#dy=0,3,40,50'; await wait(100);
      log(rows().includes('?'), rows().includes('NaN'));
    """
    assert logged(browse(IN_PART, script=acted(script))) == ["true false"]


@pytest.mark.parametrize(
    ("problem", "cuts"),
    [
        (IN_PART, {"Drawn in part: h 0–4, 99 of 100; w 0–4, 99 of 100", ""}),
        (LARGE, {""}),
        (SAME, {""}),
    ],
    ids=["large", "large, computed by the page", "small"],
)
def test_partial_thumbnails_are_labelled(browse, problem, cuts):
    script = "log([...new Set($$('canvas').map((one) => one.title))].sort().join(';;'));"
    titles = set(logged(browse(problem, script=acted(script)))[0].split(";;"))
    assert {bool(title) for title in titles} == {bool(cut) for cut in cuts}
    for title in filter(None, titles):
        assert re.fullmatch(r"Drawn in part: [hpw] .* of \d+ .*; [wq] .* of \d+ .*", title), title


# -- correctness of what is drawn ------------------------------------------------------------------

TENSORS = {"x": "dw", "w": "y", "dy": "dw", "dw": "dw", "dx": "dx", "y": "y"}
"""Direction that a link to an element opens, keyed by the element's tensor."""


def cut_problems(count: int, seed: int) -> list[ConvProblem]:
    """Return random layers of 1 to 3 axes, some with axes or channels that are drawn in part."""
    draw, found = random.Random(seed), []
    while len(found) < count:
        rank = (1, 2, 3, 2)[len(found) % 4]
        most = (400, 70, 22)[rank - 1]
        groups = draw.choice((1, 1, 2, 13))
        channels, filters = (draw.choice((1, 2, 3, 14)) for _ in range(2))
        spatial = [draw.randint(1, most) for _ in range(rank)]
        taps = [draw.randint(1, draw.choice((3, 5, 14))) for _ in range(rank)]
        try:
            problem = ConvProblem(
                (draw.randint(1, 2), groups * channels, *spatial),
                (groups * filters, channels, *taps),
                stride=tuple(draw.randint(1, 4) for _ in range(rank)),
                dilation=tuple(draw.choice((1, 1, 2, 9)) for _ in range(rank)),
                padding=draw.choice(("same", "valid", tuple(draw.randint(0, 9) for _ in taps))),
                groups=groups,
            )
        except ConvError:
            continue
        if problem.flops < 4e8:
            found.append(problem)
    return found


_SEEN = """
  const seen_ = () => ({
    direction: $$('input[name=direction]:checked')[0].value, told: text('told'), sum: text('sum'),
    missing: text('missing'), place: text('place'), focus: document.activeElement.ariaLabel,
    notice: document.getElementById('notice').hidden ? '' : text('notice'), cut: text('cut'),
    pairs: $$('#channels button.pair').map((b) => [+b.dataset.k, +b.dataset.c]),
    channelGaps: $$('#channels .gap').length,
    panels: $$('.panel').map((panel) => ({
      cells: [...panel.querySelectorAll('.c')].map((b) => [b.ariaLabel, b.textContent]),
      cut: panel.querySelector('.cut').textContent,
      marked: [...panel.querySelectorAll('.sel,.looked')].map((b) => b.ariaLabel.split(' ')[0]),
      gaps: [...panel.querySelectorAll('[role=row]')].map((line) =>
        [...line.querySelectorAll('[role=gridcell]')].map((c) => +c.matches('.gap'))),
      slices: [...panel.querySelectorAll('.slices button')].map((b) => b.textContent),
    })),
  });
"""


def indices(label: str) -> tuple[str, tuple[int, ...]]:
    tensor, inside = re.match(r"(\w+)\[([\d,]+)\]", label).groups()
    return tensor, tuple(map(int, inside.split(",")))


def runs(text: str) -> dict[str, tuple[set[int], int]]:
    """Return positions and size for each letter of a line: ``h 0–4, 99 of 100 (94 hidden)``."""
    found = {}
    for line in filter(None, re.split(r"\n|; ", text)):
        letter, numbers, size, hidden = re.fullmatch(
            r"(.+?) ((?:[\d–]+, )*[\d–]+) of ([\d,]+) \(([\d,]+) hidden\)", line
        ).groups()
        shown = set()
        for run in numbers.split(", "):
            first, _, last = run.partition("–")
            shown |= set(range(int(first), int(last or first) + 1))
        found[letter] = shown, int(size.replace(",", ""))
        assert int(hidden.replace(",", "")) == found[letter][1] - len(shown)
    return found


def check_drawing(explanation: cupyconv.Explanation, seen: dict) -> None:
    """Require that positions, gaps, ranges and numbers on a page match the tensors."""
    problem = explanation.problem
    filters, channels = ({pair[i] for pair in seen["pairs"]} for i in range(2))
    shown = runs(seen["cut"].removeprefix("Drawn: ").removesuffix("."))
    for drawn, size, word in ((filters, problem.K, "k of"), (channels, problem.C, "c of")):
        noted = [entry for letter, entry in shown.items() if letter.startswith(word)]
        if noted:
            assert seen["channelGaps"]
            assert noted[0][1] == size
            assert drawn <= noted[0][0] < set(range(size))
        else:
            assert problem.groups > 1 or drawn == set(range(size))
    unknown = False
    for panel in seen["panels"]:
        cells = [(*indices(label), label, text) for label, text in panel["cells"]]
        tensor = cells[0][0]
        order = problem.filter_axes if tensor[-1] == "w" else problem.data_axes
        numbers = np.asarray(explanation.data[tensor]).transpose(order)
        exact = numbers
        if tensor in ("dw", "dx", "y"):  # cells have the library's numbers, or the page's own sums
            exact = explanation.data.compute(tensor, "float64").transpose(order)
        noted = runs(panel["cut"])
        rank = problem.spatial_rank
        for axis, letter in enumerate(names(problem, tensor)[2:]):
            size = numbers.shape[2 + axis]
            drawn = {index[2 + axis] for _, index, _, _ in cells}
            if rank == 3 and axis == 0:
                assert len(drawn) == 1
                drawn = {int(text) for text in panel["slices"] if text != "…"}
                assert ("…" in panel["slices"]) >= (len(drawn) < size)
            elif len(drawn) < size:
                gaps = np.array(panel["gaps"])
                assert gaps.all(axis=1 if axis == rank - 2 else 0).any(), (tensor, letter)
            assert {min(drawn), max(drawn)} == {0, size - 1}
            assert noted.get(letter, (drawn, size)) == (drawn, size)
            assert (letter in noted) == (len(drawn) < size)
        for _, index, label, text in cells:
            value = label.partition(" = ")[2]
            if value:
                assert float(value) in (
                    pytest.approx(float(numbers[index]), rel=1e-5),
                    pytest.approx(float(exact[index]), rel=1e-5),
                ), label
            else:
                assert label.endswith("has no value on this page")
                assert text == "?"
                unknown = True
    assert not unknown or "--element" in seen["missing"]


@pytest.mark.parametrize("problem", cut_problems(8, seed=5), ids=str)
def test_page_cells_match_the_tensors(browse, problem):
    draw = random.Random(str(problem))
    explanation = cupyconv.explain(problem)
    wanted = [
        (tensor, tuple(draw.randrange(size) for size in extents(problem, tensor)))
        for tensor in (*TENSORS, *TENSORS)
    ]
    links = [f"#{tensor}={','.join(map(str, index))}" for tensor, index in wanted]
    script = f"""
      {_SEEN} const all = [];
      for (const tensor of ['dw', 'dx', 'y']) {{
        direct(tensor); all.push(seen_());
      }}
      for (const link of {json.dumps(links)}) {{
        location.hash = link; await wait(30); all.push(seen_());
      }}
      log(JSON.stringify(all));
    """
    seen = json.loads(" | ".join(logged(browse(problem, script=acted(script)))))
    assert [one["direction"] for one in seen[:3]] == ["dw", "dx", "y"]
    for one in seen:
        check_drawing(explanation, one)
    for (tensor, index), one in zip(wanted, seen[3:], strict=True):
        name = f"{tensor}[{','.join(map(str, index))}]"
        assert one["notice"] == ""
        assert name in [mark for panel in one["panels"] for mark in panel["marked"]], name
        if tensor not in ("dw", "dx", "y"):
            assert one["focus"].startswith(f"{name} "), name
            continue
        assert one["direction"] == tensor
        element = explanation.element(name)
        shown, rest = re.fullmatch(
            r"step \d+ of (\d+)(?: \(([\d,]+) products? not shown\))?", one["place"]
        ).groups()
        assert int(shown) + int((rest or "0").replace(",", "")) == element.count
        if tensor != "dw" and all(
            a.filter <= 11 and a.effective_filter <= 24 for a in problem.axes
        ):
            summed = set(element.contracted)
            if tensor == "y":
                own = problem.C // problem.groups
                first = index[1] // (problem.K // problem.groups) * own
                summed = set(range(first, first + own))
            summed &= {pair[tensor == "y"] for pair in one["pairs"]}
            along = [len(axis.first) for axis in element.axes]
            assert int(shown) == np.prod(along) * len(summed), "a window is cut"
        given = re.search(r"gives (\S+) in", one["sum"])
        summed_here = re.fullmatch(
            r"The page computes (\S+) in float64\. In Python: .*", one["sum"]
        )
        if given:
            assert float(given[1]) == pytest.approx(element.computed, rel=1e-5)
        elif summed_here:
            assert float(summed_here[1]) == pytest.approx(element.sum, rel=1e-5, abs=1e-9)
        else:
            assert f"--element '{name}'" in one["missing"]


@pytest.mark.parametrize("problem", cut_problems(24, seed=9), ids=str)
def test_partial_planes_of_a_figure_have_gaps_and_ranges(problem):
    explanation = cupyconv.explain(problem)
    text = words(drawing(problem))
    for direction in scene.scene(explanation.problem, explanation.data).directions.values():
        for tensor, plane in zip(direction.tensors, direction.planes, strict=True):
            letters, sizes = names(problem, tensor)[2:], extents(problem, tensor)[2:]
            for letter, places, size in zip(letters, plane, sizes, strict=True):
                drawn = {at for at in places if at is not None and at >= 0}
                assert {0, size - 1} <= drawn <= set(range(size))
                if len(drawn) < size:
                    assert None in places
                    noted = re.findall(rf"\b{letter} [\d–, ]+ of {size:,} \([\d,]+ hidden\)", text)
                    assert (drawn, size) in [runs(note)[letter] for note in noted]


@pytest.mark.thorough
def test_channels_around_the_chosen_pair_are_drawn(browse):
    """The page and the figure draw the neighbours of the pair, and say what they hide."""
    problem = ConvProblem((1, 64, 4, 4), (256, 64, 3, 3))
    script = f"{_SEEN} log(JSON.stringify(seen_().pairs)); log(text('cut')); log(marked('.c.sel'));"
    cut = "k of dy and dw 0–1, 99–101, 254–255 of 256 (249 hidden)"
    for place, element in (("#dw=100,30,1,1", ""), ("", "dw[100,30,1,1]")):
        pairs, said, chosen = logged(browse(problem, place, acted(script), element=element))
        assert {(k, c) for k in (99, 100, 101) for c in (29, 30, 31)} <= set(
            map(tuple, json.loads(pairs))
        )
        assert cut in said
        assert chosen == "dw[100,30,1,1]"
    figure = ElementTree.fromstring(cupyconv.explain(problem).svg("dw[100,30,1,1]"))
    assert "k 0–1, 99–101, 254–255 of 256 (249 hidden)" in words(figure)


@pytest.mark.thorough
def test_arrow_keys_reach_every_element(browse):
    """Arrow keys move to the end of partly drawn axes, in every plane and in the channel grid."""
    problem = ConvProblem((1, 5, 40, 30), (40, 5, 5, 5), padding=1)
    script = """
      const walk = async (grid, way, most) => {
        const found = [];
        for (let i = 0; i < most; i++) {
          found.push(document.activeElement.ariaLabel.match(/\\[(.*)\\]/)[1]);
          key(way); await wait(1);
        }
        log(grid, way, found.join(' '));
      };
      for (const [tensor, index] of [['dx', 2], ['dx', 0], ['dw', 0], ['dw', 1], ['y', 2]]) {
        direct(tensor);
        const panel = () => $$('.panel')[index];
        panel().querySelector('.c').focus();
        await walk(tensor + index, 'ArrowRight', 45); await walk(tensor + index, 'ArrowDown', 45);
      }
      $$('#channels button.pair')[0].focus(); await walk('channels', 'ArrowDown', 45);
    """
    walks = [line.split(" ", 2) for line in logged(browse(problem, script=acted(script)))]
    assert len(walks) == 11
    ends = {"dx2": (40, 30), "dx0": (38, 28), "dw0": (40, 30), "dw1": (38, 28), "y2": (38, 28)}
    for grid, way, walked in walks:
        places = [tuple(map(int, name.split(","))) for name in walked.split(" ")]
        if grid == "channels":
            assert [place[0] for place in places] == [min(i, 39) for i in range(45)]
            continue
        axis = -1 if way == "ArrowRight" else -2
        last = ends[grid][axis] - 1
        assert [place[axis] for place in places] == [min(i, last) for i in range(45)], (grid, way)


@pytest.mark.parametrize(
    ("problem", "kept", "reason"),
    [
        (ConvProblem((8, 64, 56, 56), (256, 64, 3, 3)), {}, "--large"),
        (ConvProblem((8, 64, 400, 400), (64, 64, 3, 3)), {}, "--large"),
        (ConvProblem((1, 2, 4, 4), (3, 2, 2, 2), dtype="complex64"), {}, "--element"),
        (SAME, {"values": None}, "values='normal'"),
        (
            ConvProblem((1, 1, 1, 2, 2), (1, 1, 3, 1, 1), padding=(1, 0, 0), dtype="complex64"),
            *({}, "--element"),
        ),
    ],
    ids=["long to compute", "many numbers", "complex", "left out", "a slice of padding"],
)
def test_missing_values_are_explained(browse, problem, kept, reason):
    explanation = cupyconv.explain(problem, **kept)
    assert reason in words(ElementTree.fromstring(explanation.svg()))
    script = f"""
      {_SEEN}
      for (const tensor of ['dw', 'dx', 'y']) {{
        direct(tensor); log(JSON.stringify(seen_()));
      }}
    """
    for line in logged(browse(problem, script=acted(script), **kept)):
        seen = json.loads(line)
        assert reason in seen["missing"]
        assert "the reason is below" in seen["sum"]
        assert all(text for panel in seen["panels"] for _, text in panel["cells"])
        assert "NaN" not in line


@pytest.mark.parametrize("layer", read_file(PRESETS), ids=lambda layer: layer.name)
def test_preset_page_opens_on_the_gradient_of_its_title(browse, layer):
    script = f"{_SEEN} log(seen_().direction);"
    opened = "dx" if "input gradient" in layer.title else "dw"
    assert logged(browse(layer.problem(), script=acted(script))) == [opened]


def test_frame_of_a_notebook_is_as_high_as_its_page(tmp_path):
    path = tmp_path / "notebook.html"
    content = cupyconv.explain(PADDED).page()
    watch = """
      addEventListener('message', ({ data }) => setTimeout(() => (document.body.dataset.log =
        document.querySelector('iframe').getBoundingClientRect().height - data.cupyconvHeight)));
    """
    path.write_text(f"<body>{Page(content)._repr_html_()}<script>{watch}</script></body>")
    assert logged(browser.document(path.as_uri(), until="[data-log]")) == ["0"]
