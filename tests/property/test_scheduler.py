"""Whatever arrives, whatever is drafted, however few pages: each request gives its own tokens."""

from collections.abc import Sequence
from dataclasses import replace
from random import Random

import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from foretoken.control.plan import DecodingSequence, DraftPlan, DraftPlanner, StepLoad
from foretoken.runtime.scheduling.scheduler import SchedulerConfig
from foretoken.shape.memory_formula import most_pages
from foretoken.types import FinishReason, Request
from tests.unit.scheduler_fakes import (
    VOCAB,
    FakeEngine,
    FakeWindow,
    expected_output,
    make_request,
    noisy,
)


def any_plan(random: Random) -> DraftPlanner:
    """Any budget at any time."""

    def plan(sequences: Sequence[DecodingSequence], load: StepLoad) -> DraftPlan:
        drafts = tuple(random.choice((0, 0, 1, 2, 3, 5, 9)) for _ in sequences)
        return DraftPlan(load=load, budgets=drafts)

    return plan


def draw_requests(random: Random) -> list[Request]:
    """Requests that often begin alike, in no order of arrival or priority."""
    common = [random.randrange(VOCAB) for _ in range(20)]
    requests = []
    for index in range(random.randint(1, 12)):
        own = [random.randrange(VOCAB) for _ in range(random.randint(1, 10))]
        max_tokens = random.choice((1, 5, 14, 30, 30))
        request = make_request(
            f"r{index}",
            tuple((common[: random.choice((0, 4, 9, 16, 20))] + own)[:21]),
            max_tokens=max_tokens,
            min_tokens=random.choice((0, 0, random.randint(0, max_tokens))),
            priority=random.choice((0, 0, 0, -1, 2)),
            arrival=float(random.randint(0, 3)),
            stop_ids=frozenset(random.choice(((), (), (random.randrange(VOCAB),)))),
            prompt_logprobs=random.choice((None, None, None, 0)),
            cache_salt=random.choice((None, None, None, "a")),
        )
        requests.append(request)
    return requests


def broken_off(request: Request, max_len: int, random: Random) -> Request:
    """The request, or what is left of it after another engine wrote some of its output."""
    whole, _ = expected_output(request, max_len)
    count = random.choice((0, 0, random.randrange(len(whole))))
    return replace(request, resumed_ids=tuple(whole[:count]))


def draw_config(random: Random) -> SchedulerConfig:
    return SchedulerConfig(
        max_num_seqs=random.randint(1, 6),
        max_num_batched_tokens=random.choice((1, 3, 8, 16, 40)),
        max_model_len=random.choice((22, 30, 60, 60)),
        enable_prefix_caching=random.random() < 0.7,
        max_prompt_logprob_tokens=random.randint(1, 6),
    )


def drive(engine: FakeEngine, arrivals: list[Request], random: Random) -> set[str]:
    """Add requests and step in random turns, abort and cancel now and then; the aborted ids."""
    aborted: set[str] = set()
    for _ in range(1500):
        engine.clock += 1.0
        while arrivals and random.random() < 0.4:
            engine.add(arrivals.pop())
        live = sorted(engine.scheduler.sequences)
        batch = engine.plan()
        assert batch.spans or not live
        planned = sum(span.length + span.draft_budget for span in batch.spans)
        assert planned <= engine.scheduler.config.max_num_batched_tokens
        owners = [span.sequence.request.request_id for span in batch.spans]
        assert len(set(owners)) == len(owners), owners
        if live and random.random() < 0.05:
            aborted.add(live[0])
            engine.abort(live[0])
        if random.random() < 0.05:
            engine.scheduler.cancel(batch)
            engine.scheduler.check_integrity()
        else:
            engine.finish(batch)
        if not arrivals and not engine.scheduler.has_unfinished:
            return aborted
    raise AssertionError(f"unfinished: {dict(engine.scheduler.sequences)}")


