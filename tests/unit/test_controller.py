"""Adaptive control on a virtual clock: what it promises, where costs and acceptance are known."""

from dataclasses import replace
from random import Random
from typing import Any

import pytest

from foretoken.control.adaptive.drafter import DrafterState
from foretoken.control.adaptive.exploring import PLAIN
from foretoken.control.adaptive.tracked import class_of
from foretoken.control.budget import LivePolicy
from foretoken.control.floor import FIRST_REST, AcceptanceFloor
from foretoken.control.learned.drafter_cost import DraftShape
from foretoken.control.plan import StepLoad
from foretoken.types import SamplingParams, Speculation, StepStats
from tests.marks import slow_but
from tests.unit.control_fakes import Batch, Running, World, running

KNOWN = [(DraftShape(1, 1, 1, 0.0), 0.1)]


def batch_of(count: int, chance: float, world: World | None = None) -> tuple[Batch, list[Running]]:
    batch = Batch(world or World(), lambda sequence, step: chance)
    return batch, [running(f"r{i}") for i in range(count)]


def plain_stats(count: int, seconds: float) -> StepStats:
    """A step of so many sequences in which nobody drafted."""
    return StepStats(
        num_sequences=count, num_tokens=count, num_drafts=0, num_draft_tokens=0,
        num_accepted_tokens=0, num_accepted_tokens_per_pos=(), num_output_tokens=count,
        num_waiting=0, drafting_s=0.0, verifying_s=seconds, total_s=seconds, num_sampled=count,
    )  # fmt: skip


def best_speed(world: World, count: int, chance: float, most: int = 5) -> float:
    speeds = [1.0]
    for k in range(1, most + 1):
        tokens = sum(chance**j for j in range(k + 1))
        seconds = world.target_s(count * (k + 1)) + world.draft_s(k, count * k, 0)
        speeds.append(tokens * world.target_s(count) / seconds)
    return max(speeds)


