"""Answers to known experiments, kept in `same_answers.json`: a changed one is seen and judged.

`python -m tests.unit.lab.test_same_answers` writes the file again.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.lab.decide.decision import decide
from foretoken.lab.decide.overall import JudgedRun, judge_runs
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.records.results import AbSummary
from foretoken.lab.stats.intervals import unknown
from tests.unit.lab.drafting import DraftingLaw, ab_of, draw
from tests.unit.lab.summaries import (
    ab,
    around,
    bucket,
    class_gains,
    gain,
    with_candidate,
    with_gain,
)
from tests.unit.lab.test_several_runs import measured

FILE = Path(__file__).with_name("same_answers.json")
FEW = replace(gain("tpot_p99", 2.0), enough=False, num_blocks=12, num_pairs=360)
BUSY = replace(measured(2.2), environment={"host_busy": 0.4})
SHAKY = replace(ab(1.35, error=0.05), config=measured(1.0).config)
CLASSES = (class_gains("json", 1.8), class_gains("prose", 0.7))
K = "--speculative-config '{{\"num_speculative_tokens\": {}}}'"
HOT = measured(1.1, temperature=0.8)


def law(**given: Any) -> AbSummary:
    """An A/B of answers that were drawn."""
    return ab_of(draw(DraftingLaw(**given), requests=10, tokens=80))


def prompts_of(speedup: float, tokens: float, **config: Any) -> AbSummary:
    """An A/B with prompts of one length."""
    found = measured(speedup, **config)
    return replace(found, arms=tuple(replace(own, prompt_tokens=tokens) for own in found.arms))


def one_run() -> dict[str, tuple[AbSummary, tuple[str, ...]]]:
    """A/Bs, each with the changes to the policy."""
    slow_first = with_gain(ab(1.6), gain("ttft_p95", 0.9))
    return {
        "a clear win": (ab(1.6), ()),
        "a small gain": (ab(1.1), ()),
        "a small gain, another limit": (ab(1.2), ("speedup.least=1.1",)),
        "a loss": (ab(0.8), ()),
        "open": (ab(1.4, error=0.06), ()),
        "three blocks": (ab(1.7, error=0.3, blocks=3), ()),
        "a later look": (replace(ab(1.42, error=0.035), look=4), ()),
        "no interval": (with_gain(ab(2.0), replace(gain("tpot_p50", 2.0), ratio=unknown(2.0))), ()),
        "few for a P99": (with_gain(ab(1.6), FEW), ()),
        "few for a P99 that must hold": (with_gain(ab(2.0), FEW), ("p99_tpot.weight=must",)),
        "impossible": (with_candidate(ab(3.06), acceptance=(bucket(rate=0.34),)), ()),
        "hopeless": (with_candidate(ab(0.2), acceptance=(bucket(rate=0.1),)), ()),
        "a busy machine": (replace(ab(1.6), environment={"host_busy": 0.4}), ()),
        "a late client": (with_candidate(ab(1.6), client_lag_p99_s=0.05), ()),
        "a lost tail": (with_gain(ab(1.6), gain("tpot_p99", 0.8)), ()),
        "first token promised": (slow_first, ("slo=ttft",)),
        "first token": (slow_first, ()),
        "errors": (with_candidate(ab(1.6), num_errors=40, errors={"server": 40}), ()),
        "refused": (with_candidate(ab(1.6), parameters_seen={"min_p": 3}), ()),
        "preempted": (with_candidate(ab(1.6), counters={"vllm:num_preemptions": 50.0}), ()),
        "a class loses": (replace(ab(1.4), classes=CLASSES), ()),
        "a low tenth": (with_candidate(ab(1.6), acceptance=(bucket(p10=around(0.05)),)), ()),
        "load of production": (ab(1.6), ("production_load.requests_per_s=8",)),
        "every step drafts": (law(share=1.0), ()),
        "look-ups": (law(share=0.35), ()),
        "look-ups that lose": (law(share=0.35, rate=0.03, k=8, verify_cost=1.5), ()),
    }


def several_runs() -> dict[str, Sequence[AbSummary]]:
    """A/Bs that are judged together."""
    loads = [measured(s, in_flight=n) for n, s in ((1, 2.0), (8, 1.5), (32, 0.8))]
    other = replace(ab(1.32, error=0.05), config=measured(1.0, in_flight=8).config)
    versions = [
        with_candidate(measured(s), server=replace(ab().arm("on").server, version=v))
        for v, s in (("0.32.0", 1.1), ("0.33.0", 1.6))
    ]
    return {
        "temperatures": (measured(1.8), measured(1.6, temperature=0.4), HOT),
        "loads": loads,
        "classes": (measured(1.8, category="code"), measured(0.8, category="prose")),
        "configurations": [
            measured(s, more=K.format(k)) for k, s in ((1, 1.1), (3, 1.9), (5, 1.5))
        ],
        "configurations at loads": [
            measured(s, in_flight=n, more=f"--k {k}")
            for k, n, s in ((5, 1, 2.2), (5, 16, 1.0), (2, 1, 1.7), (2, 16, 1.5))
        ],
        "unfair": (measured(1.9, more="--k 5"), measured(1.2, more="--k 1", temperature=0.8)),
        "open at one": (measured(1.9, temperature=0.8), SHAKY),
        "open and lost": (SHAKY, measured(0.9, in_flight=16)),
        "open everywhere": (SHAKY, other),
        "versions": versions,
        "prompts": (prompts_of(1.8, 500.0), prompts_of(0.9, 32_000.0, file="long.jsonl")),
        "busy everywhere": (BUSY, replace(BUSY, config=HOT.config)),
        "busy and lost": (BUSY, HOT),
        "busy and won": (BUSY, measured(1.9, temperature=0.8)),
        "by measured load": [
            with_candidate(ab(s), requests_per_s=r) for s, r in ((1.9, 0.5), (1.0, 20.0))
        ],
    }


def rounded(value: Any) -> Any:
    """Numbers to six digits, so that another machine's last bit is no change."""
    if isinstance(value, dict):
        return {key: rounded(own) for key, own in value.items()}
    if isinstance(value, list):
        return [rounded(own) for own in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def answers() -> dict[str, Any]:
    """What is said of every case."""
    found: dict[str, Any] = {}
    for name, (summary, changes) in one_run().items():
        said = decide(summary, load_policy(None, changes))
        found[name] = {
            "verdict": said.verdict,
            "sentence": said.sentence,
            "needed_blocks": said.needed_blocks,
            "break_even": said.break_even_rate,
            "conclusion": said.conclusion.sentence,
            "rules": "".join(j.result.outcome[:2] + " " for j in said.rules).strip(),
        }
    for name, runs in several_runs().items():
        policy = load_policy(None)
        judged = [JudgedRun(run, decide(run, policy, run=str(n))) for n, run in enumerate(runs)]
        best = judge_runs(judged, policy)
        found[f"together: {name}"] = {
            "answer": best.answer, "best": best.best.decision.run, "says": list(best.says),
            "conclusion": best.conclusion.sentence,
        }  # fmt: skip
    plain: dict[str, Any] = rounded(json.loads(json.dumps(found)))
    return plain


def test_answers_are_those_of_before() -> None:
    kept, now = json.loads(FILE.read_text("utf-8")), answers()
    assert kept.keys() == now.keys()
    for name, own in kept.items():
        assert now[name] == own, name


if __name__ == "__main__":
    lines = [f"{json.dumps(k)}: {json.dumps(v)}" for k, v in answers().items()]
    FILE.write_text("{\n" + ",\n".join(lines) + "\n}\n", "utf-8")
