"""What plans predict, held against what others published and measured."""

import math
import sys
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foretoken.control.acceptance import ConstantAcceptance
from foretoken.lab.plan.acceptance import (
    AcceptancePrior,
    DraftedWork,
    PublishedLength,
    effects,
    prior_without,
    published_lengths,
)
from foretoken.lab.plan.setup import ENGINE_COSTS

BENCHMARKS = Path(__file__).parents[3] / "benchmarks"


@pytest.fixture(scope="module")
def published() -> ModuleType:
    """The benchmark, as a module."""
    name = "plan_published"
    spec = util.spec_from_file_location(name, BENCHMARKS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def found(published: ModuleType) -> list[Any]:
    """Every published point beside what is predicted without its source."""
    predictions: list[Any] = published.predict_all(published.read_points())
    return predictions


def test_half_of_what_was_published_is_told_within_a_fifth(
    published: ModuleType, found: list[Any]
) -> None:
    said = published.summary(found)
    assert said["points"] >= 25 and said["sources"] >= 6
    assert said["with a draft model"] >= 6 and said["losses"] >= 4
    assert said["median error"] <= 0.20
    assert said["intervals that hold it"] >= 0.75
    assert said["on the right side of 1"] >= 0.90


def test_draft_models_alone_are_told_within_a_quarter(found: list[Any]) -> None:
    errors = sorted(p.error for p in found if p.point.setup.drafts_with == "model")
    assert errors[len(errors) // 2] <= 0.25


def test_the_documents_table_is_the_benchmarks(published: ModuleType, found: list[Any]) -> None:
    written = (BENCHMARKS / "LOG.md").read_text("utf-8")
    lost = [line for line in published.table(found).splitlines() if line not in written]
    assert not lost, "put the table of benchmarks/plan_published.py in benchmarks/LOG.md"


def test_costs_of_engines_are_those_that_fit_all_points(published: ModuleType) -> None:
    points = published.read_points()
    for engine, (name, allowed) in published.FITTED.items():
        assert getattr(ENGINE_COSTS[engine], name) == pytest.approx(
            published.fitted(engine, points), abs=0.6 * (allowed[1] - allowed[0])
        ), engine


def test_a_source_does_not_speak_for_itself() -> None:
    """A wild source moves what is expected, unless it is left out."""
    work = DraftedWork(method="eagle3", target_b=8.0, k=3)
    rows = [row for row in published_lengths() if row.drafting.method == "eagle3"]
    name = rows[0].source
    assert prior_without(name).expect(work) != prior_without().expect(work)
    assert name not in prior_without(name).expect(work).sources


def _published(source: str, length: float, **changes: Any) -> PublishedLength:
    work: dict[str, Any] = {"method": "eagle3", "target_b": 8.0, "k": 4, **changes}
    return PublishedLength(source=source, drafting=DraftedWork(**work), length=length)


def test_many_rows_of_one_source_say_little_more_of_a_method_than_one() -> None:
    """They are of one team's heads, which may all be bad; as many sources may not."""
    work = DraftedWork(method="eagle3", target_b=8.0, k=4, workload="chat")

    def moved(rows: list[PublishedLength]) -> float:
        return AcceptancePrior(()).expect(work).middle - AcceptancePrior(rows).expect(work).middle

    bad = [_published("a", 1.5, workload="chat") for _ in range(40)]
    others = [_published(f"source {i}", 1.5, workload="chat") for i in range(40)]
    assert moved(bad[:1]) > 0.03
    assert moved(bad) < 2 * moved(bad[:1]) < moved(others)


def test_rows_of_bad_heads_tell_of_work_as_well_as_those_of_good_ones() -> None:
    def code_over_chat(lengths: tuple[float, float]) -> float:
        rows = [_published("a", length, workload=work) for length, work in
                zip(lengths, ("chat", "code"), strict=True) for _ in range(20)]  # fmt: skip
        prior = AcceptancePrior(rows)
        chat, code = (
            prior.expect(DraftedWork(method="eagle", target_b=8.0, workload=work)).middle
            for work in ("chat", "code")
        )
        return math.log(code / (1 - code)) - math.log(chat / (1 - chat))

    good = ConstantAcceptance(0.7).length(4), ConstantAcceptance(1 / (1 + 3 / 7 / math.e)).length(4)
    poor = ConstantAcceptance(0.3).length(4), ConstantAcceptance(1 / (1 + 7 / 3 / math.e)).length(4)
    assert code_over_chat(good) == pytest.approx(code_over_chat(poor), abs=0.05)
    assert code_over_chat(good) > 0.7, "the rows say that code is one better in log-odds"


def test_every_source_says_where_it_stands(published: ModuleType) -> None:
    names = {row.source for row in published_lengths()}
    assert len(names) >= 15
    for point in published.read_points():
        assert point.where and (not point.prior or point.prior in names), point.source


@pytest.mark.parametrize(
    ("worse", "changes"),
    [
        ("hot", {"temperature": 1.0}),
        ("creative", {"workload": "creative"}),
        ("of another family", {"foreign": True}),
        ("quantized target", {"low_bits": True}),
        ("tiny draft", {"draft_b": 0.1}),
    ],
)
def test_what_is_known_to_cost_acceptance_does(worse: str, changes: dict[str, Any]) -> None:
    base: dict[str, Any] = {"method": "draft_model", "target_b": 70.0, "draft_b": 1.2}
    before = prior_without().expect(DraftedWork(**{**base, "workload": "chat"}))
    after = prior_without().expect(DraftedWork(**{**base, "workload": "chat", **changes}))
    assert after.middle < before.middle, worse
    assert after.low < after.middle < after.high


def test_without_rows_the_assumed_effects_are_expected() -> None:
    work = DraftedWork(method="ngram", target_b=8.0, workload="chat")
    nothing, everything = AcceptancePrior(()).expect(work), prior_without().expect(work)
    assert nothing.sources == () and everything.sources
    assert nothing.high - nothing.low > everything.high - everything.low
    assert 0.3 < nothing.middle < 0.5, effects()["look_up ngram"]
