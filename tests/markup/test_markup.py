"""Tables as text: they fit the width and do not split words."""

from __future__ import annotations

import re

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from cupyconv.cli.main import main
from cupyconv.markup import Table

WORD = st.text("0123456789x", min_size=1, max_size=16)
ROW = st.tuples(*[st.lists(WORD, max_size=8).map(" ".join)] * 4)


@pytest.mark.thorough
@given(st.tuples(*[WORD] * 4), st.lists(ROW, min_size=1, max_size=5), st.integers(20, 120))
def test_table_does_not_split_words_that_fit(head, rows, width):
    lines = list(Table(head, tuple(rows)).lines(width))
    assert max(map(len, lines)) <= width
    columns = zip(head, *rows, strict=True)
    longest = [max(map(len, " ".join(texts).split())) for texts in columns]
    if sum(longest) + len(longest) - 1 <= width:
        shown = [word for line in lines for word in line.split() if "─" not in word]
        assert sorted(shown) == sorted(
            word for row in (head, *rows) for word in " ".join(row).split()
        )


def test_grads_fits_a_narrow_terminal():
    layer = ("--input", "1x5x20x20", "--filter", "10x5x3x3")
    done = CliRunner().invoke(main, ["grads", *layer], env={"COLUMNS": "60"})
    assert done.exit_code == 0
    assert max(map(len, done.output.splitlines())) <= 60
    for words in ("1x10x18x18", "differences", r"\d\.\de-0[78]"):
        assert re.search(words, done.output)


def test_table_without_rows_has_no_lines():
    assert list(Table(("", ""), ()).lines(80)) == []