@pytest.mark.parametrize("count", slow_but([1, 4, 8, 32], 4))
@pytest.mark.parametrize("chance", slow_but([0.0, 0.3, 0.6, 0.8, 0.95], 0.0))
def test_steady_traffic_is_nearly_as_fast_as_the_best_fixed_length(
    count: int, chance: float
) -> None:
    """Which drafts are accepted is drawn: of three runs the mean counts."""
    speeds = []
    for seed in (1, 2, 3):
        batch, sequences = batch_of(count, chance, World(random=Random(seed)))
        batch.run(sequences, 600)
        speeds.append(batch.run(sequences, 6000 // count))
    assert sum(speeds) / 3 >= 0.95 * best_speed(World(), count, chance)


@pytest.mark.parametrize("count", [1, 3])
def test_long_drafts_are_planned_up_to_the_end_of_an_output(count: int) -> None:
    batch = Batch(World(pass_s=0.01, row_s=0.0), lambda sequence, step: 0.95, most=20)
    sequences = [running(f"r{i}", most=60) for i in range(count)]
    while sequences:
        batch.step(sequences)
        sequences = [s for s in sequences if s.num_output < 60]


@pytest.mark.parametrize("count", [1, 8])
def test_a_useless_drafter_rests(count: int) -> None:
    batch, sequences = batch_of(count, 0.0)
    batch.run(sequences, 50)
    assert batch.run(sequences, 1000) >= 0.98
    assert sum(map(sum, batch.lengths[-500:])) <= 0.1 * 500 * count


@pytest.mark.slow
def test_a_plan_that_is_kept_for_long_is_not_believed_for_long() -> None:
    """Plans take a third of a step, so each is kept for dozens of steps. Nothing tells answers of
    which all drafts are right from those of which none is, but what becomes of them: a plan made
    when four of these began let them wait for 60 of their 100 tokens, at half their speed."""
    world = World(row_s=0.02, pass_s=0.05)
    batch = Batch(world, lambda one, step: float(is_code(one)), deciding_s=0.3)
    begun: dict[str, float] = {}
    speeds: list[float] = []
    sequences: list[Running] = []
    for _ in range(3000):
        while len(sequences) < 8:
            kind = "c" if sum(map(is_code, sequences)) < 4 else "p"
            sequences.append(running(f"{kind}{len(begun)}", 10, 100))
            begun[sequences[-1].request.request_id] = batch.clock
        batch.step(sequences)
        for one in [sequence for sequence in sequences if sequence.num_output >= 100]:
            batch.control.release(one.request.request_id)
            sequences.remove(one)
            if not is_code(one):
                took_s = batch.clock - begun[one.request.request_id]
                speeds.append(99 * world.target_s(8) / took_s)
    late = sorted(speeds[len(speeds) // 4 :])
    assert len(late) > 50
    assert late[len(late) // 2] >= 0.87
    assert late[0] >= 0.7


def is_code(sequence: Running) -> bool:
    return sequence.request.request_id.startswith("c")


@pytest.mark.slow
def test_who_has_time_lets_others_draft() -> None:
    """The same two classes, where prose may take up to three times as long."""
    world = World(row_s=0.027, pass_s=0.05)
    chances = {"code": 0.95, "prose": 0.2}
    batch = Batch(world, lambda sequence, step: chances[sequence.request.cache_salt or ""])
    guards = {"code": None, "prose": 2.0}
    sequences = [running(f"{name}{i}", salt=name, guard=guards[name])
                 for name in chances for i in range(4)]  # fmt: skip
    batch.run(sequences, 400)
    assert batch.run(sequences, 600) >= 1.4


@pytest.mark.slow
def test_steps_that_are_slow_for_being_rare_do_not_make_drafts_seem_dear() -> None:
    """After a rest the first drafts take twice as long, and those after them do not."""
    batch = Batch(World(cold=2.0), lambda sequence, step: 0.8 if step >= 400 else 0.0)
    sequences = [running(f"r{i}") for i in range(4)]
    batch.run(sequences, 600)
    assert batch.run(sequences, 600) >= 0.93 * best_speed(World(), 4, 0.8)


def test_who_ends_soon_does_not_keep_the_others_from_drafting() -> None:
    """Nobody drafted so far. Two of eight end before what is read of them would come back; the
    others begin once half of them are read, since a pass for one takes as long as for all."""
    batch = Batch(World(row_s=0.01, feed_row_s=0.02), lambda sequence, step: 0.7)
    sequences = [running(f"r{i}", most=400 if i < 6 else 130, guard=2.0) for i in range(8)]
    for sequence in sequences:
        sequence.num_output = 100
    batch.run(sequences, 24)
    drafting = [sum(map(bool, lengths)) for lengths in batch.lengths]
    assert drafting[-1] >= 6
    assert not {1, 2} & set(drafting)


def test_who_held_the_others_back_is_not_remembered_for_long() -> None:
    """One that accepts nothing stops everybody; when it has ended, the others go on."""
    chances = {"code": 0.95, "prose": 0.0}
    batch = Batch(World(), lambda sequence, step: chances[sequence.request.cache_salt or ""])
    slow = running("slow", salt="prose")
    sequences = [*(running(f"r{i}", salt="code") for i in range(3)), slow]
    batch.run(sequences, 300)
    assert not sum(batch.lengths[-1])
    batch.control.release("slow")
    sequences.remove(slow)
    batch.run(sequences, 24)
    assert sum(batch.lengths[-1])


@pytest.mark.parametrize("count", [1, 4])
def test_reading_that_was_never_timed_is_not_free_for_long(count: int) -> None:
    """Whoever is alone is read at once, in the first step with drafts, which tells what it takes;
    several are read in chunks."""
    never_timed = World(feed_row_s=0.0)
    batch = Batch(
        World(feed_row_s=0.03, cold=1.3), lambda sequence, step: 0.8, believed=never_timed
    )
    drafts = []
    for round in range(8):
        sequences = [running(f"{round}-{i}", prompt=2000, most=32) for i in range(count)]
        before = len(batch.lengths)
        batch.answer(sequences)
        drafts.append(sum(map(sum, batch.lengths[before:])))
    assert drafts[0], "who believes that reading is free reads"
    assert sum(drafts[3:]) == 0, drafts


def test_long_answers_are_worth_reading_the_prompt() -> None:
    world = World(feed_row_s=0.002)
    batch = Batch(world, lambda sequence, step: 0.9)
    sequences = [running(f"r{i}", prompt=1000, most=3000) for i in range(2)]
    assert batch.run(sequences, 800) >= 1.5
    chunks = [sum(lengths) for lengths in batch.lengths[:20]]
    assert chunks[0] == 0, "reading comes in chunks where others wait"


@pytest.mark.parametrize(("chance", "least"), [(0.9, 1.1), (0.0, 0.96)])
def test_whoever_is_alone_finds_out_what_a_dear_drafter_is_worth(
    chance: float, least: float
) -> None:
    """A published 1.5B with its 0.5B on two cores: by what is usual the draft model does not pay,
    and it would have to read each prompt for the time of five steps before its first draft."""
    world = World(row_s=0.11, pass_s=0.36, draft_row_s=0.0, feed_row_s=0.08)
    batch = Batch(world, lambda sequence, step: chance)
    for number in range(8):
        batch.answer([running(f"r{number}", prompt=60, most=96)])
    assert batch.plain / batch.clock >= least


@pytest.mark.parametrize("others", [0, 1])
def test_a_first_token_waits_for_no_plan(others: int) -> None:
    """In the step after its first token the batch is plain, and planned for in the next."""
    batch, _ = batch_of(1, 0.9)
    sequences = [running(f"old{i}") for i in range(others + 1)]
    for one in sequences:
        one.num_output = 2
    batch.run(sequences, 100)
    assert sum(batch.lengths[-1]) > 0
    sequences = [*sequences[:others], running("new")]
    batch.run(sequences, 30)
    first, *later = batch.lengths[-30:]
    assert sum(first) == 0
    assert sum(sum(lengths) for lengths in later) > 29


def test_first_steps_are_no_measure_of_plain_ones() -> None:
    """In short answers of which all else is drafted they are the only steps without drafts."""
    batch = Batch(World(fresh=2.0), lambda sequence, step: 0.9)
    for number in range(40):
        batch.answer([running(f"r{number}", most=24)])
    assert batch.control.step_by_rows()[0]["seconds"] < 1.2


def test_a_first_step_without_a_plan_still_looks_up() -> None:
    batch = Batch(World(), lambda sequence, step: 0.9, looked_up=6)
    batch.answer([running("old", most=40)])
    batch.step([running("new", most=5)])
    assert (batch.plans[-1].lengths, batch.plans[-1].budgets) == ((0,), (3,))
    batch.control.release("new")
    batch.step([running("long")])
    assert batch.plans[-1].budgets == (6,)


def test_what_is_looked_up_has_its_place_in_trials_but_in_those_of_plain_steps() -> None:
    batch = Batch(World(), lambda sequence, step: 0.0, looked_up=6)
    sequences, tried = [running("r")], set()
    for _ in range(3000):
        batch.step(sequences)
        active = batch.control._active
        if active is not None and active.trial:
            tried.add(active.trial)
            assert any(batch.plans[-1].budgets) == (active.trial != PLAIN)
            assert max(batch.plans[-1].budgets) in (0, 6)
    assert "draft" in tried
    batch, sequences = Batch(World(), lambda sequence, step: 0.9, looked_up=6), [running("long")]
    batch.answer([running("before", most=40)])  # So that the next begins with what is looked up.
    for _ in range(3000):
        batch.step(sequences)
        active = batch.control._active
        if active is not None and active.trial == PLAIN:
            assert batch.plans[-1].budgets == (0,)
            tried.add(PLAIN)
    assert PLAIN in tried


def answered(batch: Batch, count: int, tokens: int) -> list[float]:
    """So many requests one after another; how many times as fast each was as in plain steps."""
    speeds = []
    for number in range(count):
        one = running(f"one{batch.steps}-{number}", most=tokens)
        clock, plain = batch.clock, batch.plain
        batch.answer([one])
        speeds.append((batch.plain - plain) / (batch.clock - clock))
    return speeds


def test_poor_beginnings_are_not_believed_for_long() -> None:
    """The first three answers accept next to nothing, those that follow gain by drafts."""
    for seed in range(8):
        world = World(row_s=0.04, pass_s=0.09, feed_row_s=0.008, random=Random(seed))
        batch = Batch(
            world, lambda sequence, step: 0.1 if int(sequence.request.request_id[1:]) < 3 else 0.5,
            most=4, deciding_s=0.5,
        )  # fmt: skip
        clock, plain = batch.clock, batch.plain
        for number in range(40):
            if number == 10:
                clock, plain = batch.clock, batch.plain
            batch.answer([running(f"r{number}", prompt=63, most=64)])
        assert (batch.plain - plain) / (batch.clock - clock) >= 1.25, seed


def test_what_a_step_taught_is_learnt_when_the_next_is_planned() -> None:
    """Whoever waits for its tokens does not wait for that."""
    batch, sequences = batch_of(4, 0.9)
    batch.run(sequences, 200)
    planner = batch.control._planner
    classes = [class_of(s.request) for s in sequences]
    seen = planner.acceptance.seen(classes, "draft")
    observe = batch.control.observe
    kept: list[float] = []

    def watched(*given: Any) -> None:
        before = planner.times.target.steps
        observe(*given)
        kept.append(planner.times.target.steps - before)

    batch.control.observe = watched  # type: ignore[method-assign, assignment]
    batch.run(sequences, 100)
    assert kept == [0] * 100
    assert planner.acceptance.seen(classes, "draft") > seen


def test_a_trial_is_told_by_its_classes_though_requests_have_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One that only showed what was known is not followed by the next any sooner for that."""
    told: list[bool] = []
    learn = DrafterState.learn_trial

    def watched(self: DrafterState, lost: float, *, surprising: bool, known: bool) -> None:
        told.append(known)
        learn(self, lost, surprising=surprising, known=known)

    monkeypatch.setattr(DrafterState, "learn_trial", watched)
    batch, sequences = batch_of(4, 0.0)
    batch.run(sequences, 1500)
    assert told[-1]
    told.clear()
    for _ in range(1500):
        batch.step(sequences)
        if any(batch.lengths[-1]):
            break
    batch.control.release(sequences.pop(0).request.request_id)
    batch.run(sequences, 3)
    assert told == [True]


def test_the_operator_is_obeyed_at_once() -> None:
    batch, sequences = batch_of(2, 0.9)
    batch.run(sequences, 50)
    assert sum(batch.lengths[-1])
    batch.live.speculation = Speculation(enabled=False)
    batch.run(sequences, 5)
    assert not any(map(sum, batch.lengths[-5:]))
    batch.live.speculation = LivePolicy().speculation
    batch.run(sequences, 5)
    assert sum(batch.lengths[-1])


def test_slow_steps_in_which_nobody_drafted_cost_nobody_anything() -> None:
    batch, sequences = batch_of(4, 0.9)
    batch.run(sequences, 60)

    def idle(steps: int) -> None:
        """Slow steps of plans whose drafters, for once, found nothing."""
        for _ in range(steps):
            load = StepLoad(num_decoding=4, num_prefilling=0)
            plan = batch.control.plan(sequences, load)
            batch.control.observe(plan, [], plain_stats(4, 20.0))

    idle(8)
    before = batch.control.models()["ledger"]["gained_s"]
    idle(16)
    assert before > 0.0
    assert batch.control.models()["ledger"]["gained_s"] == before


def test_an_ended_request_is_forgotten() -> None:
    batch, sequences = batch_of(3, 0.8)
    batch.run(sequences, 20)
    for sequence in sequences:
        batch.control.release(sequence.request.request_id)
    batch.run([running("other")], 3)
    assert len(batch.control._planner._requests) == 1


def test_a_drafter_at_rest_says_what_its_best_length_would_come_to() -> None:
    batch, sequences = batch_of(8, 0.0)
    assert batch.control.outlook("draft") is None
    batch.run(sequences, 200)
    outlook = batch.control.outlook("draft")
    assert outlook is not None and outlook.drafts >= 1.0
    assert outlook.tokens < outlook.plain_steps, "that is why it rests"
    assert batch.control.outlook("nobody") is None
    assert batch.control.facts()["forgone_tokens"] >= 0.0
    assert [one["rows"] for one in batch.control.step_by_rows()] == [1, 2, 4, 8, 16, 32, 64]


def test_a_request_without_drafts_says_nothing_of_drafters() -> None:
    """Once every drafter rested after a plain answer, since `nobody may have its drafts`."""
    batch, sequences = batch_of(1, 0.0)
    batch.run(sequences, 200)
    before = batch.control.outlook("draft")
    assert before is not None
    batch.control.release(sequences[0].request.request_id)
    params = SamplingParams(temperature=0.0, speculation={"enabled": False})
    plain = running("plain")
    plain = replace(plain, request=replace(plain.request, params=params))
    load = StepLoad(num_decoding=1, num_prefilling=0)
    for _ in range(60):
        assert not batch.control.plan([plain], load).wanted, "the journal counts no such step"
        batch.step([plain])
    assert batch.control.outlook("draft") == before
    batch.live.speculation = Speculation(enabled=False)
    assert batch.control.plan([plain], load).wanted
    assert batch.control.outlook("draft") is None, "by the operator nobody may have drafts"


def test_a_drafter_below_its_floor_is_no_choice_and_no_trial() -> None:
    """At 0.8 drafts pay; the user wants none below 0.9 all the same."""
    floor = AcceptanceFloor(0.9)
    batch = Batch(World(), lambda sequence, step: 0.8, floor=floor)
    sequences = [running("a"), running("b")]
    while not floor.rests:
        batch.step(sequences)
    assert sum(map(sum, batch.lengths))
    plan = batch.control.plan(sequences, StepLoad(num_decoding=2, num_prefilling=0))
    assert plan.lengths == (0, 0), "the plan of before holds no more"
    assert plan.wanted, "the journal is to say that it rests"
    before = batch.control.facts()["trials_s"]
    batch.run(sequences, FIRST_REST - 1)
    assert not any(map(sum, batch.lengths[1 - FIRST_REST :]))
    assert batch.control.facts()["trials_s"] == before
    assert batch.control.outlook("draft") is None
    batch.run(sequences, 60)
    assert sum(map(sum, batch.lengths[-60:])), "its rest is over"
