"""A plan for the sequences of a step: what the models say, put together, and the best of it.

Owns what is kept of requests and drafters between plans. Whoever asks decides for how many steps a
plan is kept, and books what became of them.
"""

from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from typing import final

import numpy as np

from foretoken.control.adaptive.active_plan import ActivePlan, PlannedDrafts
from foretoken.control.adaptive.allocation import Search, allocate
from foretoken.control.adaptive.allocation_inputs import AllocationInputs, DrafterView, OutputTokens
from foretoken.control.adaptive.drafter import DrafterFacts, DrafterState, least_gain
from foretoken.control.adaptive.exploring import (
    PLAIN,
    Account,
    is_known,
    pick_trial,
    surprises,
)
from foretoken.control.adaptive.guard import Ledger
from foretoken.control.adaptive.plan_assembly import (
    budgets,
    chance_of_none,
    chunk_rows,
    read_first,
    step_shape,
    surplus,
)
from foretoken.control.adaptive.plan_decision import PlanDecision, held_by
from foretoken.control.adaptive.step_times import PlainTimes, StepTimeModels
from foretoken.control.adaptive.tracked import Counted, TrackedRequest, note_read, view_of
from foretoken.control.budget import PREDICTED_DRAFTS, RequestBudget
from foretoken.control.cost import StepShape
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.drafter_cost import DrafterCost
from foretoken.control.learned.lengths import OutputLengths
from foretoken.control.learned.regression import Floats
from foretoken.control.learned.target_step_time import TargetStepTimeModel
from foretoken.control.plan import DecodingSequence, DraftPlan, StepForecast, StepLoad
from foretoken.types import FinishReason, Speculation

_READING = 0.1
"""Share of the time that a sequence still needs in which a drafter may read all of it."""


