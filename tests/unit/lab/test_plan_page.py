"""A plan says one thing: verdict, tables, schedule, commands and exit code agree, on any setup, and
what was given counts.
"""

import io
import json
import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from rich.console import Console
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.control.acceptance import ConstantAcceptance
from foretoken.errors import ConfigError
from foretoken.lab.launch.read import read_source
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine
from foretoken.lab.plan.checks import LEAST_END_TO_END, NOT_ASKED
from foretoken.lab.plan.page import plan_document, print_plan
from foretoken.lab.plan.planner import SpeculationPlan, build_plan
from foretoken.lab.plan.setup import ENGINES, WORKLOADS, PlanSettings
from foretoken.lab.verdict import EXIT_CODES, LEAVE_IT_OFF, MEASURE_MORE, USE_IT

OFF = "--speculative-config none"
PAIRS = (
    ("llama-3.1-70b", "llama-3.2-1b"),
    ("llama-3.1-70b", "llama-3.1-8b"),
    ("llama-3.1-70b", "qwama-0.5b"),
    ("llama-3.1-8b", "llama-3.2-1b"),
    ("qwen3-8b", "qwen3-0.6b"),
    ("qwen3-30b-a3b", "qwen3-0.6b"),
    ("qwen2.5-72b", "qwen2.5-0.5b"),
    ("qwen3-8b", None),
    ("gpt-oss-120b", None),
)


@st.composite
def asked(draw: st.DrawFn) -> PlanSettings:
    """Anything that one may ask of a plan."""
    target, model = draw(st.sampled_from(PAIRS))
    methods = ["draft_model"] if model else ["ngram", "suffix", "eagle3", "eagle", "dflash", "none"]
    context = draw(st.sampled_from((512, 4096, 32768)))
    usual = draw(st.sampled_from((1, 8, 40, 200)))
    return PlanSettings(
        target=target,
        draft=model,
        method=draw(st.sampled_from(methods)),
        engine=draw(st.sampled_from(ENGINES)),
        quantization=draw(st.sampled_from(("bf16", "fp8", "int4"))),
        device=draw(st.sampled_from(("h100", "a100", "rtx-4090", "epyc-9654", "m2-ultra"))),
        count=draw(st.sampled_from((1, 2, 4))),
        num_speculative_tokens=draw(st.sampled_from((0, 0, 1, 4, 12))),
        context=context,
        output_tokens=draw(st.sampled_from((16, 128, 256))),
        concurrency=usual,
        peak_concurrency=usual * draw(st.sampled_from((1, 4))),
        workload=draw(st.sampled_from(tuple(WORKLOADS))),
        temperature=draw(st.sampled_from((0.0, 0.8))),
        slo=draw(st.sampled_from(("tpot", "tpot", "ttft", "throughput"))),
        draft_tensor_parallel_size=draw(st.sampled_from((0, 1))),
    )


def planned(question: PlanSettings) -> SpeculationPlan:
    """Its plan; a question that has none is not asked."""
    try:
        return build_plan(question)
    except ConfigError:
        assume(False)
        raise


def page(
    plan: SpeculationPlan, *, everything: bool = False, width: int = 200, terminal: bool = False
) -> str:
    """What is printed."""
    text = io.StringIO()
    console = Console(file=text, width=width, force_terminal=terminal, color_system=None)
    print_plan(console, plan, everything=everything)
    return text.getvalue()


def speculative(command: str) -> dict[str, Any] | None:
    """The speculative configuration of a command."""
    found = re.search(r"--speculative-config '(\{.*?\})'", command)
    return json.loads(found[1]) if found else None


