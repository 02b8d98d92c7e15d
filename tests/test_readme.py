"""The README shows what the commands really print."""

import re

import pytest

from tests import speed_table
from tests.readme import COUNTED, README, SPEED, counted, filled, limited, put_into


def without_numbers(text):
    """Digits as #, runs of them and of spaces as one: rounding differs between machines."""
    return re.sub(r" +", " ", re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text))


def test_shown_output_is_real():
    shown = README.read_text()
    assert without_numbers(filled(shown)) == without_numbers(shown)


def test_the_two_commands_are_in_the_makefile():
    makefile = (README.parent / "Makefile").read_text()
    for command in re.findall(r"^\$ make (\w+)", README.read_text(), re.M):
        assert re.search(rf"^{command}:", makefile, re.M)


def test_the_speed_tables_are_those_of_the_newest_results():
    for device in speed_table.NOTHING:
        assert speed_table.table(README.parent / "tests", device) in README.read_text()


def test_the_page_of_counts_has_what_was_counted():
    text = COUNTED.read_text()
    assert counted(text) == text


def test_counts_of_cutlass_say_which_of_its_kernels_they_are():
    sections = re.findall(r"^<!-- (.*?) -->\n(.*?)^<!-- /", COUNTED.read_text(), re.M | re.S)
    rows = {
        name: [line for line in text.splitlines() if "filter |" in line] for name, text in sections
    }
    beside = {name for name, lines in rows.items() if any("(0" in line for line in lines)}
    assert beside == {name for name, text in sections if "without split-K" in text}
    assert beside


def test_what_bounds_the_cpu_is_what_was_measured():
    text = SPEED.read_text()
    assert limited(text) == text


def test_a_busy_machine_is_told_beside_its_figures():
    for text in (README.read_text(), SPEED.read_text()):
        assert "not to be relied on" in text


def test_what_is_put_in_replaces_what_was_there():
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter"
    assert put_into(text, "a", "new") == text.replace("old", "new")
    with pytest.raises(SystemExit, match="one block 'b', has 0"):
        put_into(text, "b", "new")
