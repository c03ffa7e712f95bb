"""The arithmetic of a comparison, on runs made by hand."""

import io
import random
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest
from rich.console import Console

from foretoken.cli.compare import _print_result, judge
from foretoken.cli.timed_runs import (
    Arm,
    ComparedArm,
    TimedRun,
    Workload,
    estimate,
    interleave,
    repeated_ngrams,
    summarize,
)
from foretoken.lab.verdict import LEAVE_IT_OFF, MEASURE_MORE, USE_IT
from foretoken.llm import LLM
from foretoken.types import CompletionOutput, RequestMetrics, SamplingParams


def make_run(
    arm: str,
    seconds: float,
    *,
    prompt: int = 0,
    repeat: int = 0,
    tokens: tuple[int, ...] = (1, 2, 3, 4),
    accepted: tuple[int, ...] = (),
) -> TimedRun:
    metrics = RequestMetrics(
        queued_s=0.0,
        first_token_s=seconds / 10,
        finished_s=seconds,
        num_preemptions=0,
        num_cached_tokens=0,
        drafted_per_step=(3,) * len(accepted),
        accepted_per_step=accepted,
    )
    output = CompletionOutput(index=0, text="", token_ids=tokens, metrics=metrics)
    return TimedRun(
        arm=arm, workload="w", prompt_index=prompt, repeat=repeat, seconds=seconds, output=output
    )


def summaries_of(*runs: TimedRun) -> dict[str, ComparedArm]:
    return {summary.arm: summary for summary in summarize(runs, "off")}


def test_speedup_is_the_median_over_prompts_of_medians_over_repeats() -> None:
    runs = [
        *(make_run("off", s, prompt=0, repeat=r) for r, s in enumerate((1.0, 9.0, 1.0))),
        *(make_run("on", s, prompt=0, repeat=r) for r, s in enumerate((0.5, 0.5, 9.0))),
        *(make_run("off", 3.0, prompt=1, repeat=r) for r in range(3)),
        *(make_run("on", 1.0, prompt=1, repeat=r) for r in range(3)),
    ]
    on = summaries_of(*runs)["on"]
    assert on.speedup.median == pytest.approx((2.0 + 3.0) / 2)
    assert (on.speedup.low, on.speedup.high) == (2.0, 3.0)
    assert on.tokens_per_s == pytest.approx(8 / 1.5)
    assert (on.num_prompts, on.num_repeats, on.num_tokens) == (2, 3, 8)


def test_speed_is_per_token_when_lengths_differ() -> None:
    on = summaries_of(make_run("off", 1.0), make_run("on", 1.0, tokens=(1, 2)))["on"]
    assert on.speedup.median == pytest.approx(0.5)
    assert not on.identical


def test_one_different_token_in_one_repeat_is_found() -> None:
    runs = [make_run("off", 1.0), make_run("on", 1.0), make_run("on", 1.0, repeat=1)]
    assert summaries_of(*runs)["on"].identical
    runs.append(make_run("on", 1.0, repeat=2, tokens=(1, 2, 3, 5)))
    assert not summaries_of(*runs)["on"].identical


def test_a_baseline_that_disagrees_with_itself_is_found() -> None:
    runs = [make_run("off", 1.0), make_run("off", 1.0, repeat=1, tokens=(1, 2, 3, 5))]
    assert not summaries_of(*runs)["off"].identical


def test_no_repeat_drafts_from_the_outputs_of_another() -> None:
    """A suffix look-up would find there what it is about to write."""
    asked = list[tuple[str, str]]()

    class Asked:
        def generate(self, prompt: dict[str, str], *_: Any, **__: Any) -> list[Any]:
            asked.append((prompt["prompt"], prompt["cache_salt"]))
            return [SimpleNamespace(outputs=[make_run("", 1.0).output])]

    arms = [Arm(name, cast(LLM, Asked())) for name in ("off", "on")]
    workload = Workload(name="w", prompts=("a", "b"), params=SamplingParams())
    for repeat in range(2):
        assert len(list(interleave(arms, workload, repeat))) == 4
    first, second = set(asked[:4]), set(asked[4:])
    assert len(first) == len(second) == 2
    assert not {salt for _, salt in first} & {salt for _, salt in second}


def test_acceptance() -> None:
    runs = [make_run("off", 1.0), make_run("on", 1.0, accepted=(3, 1, 0, 2))]
    on = summaries_of(*runs)["on"]
    assert on.acceptance_length == pytest.approx(1 + 6 / 4)
    assert on.acceptance_by_position == pytest.approx((0.75, 0.5, 0.25))
    assert summaries_of(*runs)["off"].acceptance_length == 1.0


def test_no_verification_has_no_positions() -> None:
    assert summaries_of(make_run("off", 1.0))["off"].acceptance_by_position == ()