@pytest.mark.slow
@given(asked())
@settings(max_examples=60, deadline=None)
def test_headline_schedule_table_and_command_say_the_same(question: PlanSettings) -> None:
    plan = planned(question)
    verdict, usual = plan.verdict, plan.prediction.at(plan.setup.usual)
    text = page(plan)
    word = verdict.word
    assert text.startswith(f"{word}: ") and verdict.exit_code == EXIT_CODES.get(word, 0)
    if question.method == "none":
        assert verdict.word == NOT_ASKED
    if not verdict.speculates:
        for engine, command in plan.commands.items():
            said = command.replace("Foretoken does not", "").replace(OFF, "")
            assert "spec" not in said, (engine, command)
            serves = engine == "foretoken" and "foretoken serve" in command
            assert serves == (OFF in command), "`foretoken serve` speculates unless told otherwise"
        assert verdict.exit_code == (0 if verdict.word == NOT_ASKED else 1) and verdict.k == 0
        return
    deciding = plan.latencies[1 if question.slo == "throughput" else 0]
    assert verdict.k == deciding.k == plan.schedule.at(deciding.requests) == plan.schedule.decided
    assert verdict.k > 0
    gain = plan.prediction.at(deciding.requests).gain(verdict.k)
    assert f"predicted {gain.middle:.2f}x ({gain.low:.2f} to {gain.high:.2f})" in verdict.reason
    assert f"{deciding.end_to_end_gain:.2f}x for a whole answer" in verdict.reason
    assert f"k = {verdict.k} " in verdict.reason and gain.middle > 1.0
    assert (verdict.word == USE_IT) == (gain.low > 1.0 and deciding.end_to_end_low >= 1.0)
    assert deciding.requests <= plan.plain.requests, "no more are in flight than fit"
    assert deciding.end_to_end_gain >= LEAST_END_TO_END
    if not question.num_speculative_tokens:
        best = plan.prediction.at(deciding.requests)
        assert (verdict.k, gain.middle) == (best.best_k, best.best)
    config = speculative(plan.commands["vllm"])
    assert config is not None
    ranges = config.get("num_speculative_tokens_per_batch_size", [])
    if ranges:
        ks = [k for _, _, k in ranges]
        assert ks == sorted(ks, reverse=True), "the engine's list may not rise"
        told = [
            next(k for first, last, k in ranges if first <= load.requests <= last)
            for load in plan.latencies
        ]
    else:
        told = [config["num_speculative_tokens"]] * 2
        assert told[0] == plan.schedule.decided
        if len(plan.schedule.steps) > 1:
            assert not plan.schedule.falls or not question.draft
    if question.engine == "vllm":
        assert told == [load.k for load in plan.latencies], "the numbers are those of the command"
    if question.slo != "throughput" and plan.setup.peak > usual.requests:
        peak = plan.prediction.at(plan.setup.peak)
        k = plan.schedule.told(peak.requests)
        there = f"{peak.gain(k).middle:.2f}x at the peak" if k else "off at the peak"
        assert there in verdict.reason
    source = read_source(plan.commands[question.engine], question.engine)
    assert all(one.level != "error" for one in lint(source, Machine()).findings)


@pytest.mark.slow
@given(asked())
@settings(max_examples=60, deadline=None)
def test_the_schedule_and_the_times_are_those_of_the_table(question: PlanSettings) -> None:
    plan = planned(question)
    prediction = plan.prediction
    for load in prediction.loads:
        assert load.low <= load.middle <= load.high
        assert load.best >= max(1.0, load.gain(min(4, plan.setup.k)).middle) / 1.021
        if plan.setup.method != "none" and not question.num_speculative_tokens:
            assert plan.schedule.at(load.requests) == load.best_k
    for times in plan.latencies:
        assert times.ttft_s >= times.ttft_plain_s > 0
        if times.k == 0:
            assert times.tpot_s == times.tpot_plain_s


@pytest.mark.slow
@given(asked())
@settings(max_examples=40, deadline=None)
def test_a_page_is_a_page_and_no_memory_is_negative(question: PlanSettings) -> None:
    plan = planned(question)
    text = page(plan)
    assert len(text.splitlines()) <= 90
    shares = r"\b[1-9]\d{2,}%"  # a share is at most 100 %, which is written so
    for negative in (r"-\d[\d,.]* GB", r"-\d+ of the", r"\bnan\b", r"\binf\b"):
        assert not re.search(negative, text + page(plan, everything=True)), negative
    assert set(re.findall(shares, text + page(plan, everything=True))) <= {"100%"}
    document = plan_document(plan)
    assert document["exit_code"] == plan.verdict.exit_code
    assert json.loads(json.dumps(document))["verdict"]["word"] == plan.verdict.word


