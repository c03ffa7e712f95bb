"""A batch on a virtual clock: known costs, drawn acceptance, the real control."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random

from foretoken.control.adaptive.allocation import Allocation, DraftOption, StepOptions, allocate
from foretoken.control.adaptive.controller import AdaptiveControl
from foretoken.control.adaptive.drafter import DrafterFacts
from foretoken.control.adaptive.planner import Planner
from foretoken.control.budget import LivePolicy, RequestBudget
from foretoken.control.cost import StepShape
from foretoken.control.floor import AcceptanceFloor
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.control.plan import DraftOutcome, DraftPlan, StepLoad
from foretoken.types import DraftingTime, FinishReason, Request, SamplingParams, StepStats

ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 256, 512)


@dataclass(eq=False)
class Running:
    request: Request
    num_output: int = 1
    num_preemptions: int = 0
    finish_reason: FinishReason | None = None
    read: int = 0
    """Tokens that the drafter has read."""

    @property
    def num_tokens(self) -> int:
        return len(self.request.prompt_token_ids) + self.num_output


def running(
    name: str,
    prompt: int = 100,
    most: int = 10**6,
    salt: str | None = None,
    guard: float | None = None,
) -> Running:
    request = Request(
        request_id=name,
        prompt_token_ids=(1,) * prompt,
        params=SamplingParams(temperature=0.0, speculation={"guard": guard}),
        seed=0,
        max_tokens=most,
        cache_salt=salt,
    )
    return Running(request)


@dataclass
class World:
    """What steps and drafts really take; plain steps of one sequence take 1."""

    row_s: float = 0.03
    pass_s: float = 0.1
    draft_row_s: float = 0.005
    feed_row_s: float = 0.002
    knee: int = 10**6
    knee_s: float = 0.0
    """What each row beyond the knee adds."""
    noise: float = 0.0
    cold: float = 1.0
    """Times as long that drafting and checking take in the first step after a plain one."""
    fresh: float = 1.0
    """Times as long that the first step after a prompt takes."""
    scale: float = 1.0
    random: Random = field(default_factory=lambda: Random(1))

    def target_s(self, rows: int) -> float:
        return self.scale * (1 + self.row_s * (rows - 1) + self.knee_s * max(rows - self.knee, 0))

    def draft_s(self, passes: int, rows: int, fed: int) -> float:
        return self.scale * (passes * self.pass_s + rows * self.draft_row_s + fed * self.feed_row_s)

    def noisy(self, seconds: float) -> float:
        spike = 4.0 if self.noise and self.random.random() < 0.01 else 1.0
        return seconds * spike * math.exp(self.noise * self.random.gauss(0, 1))


class Batch:
    """Steps of some sequences under control, with one drafter."""

    def __init__(
        self,
        world: World,
        chance: Callable[[Running, int], float],
        *,
        most: int = 5,
        floor: AcceptanceFloor | None = None,
        believed: World | None = None,
        deciding_s: float = 0.0,
        looked_up: int = 0,
    ) -> None:
        """`chance`: of a draft of a sequence in a step, given that all before it were accepted.
        `believed`: what was timed at the start, where that was wrong; reading was not if its rows
        take nothing. `deciding_s`: what a plan takes; the dearer it is, the longer it is kept.
        `looked_up`: most drafts of one more drafter, which costs no pass and never finds any."""
        timed = believed or world
        self.floor = floor
        self.world, self.chance, self.most = world, chance, most
        self.clock, self._deciding_s = 0.0, deciding_s
        self.live = LivePolicy()
        target = TargetStepTimeModel([(StepShape(r, r), timed.target_s(r)) for r in ROWS], sd=0.1)
        shapes = [
            DraftShape(n, p, n * p, 0.0, f) for n in (1, 4, 16) for p in (0, 1, 3) for f in (0, 64)
        ]
        known = [
            (s, timed.draft_s(s.passes, s.rows, s.fed_rows))
            for s in shapes
            if (s.passes or s.fed_rows) and (timed.feed_row_s or not s.fed_rows)
        ]
        costs = {"draft": DrafterCost(known, sd=0.1, machine=target)}
        facts = DrafterFacts(
            name="draft", max_drafts=most, missing=lambda s: s.num_tokens - s.read, floor=floor
        )
        every, budgets = [facts], {"draft": most}
        if looked_up:
            every.append(DrafterFacts(name="text", max_drafts=looked_up, looks_up=True))
            costs["text"] = DrafterCost([(DraftShape(1, 1, 1, 0.0), 1e-6)], sd=0.1, machine=target)
            budgets["text"] = looked_up
        planner = Planner(
            RequestBudget(budgets, live=self.live),
            every,
            target,
            costs,
            LearnedAcceptance(dict.fromkeys(budgets, 0.6)),
            self._search,
        )
        self.control = AdaptiveControl(planner, clock=lambda: self.clock)
        self.plain = 0.0
        """What the same tokens would have taken in plain steps."""
        self.steps = 0
        self.searches = 0
        """For the best plan of a step."""
        self._was_plain = False
        self.lengths: list[list[int]] = []
        self.plans: list[DraftPlan] = []

    def _search(self, step: StepOptions, options: Sequence[DraftOption]) -> Allocation:
        self.clock += self._deciding_s
        self.searches += 1
        return allocate(step, options)

    def step(self, sequences: list[Running], prompt: int = 0) -> None:
        count = len(sequences)
        load = StepLoad(
            num_decoding=count, num_prefilling=int(prompt > 0),
            num_prompt_tokens=prompt,
        )  # fmt: skip
        plan = self.control.plan(sequences, load)
        self.lengths.append(list(plan.lengths))
        self.plans.append(plan)
        begins = any(sequence.num_output == 1 for sequence in sequences)
        fed = 0
        for feed in plan.feeds:
            sequences[feed.place].read += feed.rows
            fed += feed.rows
        outcomes = []
        for sequence, length in zip(sequences, plan.lengths, strict=True):
            if not length:
                sequence.num_output += 1
                continue
            fed += max(sequence.num_tokens - sequence.read - self.most - 1, 0)
            accepted = 0
            while accepted < length and self.world.random.random() < self.chance(
                sequence, self.steps
            ):
                accepted += 1
            sequence.num_output += 1 + accepted
            sequence.read = sequence.num_tokens
            outcomes.append(DraftOutcome(sequence.request.request_id, "draft", length, accepted))
        drafts = sum(plan.lengths)
        passes = max(plan.lengths, default=0)
        drafting = self.world.noisy(self.world.draft_s(passes, drafts, fed))
        verifying = self.world.noisy(self.world.target_s(count + drafts + prompt))
        if begins:
            verifying *= self.world.fresh
        if drafts and self._was_plain:
            drafting, verifying = self.world.cold * drafting, self.world.cold * verifying
        self._was_plain = not drafts
        timed = DraftingTime("draft", len(outcomes), passes, drafts, drafting)
        accepted = sum(outcome.num_accepted for outcome in outcomes)
        stats = StepStats(
            num_sequences=count,
            num_tokens=count + drafts + prompt,
            num_drafts=len(outcomes),
            num_draft_tokens=drafts,
            num_accepted_tokens=accepted,
            num_accepted_tokens_per_pos=(),
            num_output_tokens=count + accepted,
            num_waiting=0,
            drafting_s=drafting if outcomes or fed else 0.0,
            verifying_s=verifying,
            total_s=verifying + (drafting if outcomes or fed else 0.0),
            num_sampled=count,
            drafters=(timed,) if outcomes or fed else (),
        )
        if self.floor is not None:
            self.floor.observe("draft", outcomes)
        self.control.observe(plan, outcomes, stats)
        self.clock += stats.total_s
        self.plain += self.world.target_s(count + prompt) * (count + accepted) / count
        self.steps += 1

    def run(self, sequences: list[Running], steps: int) -> float:
        clock, plain = self.clock, self.plain
        for _ in range(steps):
            self.step(sequences)
        return (self.plain - plain) / (self.clock - clock)

    def answer(self, sequences: list[Running]) -> None:
        """Steps until each has written all that it may; whoever has is released."""
        left = list(sequences)
        while left:
            self.step(left)
            for one in [s for s in left if s.num_output >= s.request.max_tokens]:
                self.control.release(one.request.request_id)
                left.remove(one)
