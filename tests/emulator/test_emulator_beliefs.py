"""The beliefs of each wrapper about the chip, and the witnesses that confirm them."""

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
    """Return the assembly text of each wrapper that no macro generates."""
    text = (build.INCLUDE_DIRECTORY / "ptx.cuh").read_text()
    bodies = re.split(r"__device__ __forceinline__ [\w ]+?[\s*&]+(\w+)\(", text)
    texts = {}
    for name, body in zip(bodies[1::2], bodies[2::2], strict=True):
        statement = re.search(r"asm(?: volatile)?\(\s*((?:\"[^\"]*\"\s*)+)", body.split("\n}")[0])
        if statement:
            texts[name] = re.sub(r"\"\s*\"|\"|\\n", "", statement[1])
    return texts


def test_beliefs_cover_exactly_the_wrappers() -> None:
    wrappers = {wrapper for belief in beliefs.beliefs() for wrapper in belief.wrappers}
    assert wrappers == set(WRAPPERS) == set(beliefs.instructions())


def test_instruction_pattern_matches_one_wrapper() -> None:
    texts, patterns = assembly(), beliefs.instructions()
    assert len(texts) > 50
    for name, text in texts.items():
        matching = {other for other, pattern in patterns.items() if pattern.search(text)}
        assert name in matching, text
        # Many wrappers also convert a shared address.
        assert matching <= {name, "shared_address"}, text


def test_every_change_applies() -> None:
    changes = [change for belief in beliefs.beliefs() for change in belief.changes]
    assert len(changes) > 80
    for change in changes:
        assert change.text != (beliefs.HERE / change.file).read_text()
    for belief in beliefs.beliefs():
        assert bool(belief.changes) != bool(belief.unconfirmed), belief.field
        for change in belief.changes:
            assert set(change.only) <= set(belief.wrappers)


def test_confirmed_fields_and_witnesses_exist() -> None:
    known = {(wrapper, belief.field) for belief in beliefs.beliefs() for wrapper in belief.wrappers}
    for key, names in beliefs.confirmed().items():
        assert key in known
        assert set(names.split(beliefs.AND)) <= set(cases.WITNESSES)


def test_readme_lists_unconfirmed_fields() -> None:
    _, _, remainder = beliefs.LISTING.read_text().partition(beliefs.BEGIN)
    table, end, _ = remainder.partition(beliefs.END)
    assert end
    assert table.strip().splitlines() == beliefs.unconfirmed_table()


def copied(monkeypatch: pytest.MonkeyPatch, folder: Path) -> list[Path]:
    """Redirect the files that the tool writes to copies."""
    files = [folder / "confirmed.json", folder / "README.md"]
    for name, file in zip(("CONFIRMED", "LISTING"), files, strict=True):
        file.write_text(getattr(beliefs, name).read_text())
        monkeypatch.setattr(beliefs, name, file)
    return files


def test_argued_field_needs_no_witness(monkeypatch, tmp_path: Path) -> None:
    files = copied(monkeypatch, tmp_path)
    before = [file.read_text() for file in files]
    monkeypatch.setattr(cases, "WITNESSES", {})
    assert beliefs.main(["--field", "registers move between"]) == 0
    assert [file.read_text() for file in files] == before
    belief = beliefs.beliefs()[0]
    known = beliefs.confirmed()
    key = next(key for key in known if key[1] == belief.field)
    beliefs.write({**known, key: "Nobody"}, beliefs.unconfirmed())
    assert files[0].read_text() != before[0]
    beliefs.write({other: known[other] for other in known if other != key}, beliefs.unconfirmed())
    assert f"| {key[1]} | `{key[0]}` | not tried |" in files[1].read_text()


def test_missing_witness_package_is_reported(monkeypatch, capsys, tmp_path) -> None:
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
        ("order of the words", "Triton 9.0 f16"),  # of the PTX translator
        ("swizzle modes", "Triton 9.0 f16"),  # of the runtime
    ],
)
def test_witness_fails_under_wrong_model(field: str, name: str, tmp_path: Path) -> None:
    (belief,) = (entry for entry in beliefs.beliefs() if entry.field == field)
    try:
        cases.WITNESSES[name].kernel()
    except witnesses.MissingError as error:
        pytest.skip(str(error))
    beliefs.prepare(tmp_path)
    known = beliefs.fates(belief.changes[0], [[name]], tmp_path)
    assert known == {name: "numbers"}