@pytest.mark.slow
@given(asked())
@settings(max_examples=40, deadline=None)
def test_a_terminal_of_80_columns_cuts_nothing(question: PlanSettings) -> None:
    plan = planned(question)
    narrow = page(plan, width=80, terminal=True)
    said, _, _ = narrow.partition("\nserve it with")
    assert "\u2026" not in narrow, "a cell is cut"
    assert max(map(len, said.splitlines())) <= 80
    # Every cell of the wide page stands whole on the narrow one.
    numbers = re.compile(r"\d+\.\d\dx k\d+|[\d,]+ \([\d,]+\)|[\d.]+ m?s, [\d.]+ m?s")
    wide = page(plan)
    assert sorted(numbers.findall(narrow)) == sorted(numbers.findall(wide))
    assert "\u2026" not in page(plan, width=80, everything=True)


def test_json_says_what_fits() -> None:
    plan = build_plan(PlanSettings(target="llama-3.1-70b", draft="llama-3.2-1b", count=4))
    fits = plan_document(plan)["what_fits"]
    rows = {(row["quantization"], row["count"]): row for row in fits["rows"]}
    own = rows[plan.setup.quantization.name, 4]
    assert (own["plain"], own["speculating"]) == (plan.plain.requests, plan.speculating.requests)
    assert rows["bf16", 1]["speculating"] == 0 < rows["bf16", 8]["speculating"]
    assert fits["context"] == 4096 and fits["device"] == "h100-sxm"
    assert 0 < fits["most_context"]["speculating"] < fits["most_context"]["plain"]
    shown = page(plan)
    for row in fits["rows"]:
        assert not row["speculating"] or f"{row['speculating']:,} ({row['plain']:,})" in shown


@pytest.mark.parametrize("method", ["ngram", "suffix", "eagle3"])
def test_break_even_pays_for_the_look_ups_that_find_nothing(method: str) -> None:
    """A thousand steps at the rate that breaks even take as long as plain ones do."""
    plan = build_plan(PlanSettings(target="gpt-oss-120b", method=method, device="h200", count=2))
    load, k = plan.prediction.at(8), plan.setup.k
    hits = plan.prediction.acceptance.hits
    assert (hits < 1.0) == (method != "eagle3")
    with_drafts = 1000 * hits
    seconds = with_drafts * load.verify_cost + (1000 - with_drafts) + 1000 * k * load.draft_cost
    tokens = 1000 + with_drafts * k * load.break_even_rate
    assert tokens == pytest.approx(seconds)
    expected, limit = plan.prediction.rates(8, k)
    assert limit == pytest.approx(load.break_even_rate)
    assert (expected > limit) == (load.middle > 1.0)
    assert f"breaks even at {plan.prediction.rates(8, plan.schedule.told(8))[1]:.0%}" in page(plan)


@pytest.mark.parametrize(
    ("settings", "code", "word"),
    [
        (["llama-3.1-70b", "--draft", "llama-3.2-1b", "--count", "4"], 0, "USE IT"),
        (["llama-3.1-70b", "--draft", "llama-3.2-1b", "--count", "1"], 1, "LEAVE IT OFF"),
        (["qwen3-8b", "--draft", "qwen3-0.6b", "--slo", "ttft"], 1, "LEAVE IT OFF"),
        (["gpt-oss-120b", "--method", "eagle3", "--count", "2"], 4, "MEASURE MORE"),
        (["qwen3-8b", "--method", "none"], 0, "NO SPECULATION ASKED"),
        (["qwen3-8b", "--method", "magic"], 2, "magic"),
    ],
)
def test_the_exit_code_is_the_first_word(settings: list[str], code: int, word: str) -> None:
    result = CliRunner().invoke(app, ["lab", "plan", *settings], env={"COLUMNS": "150"})
    assert result.exit_code == code, result.output
    assert word in result.output
    if code in (0, 1, 4):
        assert result.stdout.startswith(word)


@pytest.mark.slow
def test_the_smallest_draft_is_not_always_the_best() -> None:
    """Nor the largest: what a draft costs and how often it is right are weighed."""
    three = "qwama-0.5b,llama-3.2-1b,llama-3.1-8b"
    plan = build_plan(PlanSettings(target="llama-3.1-70b", draft=three, count=2, device="h200"))
    gains = {one.draft.split("/")[-1]: one.prediction.at(8).best for one in plan.drafts}
    assert len(gains) == 3 and min(gains, key=lambda name: gains[name]).startswith("Qwama")
    assert plan.setup.draft is not None
    usable = {one.draft: one.prediction.at(8).best for one in plan.drafts if not one.problem}
    assert plan.setup.draft.name == max(usable, key=lambda name: usable[name])
    assert all(name[:12] in page(plan) for name in gains)