def test_only_prompts_that_both_arms_finished_count() -> None:
    runs = [make_run("off", 1.0), make_run("on", 0.5), make_run("on", 9.0, prompt=1)]
    assert summaries_of(*runs)["on"].num_prompts == 1
    assert "on" not in summaries_of(make_run("on", 1.0))


def test_bootstrap_interval_covers_the_median_of_the_population() -> None:
    """Nominal coverage 95 %; the seed is fixed, so this cannot fail by chance."""
    rng = random.Random(5)
    hits = 0
    for _ in range(60):
        found = estimate([rng.gauss(0, 1) for _ in range(25)], resamples=300)
        hits += found.low <= 0.0 <= found.high
    assert hits >= 48


def test_repeated_ngrams() -> None:
    assert repeated_ngrams((1, 2, 3, 4, 5, 6)) == 0.0
    assert repeated_ngrams((7,) * 10) == pytest.approx(1 - 1 / 7)
    assert repeated_ngrams((1, 2)) == 0.0


def on_arm(speedups: Sequence[float], tokens: tuple[int, ...] = (1, 2, 3, 4)) -> ComparedArm:
    """The speculating arm of a comparison with a prompt per speed-up."""
    runs = [make_run("off", 1.0, prompt=i) for i in range(len(speedups))]
    runs += [make_run("on", 1.0 / s, prompt=i, tokens=tokens) for i, s in enumerate(speedups)]
    return summaries_of(*runs)["on"]


@pytest.mark.parametrize(
    ("speedups", "tokens", "deterministic", "word", "words"),
    [
        (
            [2.0] * 8,
            (1, 2, 3, 4),
            True,
            USE_IT,
            "USE IT: 2.00x [2.00, 2.00] over 8 prompts against 1.3x",
        ),
        ([1.25] * 8, (1, 2, 3, 4), True, LEAVE_IT_OFF, "LEAVE IT OFF: 1.25x"),
        ([0.5] * 8, (1, 2, 3, 4), True, LEAVE_IT_OFF, "0.50x"),
        ([2.0] * 8, (1, 2, 3, 5), True, MEASURE_MORE, "tokens differ"),
        ([2.0] * 8, (1, 2, 3, 5), False, USE_IT, "2.00x"),
    ],
)
def test_verdicts(
    speedups: list[float], tokens: tuple[int, ...], deterministic: bool, word: str, words: str
) -> None:
    verdict = judge(on_arm(speedups, tokens), deterministic=deterministic)
    assert verdict.word == word
    assert words in verdict.sentence


def test_an_open_question_is_not_called_a_loss() -> None:
    """Three prompts at [0.89, 2.16] were once `makes it slower: 0.98x`, exit code 1."""
    few = judge(on_arm([0.89, 0.98, 2.16]), deterministic=False)
    assert few.word == MEASURE_MORE
    assert few.sentence.startswith("MEASURE MORE: 0.98x [0.89, 2.16] over 3 prompts")
    assert "slower" not in few.sentence and "6 prompts or more" in few.sentence
    wide = judge(on_arm([0.9, 1.0, 1.1, 1.2, 1.5, 1.6, 1.7, 2.0]), deterministic=True)
    assert wide.word == MEASURE_MORE and "holds the limit" in wide.sentence
    told = judge(on_arm([1.0, 1.05, 1.1, 1.1, 1.1, 1.15, 1.4, 1.5]), deterministic=True)
    assert told.word == MEASURE_MORE and "prompts would tell" in told.sentence


def test_tokens_that_were_never_promised_are_no_alarm() -> None:
    on = on_arm([2.0] * 6, tokens=(1, 2, 3, 5))
    off = replace(on, arm="off")
    for promised, shown in ((True, "NO"), (False, "not promised")):
        console = Console(width=80, file=io.StringIO(), record=True)
        verdict = judge(on, deterministic=promised)
        _print_result(console, (off, on), verdict, promised=promised)
        text = console.export_text()
        assert shown in text and ("--seed" in text) is not promised


def test_the_table_of_compare_fits_80_columns_and_says_what_each_figure_is() -> None:
    """A speed-up of 1.04x beside medians that got worse: they are medians of other things."""
    off = [make_run("off", seconds, prompt=i) for i, seconds in enumerate((0.1, 1.0, 3.0))]
    on = [
        make_run("on", seconds, prompt=i, accepted=(1, 2))
        for i, seconds in enumerate((0.09, 1.1, 2.5))
    ]
    summaries = summaries_of(*off, *on)
    assert summaries["on"].speedup.median > 1
    assert summaries["on"].latency_s.median > summaries["off"].latency_s.median
    console = Console(width=80, file=io.StringIO(), record=True)
    arms = summaries["off"], summaries["on"]
    _print_result(console, arms, judge(summaries["on"], deterministic=True), promised=True)
    text = console.export_text()
    assert "\u2026" not in text and "speed-up by prompt" in text
    assert "the median of what each prompt gained" in " ".join(text.split())
