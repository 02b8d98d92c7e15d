"""The README and other pages show the actual output and the current results."""

import re

import pytest

from tests import speed_table
from tests.readme import (
    BELIEF,
    README,
    SPEED,
    STATUS,
    filled,
    measured,
    put_into,
    with_runs,
    with_status,
)


def without_numbers(text):
    """Replace numbers by # and join spaces, since rounding differs between machines."""
    return re.sub(r" +", " ", re.sub(r"\d+(\.\d+)?(e-?\d+)?", "#", text))


def test_readme_shows_the_actual_output():
    shown = README.read_text()
    assert without_numbers(filled(shown)) == without_numbers(shown)


def test_speed_tables_have_the_newest_results():
    assert speed_table.summary(README.parent / "tests") in README.read_text()
    assert measured(SPEED.read_text()) == SPEED.read_text()


@pytest.mark.parametrize(
    ("page", "write"),
    [*((page, with_status) for page in STATUS), (BELIEF, with_runs)],
    ids=lambda one: getattr(one, "name", ""),
)
def test_pages_list_the_same_runs_on_gpus(page, write):
    assert write(page.read_text()) == page.read_text()


def test_put_into_replaces_the_block():
    text = "before\n<!-- a -->\nold\n<!-- /a -->\nafter"
    assert put_into(text, "a", "new") == text.replace("old", "new")
    with pytest.raises(SystemExit, match="one block 'b', has 0"):
        put_into(text, "b", "new")