def test_a_draft_that_cannot_be_used_is_not_chosen_and_says_why() -> None:
    drafts = "qwen2.5-0.5b,qwen2.5-7b"
    plan = build_plan(PlanSettings(target="qwen2.5-72b", draft=drafts, count=4))
    bad, good = plan.drafts
    assert bad.problem and not good.problem
    assert plan.setup.draft is not None and plan.setup.draft.name == good.draft
    assert bad.problem in page(plan)


@pytest.mark.slow
def test_bits_of_the_target_and_the_work_move_what_is_expected() -> None:
    def chance(**changes: Any) -> float:
        base = {"target": "llama-3.1-70b", "draft": "llama-3.2-1b", "count": 4}
        return build_plan(
            PlanSettings.from_mapping({**base, **changes})
        ).prediction.acceptance.middle

    assert chance(quantization="int4") < chance()
    assert chance(temperature=0.8) < chance()
    assert chance(workload="creative") < chance() < chance(workload="code")
    assert chance(draft="llama-3.1-8b") > chance()


def test_every_method_stands_side_by_side() -> None:
    plan = build_plan(PlanSettings(target="llama-3.1-8b", draft="llama-3.2-1b"))
    text = page(plan)
    for word in ("ngram", "suffix", "eagle3", "draft_model", "medusa", "mlp"):
        assert word in text, word
    assert "first token" in text and "What fits" in text


def test_a_schedule_that_rises_is_advice() -> None:
    """Few rows of a mixture of experts touch many experts anew; many share them."""
    plan = build_plan(PlanSettings(target="gpt-oss-120b", method="eagle3", count=2))
    assert not plan.schedule.falls
    config = speculative(plan.commands["vllm"])
    assert config is not None and "num_speculative_tokens_per_batch_size" not in config
    assert config["num_speculative_tokens"] == plan.schedule.decided
    assert "may not rise with the load" in page(plan).replace("\n", " ")
    peak = plan.prediction.loads[-1].requests
    assert plan.schedule.told(peak) == plan.schedule.decided != plan.schedule.at(peak)


@pytest.mark.slow
def test_an_engine_that_takes_one_number_is_predicted_with_it() -> None:
    given = PlanSettings(
        target="llama-3.3-70b", draft="llama-3.2-1b", count=4, peak_concurrency=256
    )
    listed, single = (build_plan(replace(given, engine=engine)) for engine in ("vllm", "llama.cpp"))
    assert listed.schedule.follows and not single.schedule.follows
    assert listed.latencies[1].k < listed.latencies[0].k, "the list falls"
    assert single.latencies[1].k == single.latencies[0].k == single.schedule.decided
    assert "takes one number for all loads" in page(single).replace("\n", " ")


def test_a_way_that_is_there_and_gains_more_is_named() -> None:
    plan = build_plan(PlanSettings(target="gpt-oss-120b", method="eagle3", device="h200"))
    assert plan.verdict.word == LEAVE_IT_OFF and "in flight k = " in plan.verdict.reason
    assert plan.instead == "suffix"
    text = page(plan)
    assert "suffix is there and expected to gain more" in text
    assert text.rstrip().endswith("Next: the same with --method suffix")


@pytest.mark.slow
def test_a_drafter_without_room_is_no_verdict_on_those_that_need_none() -> None:
    two = PlanSettings(target="llama-3.1-70b", draft="llama-3.2-1b", count=2)
    plan = build_plan(two)
    assert plan.verdict.word == LEAVE_IT_OFF and "beside the drafter" in plan.verdict.reason
    alone = build_plan(replace(two, draft=None, method="suffix"))
    assert plan.instead == "suffix" and alone.verdict.speculates
    assert build_plan(replace(two, slo="ttft")).instead == ""
    assert build_plan(replace(two, count=8)).instead == "", "the draft gains more"


