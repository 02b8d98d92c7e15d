"""The README shows what the commands really print."""

import re

import pytest

from cupyconv.bench import readme
from tests.readme import README, filled


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


@pytest.mark.parametrize("device", ["gpu", "cpu"])
def test_the_speed_table_is_that_of_the_newest_results(device):
    begin, end = readme.lines_around(device)
    shown = README.read_text().partition(begin)[2].partition(end)[0]
    assert shown.strip() == readme.table(README.parent / "tests", device).strip()