def draw_window(random: Random, num_pages: int, page_size: int, step_tokens: int) -> FakeWindow:
    """A layer with a window, and as much memory as one sequence on all pages needs, or more."""
    window, rest, each = random.randint(1, 20), random.choice((1, 3)), random.choice((1, 2, 30))
    most = min(num_pages, most_pages(window, step_tokens, page_size))
    more = random.choice((0, 0, 1, each * random.randint(0, 20)))
    num_bytes = num_pages * rest + most * each + more
    return FakeWindow(window=window, page_bytes=each, rest_bytes=rest, num_bytes=num_bytes)


@pytest.mark.parametrize("windowed", [False, True])
@given(seed=st.integers(0, 2**32))
def test_every_request_gives_its_own_tokens(windowed: bool, seed: int) -> None:
    random = Random(seed)
    page_size = random.randint(1, 5)
    num_pages = -(-random.randint(22, 70) // page_size)
    config, window = draw_config(random), None
    if windowed:
        window = draw_window(random, num_pages, page_size, config.max_num_batched_tokens)
    engine = FakeEngine(
        num_pages=num_pages,
        page_size=page_size,
        drafter=noisy(random),
        config=config,
        window=window,
        plan_drafts=any_plan(random),
    )
    if engine.shared is not None:
        # A drafter beside it writes what it can have, in turns with the target.
        drafts = engine.shared.add({"d"}, random.randint(1, 9), lambda runs: None)
        draft = engine.drafter
        engine.drafter = lambda span: drafts.take(span.sequence.page_table) and draft(span) or ()
    max_len = engine.scheduler.max_len
    arrivals = [broken_off(request, max_len, random) for request in draw_requests(random)]
    aborted = drive(engine, list(arrivals), random)
    for request in arrivals:
        check_outputs(engine, request, request.request_id in aborted)
    assert engine.pool.num_available == num_pages, "pages were lost"
    event(f"preempted: {engine.scheduler.num_preemptions > 0}")
    event(
        f"prefix hits: {bool(engine.scheduler.prefix and engine.scheduler.prefix.num_hit_tokens)}"
    )
    event(f"evicted: {engine.pool.num_evicted > 0}")
    if engine.shared is not None and engine.shared.windows is not None:
        event(f"let go: {engine.shared.windows.num_reclaimed > 0}")


def check_outputs(engine: FakeEngine, request: Request, aborted: bool) -> None:
    """One ending, the right tokens, everything else in step with them."""
    outputs = engine.outputs[request.request_id]
    tokens = engine.tokens(request.request_id)
    ends = [output.finish_reason for output in outputs if output.finish_reason is not None]
    assert len(ends) == 1, ends
    assert outputs[-1].finish_reason == ends[0]
    whole, reason = expected_output(request, engine.scheduler.max_len)
    expected = whole[len(request.resumed_ids) :]
    if aborted and ends[0] is FinishReason.ABORT:
        assert tokens == expected[: len(tokens)]
    else:
        assert (tokens, ends[0]) == (expected, reason)
    for output in outputs:
        assert len(output.sources) == len(output.new_token_ids)
        assert output.finish_reason is not None or output.new_token_ids
    metrics = outputs[-1].metrics
    assert metrics is not None
    assert len(metrics.accepted_per_step) == len(metrics.drafted_per_step)
    assert sum(metrics.accepted_per_step) <= len(tokens)
    check_prompt_logprobs(engine, request)


def check_prompt_logprobs(engine: FakeEngine, request: Request) -> None:
    outputs = [o for o in engine.outputs[request.request_id] if o.new_token_ids]
    for index, output in enumerate(outputs):
        if request.params.prompt_logprobs is None or request.resumed_ids or index > 0:
            assert output.prompt_logprobs is None
        else:
            assert output.prompt_logprobs is not None
            first, *others = output.prompt_logprobs
            assert first is None
            ids = [next(iter(entry)) for entry in others if entry is not None]
            assert ids == list(request.prompt_token_ids[1:])