def test_a_target_that_does_not_fit_gets_no_command() -> None:
    plan = build_plan(PlanSettings(target="llama-3.1-70b", draft="llama-3.2-1b", device="h200"))
    assert "141.1 GB of them the target's own" in plan.verdict.reason and not plan.instead
    for one in (plan, build_plan(PlanSettings(target="llama-3.1-70b", method="none"))):
        text = page(one)
        assert "vllm serve" not in text and "no command: the target does not fit" in text


@pytest.mark.parametrize(
    ("engine", "method"),
    [("vllm", "mlp"), ("vllm", "medusa"), ("llama.cpp", "eagle"), ("llama.cpp", "medusa")],
)
def test_an_engine_without_the_method_is_not_told_to_use_it(engine: str, method: str) -> None:
    plan = build_plan(PlanSettings(target="llama-3.1-8b", method=method, engine=engine))
    text = page(plan)
    assert plan.verdict.word == LEAVE_IT_OFF and engine in plan.verdict.reason
    assert f"({method})" in text and method not in plan.commands[engine]
    own = build_plan(PlanSettings(target="llama-3.1-8b", method=method, engine="foretoken"))
    assert own.verdict.word != LEAVE_IT_OFF and own.commands[engine].startswith("# ")


def test_only_a_mixture_of_experts_is_said_to_read_its_experts() -> None:
    dense = build_plan(PlanSettings(target="llama-3.1-8b", method="eagle"))
    assert not dense.schedule.falls and "experts" not in page(dense, everything=True)
    assert "longer for many rows" in page(dense)


def test_what_was_asked_for_stays_asked_for() -> None:
    plan = build_plan(
        PlanSettings(target="llama-3.1-8b", draft="llama-3.2-1b", num_speculative_tokens=2)
    )
    assert {k for k, _ in plan.schedule.steps} <= {0, 2} and plan.verdict.k == 2


def test_prompts_make_a_gain_small_and_the_verdict_knows() -> None:
    """Twice as fast per token is nothing if nearly all of the time is the prompt."""
    long = PlanSettings(
        target="llama-3.1-8b", draft="llama-3.2-1b", context=32768, output_tokens=16
    )
    plan = build_plan(long)
    assert plan.verdict.word == LEAVE_IT_OFF and plan.verdict.exit_code == 1
    assert "wait" in plan.verdict.reason
    more = build_plan(replace(long, context=2048, output_tokens=1024))
    assert more.verdict.speculates


BIG: dict[str, Any] = {
    "target": "llama-3.1-70b", "draft": "llama-3.1-8b", "quantization": "fp8", "count": 2,
}  # fmt: skip


def plan_of(**changes: Any) -> SpeculationPlan:
    return build_plan(PlanSettings(**{**BIG, **changes}))


@pytest.mark.parametrize("k", [1, 3, 8])
def test_a_rate_is_of_all_drafted_tokens(k: int) -> None:
    plan = plan_of(rate="0.38", num_speculative_tokens=k)
    own = plan.prediction.acceptance
    assert ConstantAcceptance(own.middle).rate(k) == pytest.approx(0.38)
    assert plan.prediction.rates(8, k)[0] == pytest.approx(0.38)


def test_an_acceptance_that_can_be_read_in_two_ways_names_the_other() -> None:
    assert "what servers count over drafted tokens is --rate" in page(plan_of(acceptance="0.38"))


@pytest.mark.parametrize("given", [{"rate": "38"}, {"rate": "0.4", "acceptance": "0.4"}])
def test_a_wrong_rate_is_named(given: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"plan\.rate"):
        plan_of(**given)


@pytest.mark.parametrize(
    ("engine", "heat", "drawn"),
    [
        ("vllm", 0.8, True),
        ("vllm", 0.5, False),
        ("llama.cpp", 0.8, True),
        ("vllm", 0.0, False),
        ("foretoken", 0.8, False),
    ],
)
def test_how_drafts_are_sampled_is_said(engine: str, heat: float, drawn: bool) -> None:
    plan = plan_of(engine=engine, temperature=heat, draft="llama-3.2-1b", count=8)
    assert plan.verdict.speculates
    said = "as in this command; greedy ones may be accepted more often" in page(plan)
    assert said == drawn == ("probabilistic" in plan.commands[engine])