@final
class Planner:
    """Makes plans from what is known now."""

    def __init__(
        self,
        caps: RequestBudget,
        drafters: Seq[DrafterFacts],
        target: TargetStepTimeModel,
        costs: Mapping[str, DrafterCost],
        acceptance: LearnedAcceptance,
        search: Search = allocate,
    ) -> None:
        """Nothing learnt yet beside what the models know.

        Args:
            caps: what users and operators allow.
            drafters: whom to choose from, in the order of the settings.
            target: seconds of the target's steps.
            costs: seconds of each drafter, by name.
            acceptance: of their drafts.
            search: finds the best plan of a step.
        """
        self.times, self.acceptance = StepTimeModels(target, costs), acceptance
        self.account, self.ledger, self.lengths = Account(len(drafters)), Ledger(), OutputLengths()
        self.drafters = {d.name: DrafterState(d, costs[d.name]) for d in drafters}
        self.forgone_tokens = 0.0
        """Tokens that were not written so that nobody is made slower."""
        self._caps, self._search = caps, search
        self._floors = {d.name: d.floor for d in drafters if d.floor is not None}
        self._requests: dict[str, TrackedRequest] = {}

    @property
    def operator(self) -> Speculation:
        """What the operator leaves of everything now."""
        return self._caps.operator

    @property
    def below_floor(self) -> frozenset[str]:
        """Drafters that are no choice now: too little of their drafts was accepted."""
        return frozenset(name for name, floor in self._floors.items() if floor.rests)

    def may_draft(self, sequences: Seq[DecodingSequence]) -> bool:
        """Whether any of them may have drafts, load and length aside."""
        return any(self._caps.budget(sequence.request) for sequence in sequences)

    def make(self, sequences: list[DecodingSequence], load: StepLoad) -> ActivePlan:
        """The best plan for these sequences, of which there is at least one, or a trial that is
        due."""
        ids = [sequence.request.request_id for sequence in sequences]
        count, counted = len(sequences), Counted.of(sequences)
        context = float(counted.tokens_N.mean())
        shape = step_shape(count, load, context)
        tracked = [self._track(sequence) for sequence in sequences]
        gained_s = self.ledger.of(ids)
        left_N = self.lengths.remaining(
            [one.class_key for one in tracked], counted.outputs_N, counted.left_N
        )
        times = self.times.plain(shape, count)
        worth_s = _READING * times.plain_s * left_N
        below_floor = self.below_floor
        able = [one for name, one in self.drafters.items() if name not in below_floor]
        views = [view_of(one, tracked, counted, self._caps, worth_s) for one in able]
        passing = [view for view in views if not self.drafters[view.name].facts.looks_up]
        guard_N = np.array([self._caps.guard(one.request) for one in sequences])
        tokens_N = counted.outputs_N + left_N
        left_s = self.ledger.left(gained_s, tokens_N, times.plain_s, guard_N)
        outputs = OutputTokens(left_N, tokens_N)
        inputs = self._inputs(tracked, shape, times, outputs, left_s, views)
        alone = count == 1 and not load.num_prompt_tokens
        decision = self._choose(inputs, passing, views, alone=alone)
        has_free = len(passing) < len(views) or any(s.request.brings_drafts for s in sequences)
        plan = self._plan(sequences, load, inputs, decision, views, has_free=has_free)
        reading, wanted = decision.reading, decision.wanted
        rows = int(wanted.lengths_N.sum())
        active = ActivePlan(
            plan=plan,
            held=held_by(ids, plan, decision),
            class_of={i: one.class_key for i, one in zip(ids, tracked, strict=True)},
            gained_s=dict(zip(ids, gained_s.tolist(), strict=True)),
            context=context,
            row_takes_s=(wanted.seconds - inputs.plain_s) / rows if rows else 0.0,
            row_brings=(wanted.tokens - count) / rows if rows else 0.0,
            trial="" if decision.trial is None else decision.trial.of,
            lasts=0 if decision.trial is None else decision.trial.steps,
            begun=frozenset(i for i, length in zip(ids, plan.lengths, strict=True) if length),
            reading={ids[place]: one for place, one in reading.waiting.items() if one.rows},
            missing=reading.missing,
            chance_of_none=chance_of_none(decision.found, decision.options),
            has_free=has_free,
            below_floor=below_floor,
            unguarded=decision.found.unguarded,
            weighed=(inputs, decision.weighed),
        )
        for feed in reading.feeds:
            if feed.place in reading.waiting:
                note_read(self._requests, ids[feed.place], feed.drafter, feed.rows)
        return active

    def _plan(
        self,
        sequences: Seq[DecodingSequence],
        load: StepLoad,
        inputs: AllocationInputs,
        decision: PlanDecision,
        views: Seq[DrafterView],
        *,
        has_free: bool,
    ) -> DraftPlan:
        """What was chosen, as whoever drafts is told."""
        found, options, reading = decision.found, decision.options, decision.reading
        is_plain = decision.trial is not None and decision.trial.of == PLAIN
        lengths: list[int] = found.lengths_N.tolist()
        names = [options[i].name if i >= 0 else "" for i in found.drafter_N.tolist()]
        lookups = [view for view in views if self.drafters[view.name].facts.looks_up]
        forecast = StepForecast(
            seconds=found.seconds + inputs.prompt_s,
            plain_s=inputs.plain_s + inputs.prompt_s,
            prompt_s=inputs.prompt_s,
            tokens=found.tokens,
            row_s=inputs.row_s(sum(lengths)),
            free_rows=inputs.free_rows(found) if has_free and not is_plain else 0,
        )
        return DraftPlan(
            load=load,
            budgets=budgets(sequences, lengths, lookups, self._caps, forecast.free_rows),
            lengths=tuple(lengths),
            drafters=tuple(names),
            surplus=surplus(found, options, forecast) if lookups else (),
            feeds=tuple(reading.feeds),
            resting=self._resting({*names, *reading.missing, *decision.waking}),
            forecast=forecast,
            wanted=len(views) < len(self.drafters)
            or any(view.max_drafts_N.any() for view in views),
        )

    def look_up_only(
        self, last: ActivePlan, sequence: DecodingSequence, load: StepLoad
    ) -> DraftPlan | None:
        """A step without passes of drafters, at the prices of the `last` plan: nothing is computed
        for it. None: nothing could be looked up."""
        most = min(last.forecast.free_rows, sequence.request.max_tokens - sequence.num_output - 1)
        looking = [one.facts for one in self.drafters.values() if one.facts.looks_up]
        budgets = [
            min(most, facts.max_drafts, self._caps.budget(sequence.request, facts.name))
            for facts in looking
        ]
        if max(budgets, default=0) <= 0:
            return None
        return DraftPlan(
            load=load, budgets=(max(budgets),), lengths=(0,), drafters=("",),
            resting=last.plan.resting, forecast=last.forecast,
        )  # fmt: skip

    def carry_over(
        self, active: ActivePlan, sequences: Seq[DecodingSequence], load: StepLoad
    ) -> DraftPlan:
        """The plan `active` for a batch that is a little different: whoever is new does what others
        of its class do, after its drafter has read it in chunks.

        Where requests come and go in every step, planning each anew takes longer than it saves.
        """
        for sequence in sequences:
            if sequence.request.request_id not in active.held:
                self._join(active, self._track(sequence))
        feeds = active.read_on(sequences, self._chunk(active)) if active.reading else []
        for feed in feeds:
            note_read(
                self._requests, sequences[feed.place].request.request_id, feed.drafter, feed.rows
            )
        count = len(sequences)
        times = self.times.plain(step_shape(count, load, active.context), count)
        return active.carried(sequences, load, times, feeds)

    def _join(self, active: ActivePlan, one: TrackedRequest) -> None:
        """A newcomer does what most of its class do, as far as it may."""
        sequence, request, missing = one.sequence, one.sequence.request, 0
        length, name, budget, surplus = active.usual(one.class_key)
        if name:
            allowed = self._caps.budget(request, name)
            length = max(min(length, allowed, request.max_tokens - sequence.num_output - 1), 0)
            missing = max(sequence.num_tokens - one.has_read(self.drafters[name].facts), 0)
        if budget:
            budget = min(budget, self._caps.budget(request))
        held = PlannedDrafts(length, name if length else "", max(budget, length), surplus)
        gained_s = self.ledger.gained(request.request_id)
        active.join(request.request_id, held, missing, gained_s=gained_s)

    def _chunk(self, active: ActivePlan) -> int:
        """Tokens that drafters read in a step of this plan while others wait."""
        plain_s = active.forecast.token_s
        names = {drafter for drafter, _ in active.reading.values()}
        return min(chunk_rows(self.drafters[i].cost, active.context, plain_s) for i in names)

    def _choose(
        self,
        inputs: AllocationInputs,
        passing: list[DrafterView],
        views: list[DrafterView],
        *,
        alone: bool,
    ) -> PlanDecision:
        """The best allocation that can be carried out now, or a trial."""
        options = weighed = inputs.options(passing)
        found = inputs.best(options)
        waking = {options[i].name for i in found.drafter_N.tolist() if i >= 0}
        waking = {name for name in waking if not self.drafters[name].is_ready}
        if waking:
            # What they read of the target is kept from now on; they draft once there is enough.
            options = [option for option in options if self.drafters[option.name].is_ready]
            found = inputs.best(options)
        trial = pick_trial(inputs, found, options, passing, self.drafters, self.account)
        if trial is not None:
            found, options = trial.found, trial.options
        alone = alone or trial is not None
        reading, wanted = read_first(found, options, views, inputs, alone=alone), found
        if reading.waiting:
            options = inputs.without(
                options, {i: one.drafter for i, one in reading.waiting.items()}
            )
            found = inputs.best(options)
        return PlanDecision(found, options, weighed, reading, wanted, trial, waking)

    def put_away(self, active: ActivePlan, steps: int) -> None:
        """A plan has held for so many steps."""
        forecast = active.forecast
        lost = 0.0 if active.trial else max(active.unguarded - forecast.price, 0.0)
        self.forgone_tokens += lost * forecast.seconds * steps
        alive = [request_id for request_id in active.held if request_id in self._requests]
        if not active.trial:
            # A trial is paid by the account, not by those who wait for it.
            self.ledger.keep({request_id: active.gained(request_id) for request_id in alive})
        used = {drafter for drafter, _ in active.reading.values()}
        drafted_by = {}
        for request_id in alive:
            if request_id not in active.reading:
                drafted_by[request_id] = name = active.held[request_id].drafter
                if name:
                    used.add(name)
                    note_read(self._requests, request_id, name, None)
        for name, drafter in self.drafters.items():
            if not drafter.facts.looks_up:
                others = [i for i in alive if drafted_by.get(i) != name]
                self.acceptance.fade(others, name, steps)
                if drafter.rests:
                    self.acceptance.rest(name, steps)
            rested = name in active.plan.resting
            drafter.pass_by(steps, used=name in used, tried=name == active.trial, rested=rested)

    def learn_trial(self, active: ActivePlan, lost_steps: float) -> None:
        """A trial took so many plain steps more than it brought."""
        assert active.weighed is not None, "a trial was planned"
        inputs, name = active.weighed[0], active.trial
        surprising, known = surprises(inputs, name), is_known(inputs, name)
        self.drafters[name].learn_trial(lost_steps, surprising=surprising, known=known)

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ones are fine."""
        tracked = self._requests.pop(request_id, None)
        if tracked is not None:
            cut = tracked.sequence.finish_reason is not FinishReason.STOP
            self.lengths.ended(tracked.class_key, tracked.sequence.num_output, cut=cut)
        self.acceptance.release(request_id)
        self.ledger.release(request_id)

    def _track(self, sequence: DecodingSequence) -> TrackedRequest:
        request_id = sequence.request.request_id
        one = self._requests.get(request_id)
        if one is None:
            one = self._requests[request_id] = TrackedRequest.of(sequence)
            self.acceptance.begin(request_id, one.class_key)
        else:
            one.refresh()
        return one

    def _inputs(
        self,
        tracked: list[TrackedRequest],
        shape: StepShape,
        times: PlainTimes,
        outputs: OutputTokens,
        left_s: Floats,
        views: list[DrafterView],
    ) -> AllocationInputs:
        ids = [one.sequence.request.request_id for one in tracked]
        most = PREDICTED_DRAFTS * len(ids) + sum(int(view.max_drafts_N.sum()) for view in views)
        plain_s, prompt_s = times
        return AllocationInputs(
            ids=ids,
            classes=[one.class_key for one in tracked],
            context=shape.context,
            outputs=outputs,
            left_s=left_s,
            plain_s=plain_s,
            prompt_s=prompt_s,
            rows_s=plain_s + self.times.added(shape, len(ids), most),
            acceptance=self.acceptance,
            margin=least_gain(self.drafters.values()),
            search=self._search,
        )

    def _resting(self, used: Collection[str]) -> frozenset[str]:
        return frozenset(
            name for name, one in self.drafters.items() if one.rests and name not in used
        )
