"""What is believed of the chip, for each wrapper, and which of it a witness bears out."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.emulator import beliefs, build, witnesses
from tests.emulator.witnesses import cases

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
    _, _, rest = beliefs.LISTING.read_text().partition(beliefs.BEGIN)
    table, end, _ = rest.partition(beliefs.END)
    assert end
    assert table.strip().splitlines() == beliefs.unconfirmed_table()


def copied(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Path]:
    """What the tool writes, as copies that it may write."""
    files = [folder / "confirmed.toml", folder / "README.md"]
    for name, file in zip(("CONFIRMED", "LISTING"), files, strict=True):
        file.write_text(getattr(beliefs, name).read_text())
        monkeypatch.setattr(beliefs, name, file)
    return files


def test_a_field_that_no_witness_can_tell_needs_none(monkeypatch, tmp_path: Path) -> None:
    files = copied(monkeypatch, tmp_path)
    before = [file.read_text() for file in files]
    monkeypatch.setattr(cases, "WITNESSES", {})
    assert beliefs.main(["--field", "registers move between"]) == 0
    assert [file.read_text() for file in files] == before
    belief = beliefs.beliefs()[0]
    known = beliefs.confirmed()
    place = next(place for place in known if place[1] == belief.field)
    beliefs.write({**known, place: "Nobody"}, beliefs.unconfirmed())
    assert files[0].read_text() != before[0]
    beliefs.write({one: known[one] for one in known if one != place}, beliefs.unconfirmed())
    assert f"| {place[1]} | `{place[0]}` | not tried |" in files[1].read_text()


def test_a_witness_that_cannot_be_had_is_said_in_a_line(monkeypatch, capsys, tmp_path) -> None:
    def missing() -> None:
        raise witnesses.MissingError("triton is missing")

    files = copied(monkeypatch, tmp_path)
    before = [file.read_text() for file in files]
    monkeypatch.setattr(cases, "WITNESSES", {"one": SimpleNamespace(kernel=missing)})
    assert beliefs.main(["--field", "rounding"]) == 1
    assert capsys.readouterr().err == "triton is missing\n"
    assert [file.read_text() for file in files] == before


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
