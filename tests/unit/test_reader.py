"""The reader of settings: what plain values become, and what each mistake answers."""

import math
from dataclasses import dataclass
from enum import Enum
from typing import Annotated, Any, Literal

import pytest

from foretoken.config.reader import (
    Allowed,
    KeyTable,
    at_least,
    between,
    check_fields,
    defaults_of,
    flat,
    grouped,
    keys_of,
    read,
    words,
)
from foretoken.errors import ConfigError, NotYetError


class Colour(Enum):
    RED = "red"
    BLUE = "blue"


@dataclass(frozen=True, slots=True, kw_only=True)
class Stage:
    until: Annotated[float, between(0.0, 1.0)]
    rows: Literal["text", "answers"] = "text"


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    low: Annotated[int, at_least(1)] = 1
    high: int = 9


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    name: str
    steps: Annotated[int, at_least(1)] | None = None
    rate: float = 0.5
    colour: Colour = Colour.RED
    stages: tuple[Stage, ...] = ()
    shares: dict[str, float] | None = None
    size: tuple[int, int] = (1, 1)
    rule: Annotated[str, words("strict", "loose", later=("magic",))] = "strict"
    seed: int | str = 0
    even: Annotated[int, Allowed("an even number", lambda count: count % 2 == 0)] = 0
    limits: Limits = flat(Limits)

    def __post_init__(self) -> None:
        check_fields(self, "run.")


def test_plain_values_become_settings() -> None:
    found = read(
        Run,
        {
            "name": "x",
            "rate": 1,
            "colour": "blue",
            "stages": [{"until": 1}, {"until": 0.5, "rows": "answers"}],
            "shares": {"a": 1},
            "size": [2, 3],
            "seed": "now",
        },
        "run",
    )
    assert found.rate == 1.0 and isinstance(found.rate, float) and found.colour is Colour.BLUE
    assert [stage.until for stage in found.stages] == [1.0, 0.5]
    assert (found.shares, found.size, found.seed) == ({"a": 1.0}, (2, 3), "now")


@pytest.mark.parametrize(
    ("given", "field", "allowed"),
    [
        ({"naem": "x"}, "run.naem", "did you mean 'name'?"),
        ({}, "run.name", "text; it has no default"),
        ({"name": 3}, "run.name", "text"),
        ({"name": "x", "steps": 0}, "run.steps", "None or an integer >= 1"),
        ({"name": "x", "steps": True}, "run.steps", "None or an integer >= 1"),
        ({"name": "x", "steps": 2.0}, "run.steps", "None or an integer >= 1"),
        ({"name": "x", "rate": "fast"}, "run.rate", "a number"),
        ({"name": "x", "rate": None}, "run.rate", "a number"),
        ({"name": "x", "colour": "rad"}, "run.colour", "did you mean 'red'?"),
        ({"name": "x", "stages": {}}, "run.stages", "a list"),
        ({"name": "x", "stages": [{"until": 2}]}, "run.stages[0].until", "a number from 0 to 1"),
        ({"name": "x", "stages": [{"until": 1, "rows": "txt"}]}, "run.stages[0].rows", "'text'?"),
        ({"name": "x", "shares": {"a": "b"}}, "run.shares.a", "a number"),
        ({"name": "x", "size": [1]}, "run.size", "2 values"),
        ({"name": "x", "rule": "lose"}, "run.rule", "did you mean 'loose'?"),
        ({"name": "x", "seed": 1.5}, "run.seed", "an integer or text"),
        ({"name": "x", "even": 3}, "run.even", "an even number"),
        ([], "run", "a mapping"),
    ],
)
def test_mistakes_name_field_and_what_is_allowed(given: Any, field: str, allowed: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(Run, given, "run")
    assert caught.value.field == field
    assert allowed in str(caught.value)


def test_words_whose_part_is_not_built() -> None:
    with pytest.raises(NotYetError, match="'magic' is not yet built"):
        Run(name="x", rule="magic")


def test_null_stands_for_no_number_only_where_asked() -> None:
    assert math.isnan(read(Run, {"name": "x", "rate": None}, "run", null_is_nan=True).rate)


def test_settings_that_belong_together_share_a_dictionary() -> None:
    assert keys_of(Run)[-2:] == ("low", "high")
    assert defaults_of(Run)["high"] == 9 and "name" not in defaults_of(Run)
    for found in (
        Run(**grouped(Run, {"name": "x", "high": 3})),
        read(Run, {"name": "x", "high": 3}, "run"),
    ):
        assert found.limits == Limits(high=3)


def test_a_table_of_keys() -> None:
    table = KeyTable(where="run", neutral={"lora": (False,)}, removed={"swap": "leave it out"})
    assert table.accept({"max-steps": 3, "lora": False}, ["max_steps"]) == {"max_steps": 3}
    with pytest.raises(NotYetError, match="not yet built"):
        table.accept({"lora": 0}, ["max_steps"])
    with pytest.raises(ConfigError, match="leave it out"):
        table.accept({"swap": 1}, ["max_steps"])
    with pytest.raises(ConfigError, match="did you mean 'max_steps'"):
        table.accept({"max_step": 1}, ["max_steps"])