def test_no_more_are_in_flight_than_fit() -> None:
    """One request of 4,096 tokens fits beside 70 GB of weights on one device."""
    plan = plan_of(draft=None, quantization="int8", count=1)
    assert (plan.plain.requests, plan.setup.usual, plan.setup.peak) == (1, 1, 1)
    assert "and 1 in flight (as many as fit; the rest of 8 waits)" in plan.verdict.reason
    text = page(plan)
    assert "8 usual" not in text and "the peak is 64: the rest waits" in text
    assert not re.search(r"[1-9]\d{2,}%", text.replace("100%", ""))


def test_a_draft_beside_a_target_without_room_is_no_percentage() -> None:
    text = page(plan_of(target="llama-3.1-405b", count=1))
    assert "the target alone is larger than the memory" in text


@pytest.mark.parametrize("written", [20, 64, 1024])
def test_the_whole_answer_is_in_the_headline(written: int) -> None:
    plan = plan_of(draft="llama-3.2-1b", output_tokens=written)
    times = plan.latencies[0]
    whole = f"{times.end_to_end_gain:.2f}x for a whole answer of {written:,} tokens"
    assert whole.replace(",", "") in page(plan).splitlines()[0].replace(",", "")
    assert times.end_to_end_gain == pytest.approx(times.end_to_end_plain_s / times.end_to_end_s)


def test_a_gain_that_may_be_a_loss_of_whole_answers_is_measured_first() -> None:
    plan = plan_of(draft="llama-3.1-8b", output_tokens=20, count=4)
    assert plan.prediction.at(8).gain(plan.verdict.k).low > 1.0
    assert plan.latencies[0].end_to_end_low < 1.0 and plan.verdict.word == MEASURE_MORE


def test_a_draft_model_on_fewer_ranks_is_what_lint_says_it_is() -> None:
    for engine, level in (("vllm", "error"), ("llama.cpp", "warning")):
        plan = plan_of(draft="llama-3.2-1b", draft_tensor_parallel_size=1, engine=engine)
        [found] = [one for one in plan.findings if one.check == "tp_symmetry"]
        assert found.level == level
        if engine == "vllm":
            assert "split the draft over 2 ranks" in plan.verdict.reason and not plan.instead
            assert '"method"' not in plan.commands[engine]


def test_what_an_engine_imports_is_said() -> None:
    for engine, needs in (("vllm", True), ("foretoken", False)):
        plan = plan_of(draft=None, method="suffix", engine=engine)
        assert plan.verdict.speculates
        assert ("It needs the package arctic-inference" in page(plan)) == needs
    call = ["lab", "tune", "vllm serve m", "--workload", "demo", "--drafter", "suffix", "--dry-run"]
    assert "imports arctic-inference" in CliRunner().invoke(app, call).output


def test_a_page_says_what_a_mixtures_rows_cost() -> None:
    """V of rows, experts and bytes of a step; of a dense model there is no such table."""
    found = page(build_plan(PlanSettings(target="gpt-oss-120b", device="h100", method="ngram")))
    assert "Experts that a step reads, of 128" in found and "V: tokens to break even" in found
    rows = re.findall(r"^\W*(\d+)\W+([\d.]+)\W+([\d.]+)\W+([\d.]+)\W*$", found, re.MULTILINE)
    assert [row[:2] for row in rows] == [
        ("1", "4"), ("2", "7.9"), ("4", "15.3"), ("6", "22.2"), ("8", "28.7"), ("16", "51"),
    ]  # fmt: skip
    assert [float(row[3]) for row in rows] == sorted(float(row[3]) for row in rows)
    dense = build_plan(PlanSettings(target="llama-3.1-8b", device="h100", method="ngram"))
    assert "Experts" not in page(dense)


def test_what_foretoken_maps_loads() -> None:
    """Experts may be larger than a CPU's memory, in one process."""
    alone = PlanSettings(target="qwen3-235b-a22b", quantization="bf16", device="epyc-9654",
                         engine="foretoken", utilization=0.3)  # fmt: skip
    two = replace(alone, tensor_parallel_size=2)
    assert "keeps experts on the disk" in page(build_plan(alone))
    assert "does not load" in page(build_plan(two))
