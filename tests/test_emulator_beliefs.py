"""What is believed of the chip, for each wrapper, and which of it a witness bears out."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.emulator import beliefs, build, witnesses
from tests.emulator.witnesses import cases

README = Path(__file__).parent / "gpu" / "README.md"
WRAPPERS = {
    re.search(r"(\w+)\(", declaration)[1]: declaration
    for declaration in build.declared_wrappers((build.INCLUDE_DIRECTORY / "ptx.cuh").read_text())
}


def assembly() -> dict[str, str]:
    """The text of each wrapper's assembly, as far as no macro puts it together."""
    text = (build.INCLUDE_DIRECTORY / "ptx.cuh").read_text()
    bodies = re.split(r"__device__ __forceinline__ [\w ]+?[\s*&]+(\w+)\(", text)
    found = {}
    for name, body in zip(bodies[1::2], bodies[2::2], strict=True):
        written = re.search(r"asm(?: volatile)?\(\s*((?:\"[^\"]*\"\s*)+)", body.split("\n}")[0])
        if written:
            found[name] = re.sub(r"\"\s*\"|\"|\\n", "", written[1])
    return found


def test_every_wrapper_has_a_belief_and_nothing_else_has() -> None:
    believed = {wrapper for one in beliefs.beliefs() for wrapper in one.wrappers}
    assert believed == set(WRAPPERS) == set(beliefs.instructions())


def test_a_wrapper_is_known_by_its_own_instruction_alone() -> None:
    texts, patterns = assembly(), beliefs.instructions()
    assert len(texts) > 50
    for name, text in texts.items():
        of_wrapper = {other for other, pattern in patterns.items() if pattern.search(text)}
        assert name in of_wrapper, text
        # The address of a row is in each of them.
        assert of_wrapper <= {name, "shared_address"}, text


def test_every_change_can_be_made() -> None:
    changes = [change for one in beliefs.beliefs() for change in one.changes]
    assert len(changes) > 80
    for change in changes:
        assert change.text != (beliefs.HERE / change.file).read_text()
    for one in beliefs.beliefs():
        assert bool(one.changes) != bool(one.unconfirmed), one.field
        for change in one.changes:
            assert set(change.only) <= set(one.wrappers)


def test_what_is_confirmed_is_believed_and_by_witnesses_that_there_are() -> None:
    known = {(wrapper, one.field) for one in beliefs.beliefs() for wrapper in one.wrappers}
    for place, names in beliefs.confirmed().items():
        assert place in known
        assert set(names.split(beliefs.AND)) <= set(cases.WITNESSES)


def test_the_readme_lists_what_is_not_confirmed() -> None:
    _, _, rest = README.read_text().partition(beliefs.BEGIN)
    table, end, _ = rest.partition(beliefs.END)
    assert end
    assert table.strip().splitlines() == beliefs.unconfirmed_table()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("field", "name"),
    [
        ("rounding to nearest", "Triton 9.0 f16"),  # a change of a header
        ("order of the words", "Triton 9.0 f16"),  # of the PTX front
        ("swizzle modes", "Triton 9.0 f16"),  # of the runtime
    ],
)
def test_a_witness_fails_where_the_model_is_wrong(field: str, name: str, tmp_path: Path) -> None:
    (belief,) = (one for one in beliefs.beliefs() if one.field == field)
    try:
        cases.WITNESSES[name].kernel()
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    beliefs.prepare(tmp_path)
    known = beliefs.fates(belief.changes[0], [[name]], tmp_path)
    assert known == {name: "numbers"}
