"""Every rule of the framework is a named check, or is rejected with a reason; documents agree."""

import re
from pathlib import Path

from foretoken.lab.decide.policy import RULE_KINDS
from foretoken.lab.rules import REJECTED, rule_ids, rule_places

DOCUMENT = Path(__file__).parents[3] / "docs" / "deciding.md"
ROW = re.compile(r"^\| ([DKTMQLV]\d+) \| (.+?) \| (.+?) \| (.+?) \|$", re.MULTILINE)


def rows() -> dict[str, tuple[str, ...]]:
    """Id -> rule, place and remark of docs/deciding.md."""
    found = ROW.findall(DOCUMENT.read_text("utf-8"))
    assert len({row[0] for row in found}) == len(found), "an id has two rows"
    return {row[0]: tuple(row[1:]) for row in found}


def test_the_list_is_complete() -> None:
    ids = rule_ids()
    assert len(ids) == 57
    assert (ids[0], ids[10], ids[11], ids[-1]) == ("D1", "D11", "K1", "V8")


def test_every_rule_is_checked_or_rejected() -> None:
    places = rule_places()
    assert set(places) <= set(rule_ids()), "a check names an id that does not exist"
    for rule in rule_ids():
        assert (rule in places) != (rule in REJECTED), rule


def test_the_document_names_the_same_checks() -> None:
    places, written = rule_places(), rows()
    assert list(written) == list(rule_ids())
    for rule, (_, place, remark) in written.items():
        expected = ", ".join(places[rule]) if rule in places else "rejected"
        assert set(place.split(", ")) == set(expected.split(", ")), rule
        assert len(remark) > 10 or rule not in REJECTED, rule


def test_rejections_have_reasons() -> None:
    for rule in REJECTED:
        assert len(rows()[rule][2]) > 40, rule


def test_rules_beyond_the_framework_are_written_down() -> None:
    text = DOCUMENT.read_text("utf-8").split("## Beyond the framework")[1]
    for kind in RULE_KINDS.values():
        assert kind.ids or f"policy: {kind.name}" in text, kind.name
