"""Costs of real engines on the packaged models: timed before anything is served, and kept."""

import dataclasses
import gc
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.config import EngineConfig
from foretoken.control.learned import cost_file
from foretoken.engine import timing
from foretoken.engine.engine import Engine
from foretoken.engine.timing import Timed, find_costs
from foretoken.engine.wiring import build_engine
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context
from foretoken.types import SamplingParams

DRAFTERS: list[dict[str, Any]] = [
    {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 4},
    {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 3},
    {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 3},
    {"method": "ngram", "num_speculative_tokens": 4},
    {"method": "suffix"},
]
SMALL = {"max_model_len": 1024, "max_num_seqs": 16}


def build(speculative: dict[str, Any] | None, **more: Any) -> Engine:
    return build_engine(
        EngineConfig.from_kwargs(model="demo", speculative_config=speculative, **SMALL, **more)
    )


def timed(engine: Engine) -> Timed:
    parts = engine.parts
    return Timed(
        config=parts.config,
        runner=parts.runner,
        members=parts.proposer.members,  # type: ignore[attr-defined]
        pool=parts.scheduler.pool,
        threads=parts.threads,
    )


def generate(engine: Engine) -> list[int]:
    params = SamplingParams(temperature=0, max_tokens=24, ignore_eos=True)
    [request] = engine.make_requests("r", list(range(40)), params)
    engine.add_request(request)
    tokens: list[int] = []
    while engine.has_unfinished:
        for output in engine.step():
            tokens.extend(output.new_token_ids)
    return tokens


@pytest.mark.slow
@pytest.mark.parametrize("speculative", DRAFTERS, ids=lambda one: str(one["method"]))
def test_timing_leaves_nothing_behind(tmp_path: Path, speculative: dict[str, Any]) -> None:
    """Not a page is held, and the first request says what it says in a fresh engine."""
    engine = build(speculative)
    costs = find_costs(timed(engine), folder=tmp_path, most_seconds=0.5)
    assert costs.source == "timed"
    assert engine.parts.scheduler.pool.num_used == 0
    assert generate(engine) == generate(build(speculative))
    [cost] = costs.drafters.values()
    curve = cost.drafting(1, 3, 32.0)
    assert curve[0] == 0.0
    assert 0.0 < curve[1] <= curve[3]
    again = find_costs(timed(engine), folder=tmp_path, most_seconds=0.0)
    assert again.source in ("file", "promised"), "promised: too much noise for the file to be kept"


@pytest.mark.parametrize("speculative", DRAFTERS[:3], ids=lambda one: str(one["method"]))
def test_what_is_timed_are_drafts(
    tmp_path: Path, speculative: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the keys and values have just the memory that was asked for, and no more."""
    engine = build(speculative, kv_cache_memory_bytes=50_000_000)
    found = timed(engine)
    [(name, member)] = found.members.items()
    drafted: list[bool] = []

    def propose(context: Context) -> Draft:
        draft = member.propose(context)
        drafted.append(all(map(len, draft.ids)))
        return draft

    watched = SimpleNamespace(
        proposer=member.proposer,
        max_drafts=member.max_drafts,
        check=member.check,
        release=member.release,
        propose=propose,
    )
    find_costs(
        dataclasses.replace(found, members={name: watched}),  # type: ignore[dict-item]
        folder=tmp_path,
        most_seconds=0.3,
    )
    assert drafted
    assert all(drafted)


def test_reading_is_timed_however_short_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A drafter whose smallest case takes all there is: unknown, reading would pass for free. Each
    token that it reads or drafts takes as long, and each step of the target."""
    parts, clock = timed(build(DRAFTERS[0])), SimpleNamespace(now=0.0)
    proposer = parts.members["draft_model"].proposer
    propose = proposer.propose

    def slowly(context: Context) -> Draft:
        reads = sum(proposer.num_missing(span.sequence) for span in context.spans)
        draft = propose(context)
        clock.now += 1e-4 * (reads + sum(map(len, draft.ids)))
        return draft

    def perf_counter() -> float:
        clock.now += 1e-4
        now: float = clock.now
        return now

    monkeypatch.setattr(proposer, "propose", slowly)
    monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=perf_counter))
    costs = find_costs(parts, folder=tmp_path, most_seconds=1e-6)
    reading_s = costs.drafters["draft_model"].feeding(1000, 500.0)
    assert reading_s > costs.drafters["draft_model"].drafting(1, 1, 500.0)[1]


def test_no_time_and_no_file_is_a_data_sheet(tmp_path: Path) -> None:
    costs = find_costs(timed(build(DRAFTERS[0])), folder=tmp_path, most_seconds=0.0)
    assert costs.source == "promised"
    assert not costs.timed
    assert costs.drafters["draft_model"].drafting(4, 2, 32.0)[2] > 0.0


@pytest.mark.slow
def test_what_an_engine_learns_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When it goes, what it learnt takes the place of what was timed at its start."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("FORETOKEN_TIMING_SECONDS", "0.5")
    monkeypatch.setattr(cost_file, "_LEAST_S", 0.0)
    engine = build(DRAFTERS[0])
    costs = engine.parts.controller.costs
    assert costs is not None and costs.source == "timed"
    before = costs.file.read()
    assert before is not None and before.target["passes_only"]
    for _ in range(12):
        generate(engine)
    assert costs.file.read() == before, "no step has written"
    del engine
    gc.collect()
    after = costs.file.read()
    assert after is not None
    assert after.timed == before.timed and after.target != before.target


def test_info_times_no_longer_than_is_allowed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    for speculation in ("auto", "none"):
        shown = ["info", "demo", "--costs", "--json", "--speculative-config", speculation]
        result = CliRunner().invoke(app, shown)
        assert result.exit_code == 0, result.output
        assert json.loads(result.stdout.splitlines()[-1])["source"] == "promised"
    assert not list(tmp_path.rglob("*.json"))


def test_info_shows_costs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    result = CliRunner().invoke(app, ["info", "demo", "--costs", "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout.splitlines()[-1])
    assert found["model"] == "demo"
    assert len(found["step_s"]) == len(found["sequences"])
    assert all(len(row) == len(found["drafts"]) for row in found["step_s"])
    assert "dspark" in found["drafters"]
    assert Path(found["file"]).is_relative_to(tmp_path)
    table = CliRunner().invoke(app, ["info", "demo", "--costs"])
    assert table.exit_code == 0, table.output
    assert "milliseconds of a step" in table.stdout
