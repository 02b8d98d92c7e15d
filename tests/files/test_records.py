"""Plans and records from JSON: any text gives a ConvError or a plan that can be printed and run."""

from __future__ import annotations

import copy
import json
import random

import pytest

import cupyconv
from cupyconv import ConvError, ConvProblem, Plan
from cupyconv.bench.results import Ceiling, Row
from cupyconv.kernels.family import Tile
from cupyconv.planning import Device
from cupyconv.records import parse_json, record

PROBLEM = ConvProblem((2, 8, 14, 14), (16, 8, 3, 3), padding=1)
PLANS = [
    cupyconv.plan(PROBLEM, device).to_json() for device in ("cpu", "sm_80", "sm_90a", "sm_75")
] + [cupyconv.plan(PROBLEM.replace(dtype="float16", padding="same"), "sm_90a").to_json()]

STRANGE = [
    *(None, True, False, 0, 1, -1, 7, 2**31, 10**400, 1.0, 0.5, float("inf"), float("nan")),
    *("", "x", " ", "cpu", "sm_80", "sm_90", "a\nb", "\x1b[31m", "9" * 50),
    *([], [[]], [1], {}, {"a": 1}, [1, 2, 3, 4], [[1, 2], [3, 4]]),
]


def places(value, path=()):
    """Yield the path to every value in nested lists and objects."""
    entries = value.items() if isinstance(value, dict) else enumerate(value)
    for key, inner in entries:
        yield (*path, key)
        if isinstance(inner, (dict, list)):
            yield from places(inner, (*path, key))


def changed(content, path, new):
    """Return a copy with another value at a path; Ellipsis removes the value."""
    content = copy.deepcopy(content)
    inner = content
    for key in path[:-1]:
        inner = inner[key]
    if new is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = new
    return content


def require_sound(text):
    """Require an error, or a plan that can be printed, saved and hashed; return if it is a plan."""
    try:
        plan = Plan.from_json(text)
    except ConvError:
        return False
    assert str(plan).count("\n") == 8, (
        "lines: problem, device, headings, rule, three passes, blank, origin of times"
    )
    assert str(plan).replace("\n", "").isprintable()
    assert plan._repr_html_()
    assert Plan.from_json(plan.to_json()) == plan
    hash(plan)
    for entry in plan:
        assert entry.family.name == entry.implementation
    return True


@pytest.mark.parametrize(
    ("path", "new"),
    [
        (("passes", 0, "splits"), "x"),
        (("passes", 0, "splits"), 2),
        (("passes", 0, "splits"), True),
        (("passes", 0, "splits"), 1.0),
        (("passes", 0, "blocks"), 5),
        (("passes", 0, "workspace_bytes"), -1),
        (("passes", 0, "reason"), None),
        (("passes", 0, "reason"), "one\ntwo"),
        (("passes", 0, "tile"), []),
        (("passes", 0, "precision"), 3),
        (("passes", 0, "method"), None),
        (("passes", 0), []),
        (("passes",), None),
        (("device", "name"), None),
        (("device", "name"), "\x1b]0;\x07"),
        (("device", "architecture"), "sm_90"),
        (("device", "architecture"), 80),
        (("device", "multiprocessors"), "many"),
        (("device", "multiprocessors"), -4),
        (("device", "has_tensor_maps"), 1),
        (("device", "colour"), "red"),
        (("problem", "stride"), "x"),
        (("problem", "dtype"), [1]),
        (("problem", "groups"), None),
        (("problem",), []),
        (("device",), ...),
    ],
)
def test_plan_fields_of_wrong_type_are_rejected(path, new):
    with pytest.raises(ConvError):
        Plan.from_json(json.dumps(changed(json.loads(PLANS[0]), path, new)))


@pytest.mark.parametrize(
    "text", ["[" * 100_000, '{"a":' * 100_000, "9" * 5000, "", "null", "[]", "\ud800", b"\xff", 7]
)
def test_plan_text_must_be_a_json_object(text):
    with pytest.raises(ConvError, match="a plan must be JSON"):
        Plan.from_json(text)


@pytest.mark.parametrize("text", PLANS)
def test_plans_with_strange_fields_are_rejected_or_sound(text):
    rng, content = random.Random(text), json.loads(text)
    sound = 0
    ways = list(places(content))
    for path in ways:
        for new in (..., *rng.sample(STRANGE, 6)):
            sound += require_sound(json.dumps(changed(content, path, new)))
    assert 0 < sound < 7 * len(ways)


def test_plans_with_random_bytes_are_rejected_or_sound():
    rng = random.Random(1)
    for number in range(300):
        text = bytearray(PLANS[number % len(PLANS)].encode())
        for _ in range(rng.randint(1, 3)):
            at = rng.randrange(len(text))
            text[at : at + rng.randint(0, 4)] = rng.randbytes(rng.randint(0, 2))
        require_sound(bytes(text))


# -- records ---------------------------------------------------------------------------------------


def test_record_is_made_from_its_fields():
    assert record(Device, {"name": "cpu"}) == Device("cpu")
    tile = Tile(64, 32, 16, 128, (("WARPS_M", 2),), (8, 0), None)
    entry = {
        "block_m": 64,
        "block_n": 32,
        "block_k": 16,
        "threads": 128,
        "macros": [["WARPS_M", 2]],
        "since": [8, 0],
        "itemsize": None,
    }
    assert record(Tile, entry) == tile
    assert record(Ceiling, {**vars(Ceiling(1, 2.0, "a", "b"))}) == Ceiling(1, 2.0, "a", "b")


@pytest.mark.parametrize(
    ("kind", "entry", "said"),
    [
        (Device, [], "must be an object"),
        (Device, {}, "must have the field 'name'"),
        (Device, {"name": 7}, r"Device\.name must be str, got 7"),
        (Device, {"name": "cpu", "x": 1}, "has no field 'x'"),
        (Device, {"name": "a", "multiprocessors": True}, "must be int, got True"),
        (Row, {"layer": None}, "must have"),
        (Ceiling, {"flops_per_second": "1", "bytes_per_second": 1, "product_by": "", "copy_by": ""},
         "must be float, got '1'"),
    ],
)  # fmt: skip
def test_invalid_records_are_rejected(kind, entry, said):
    with pytest.raises(ValueError, match=said):
        record(kind, entry)


def test_deeply_nested_json_is_rejected():
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * 100_000)
    assert parse_json("[[1]]") == [[1]]
