"""scripts/draw_scaling.py on made-up results: which line is whose, and what stands beside it."""

import json
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.outside import module_outside


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    yield from module_outside("scripts", "draw_scaling")


def case(replicas: int, users: int, **found: list[float]) -> dict[str, Any]:
    starts = {
        policy: [{"found": one, "ttft_p99": 1.0 - one / 2} for one in shares]
        for policy, shares in found.items()
    }
    return {"case": {"replicas": replicas, "users": users}, "starts": starts}


CASES = [
    case(4, 32, random=[0.6, 0.7, 0.5], prefix=[0.8, 0.9, 0.85]),
    case(1, 32, random=[0.9], prefix=[0.9]),
    case(1, 96, random=[0.7], prefix=[0.7]),
]


def test_a_line_is_of_one_policy_at_one_load(script: ModuleType) -> None:
    assert script.points_of(CASES, "random", 32, "found") == [(1, 0.9), (4, 0.6)]
    assert script.points_of(CASES, "prefix", 32, "found") == [(1, 0.9), (4, 0.85)]
    assert script.points_of(CASES, "turns", 32, "found") == []


def test_the_picture_names_policies_and_loads(script: ModuleType, tmp_path: Path) -> None:
    printed = tmp_path / "routed.txt"
    printed.write_text("| rows |\n" + json.dumps({"results": {"cases": CASES}}) + "\n")
    picture = script.draw(script.cases_of(printed.read_text()))
    texts = {"".join(one.itertext()).strip() for one in ElementTree.fromstring(picture).iter()}
    assert {"longest known prefix, 32 users each", "random, 96 users each"} <= texts
    assert "round robin, 32 users each" not in texts, "it was not run"
