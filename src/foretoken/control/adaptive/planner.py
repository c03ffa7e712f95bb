"""A plan for the sequences of a step: what the models say, put together, and the best of it.

Owns what is kept of requests and drafters between plans. Whoever asks decides for how many steps a
plan is kept, and books what became of them.
"""

import math
from collections.abc import Collection, Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import NamedTuple, final

import numpy as np

from foretoken.control.adaptive.allocation import Allocation, DraftOption
from foretoken.control.adaptive.drafter import DrafterFacts, DrafterState
from foretoken.control.adaptive.exploring import Account, Trial, is_known, pick_trial, surprises
from foretoken.control.adaptive.guard import Ledger
from foretoken.control.adaptive.planning import (
    FirstReading,
    budgets,
    chance_of_none,
    read_first,
    step_shape,
    surplus,
)
from foretoken.control.adaptive.scene import DrafterView, Scene
from foretoken.control.adaptive.tracked import TrackedRequest, note_read, view_of
from foretoken.control.budget import PREDICTED_DRAFTS, RequestBudget
from foretoken.control.cost import StepShape
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.cost import DrafterCost, LearnedCost
from foretoken.control.learned.lengths import OutputLengths
from foretoken.control.learned.missed import MissedTime
from foretoken.control.learned.regression import Floats
from foretoken.control.plan import DecodingSequence, DraftPlan, StepForecast, StepLoad
from foretoken.control.report.explain import Outlook
from foretoken.types import FinishReason, Speculation

_READING = 0.02
"""Share of the time that a sequence still needs in which a drafter may read all of it."""
_BENEFIT = 1.15
"""A sequence that may still lose something gets the benefit of the doubt: of many estimates that
are all a little wrong, the lowest would decide for everybody."""


@final
@dataclass(slots=True)
class MadePlan:
    """A plan, what it was made for and of."""

    plan: DraftPlan
    ids: list[str]
    shape: StepShape
    """Of the step without drafts."""
    gained_s: Floats
    """What each request had gained before, in seconds."""
    rows_s: Floats
    """Seconds of the step without drafting, with 0, 1, ... more rows, as the model says."""
    trial: str = ""
    """The drafter on trial, PLAIN, or nothing."""
    missing: dict[str, int] = field(default_factory=dict)
    """Tokens that each drafter reads in its first step."""
    chance_of_none: float = 1.0
    """That no draft of a step is accepted."""
    spare_s: float = 0.0
    """Seconds that plain steps would have taken beyond those that were measured."""
    accepted: dict[str, int] = field(default_factory=dict)
    """Drafts of each request that were accepted."""
    below_floor: frozenset[str] = frozenset()
    """Drafters that were no choice, since too little of them was accepted."""
    unguarded: float = 0.0
    """Tokens per second of the best plan that lets some wait for others."""
    weighed: tuple[Scene, list[DraftOption]] | None = None
    """What the plan was chosen from, drafters that have yet to wake included."""

    def outlook(self, drafter: str) -> Outlook | None:
        """What the best length of a drafter would come to, if all sequences had it; None where
        nobody may have its drafts."""
        if self.weighed is None:
            return None
        scene, options = self.weighed
        return next((scene.outlook(one) for one in options if one.name == drafter), None)


_PLAIN = (0, "")
"""Length and drafter of a sequence that decodes plainly."""


class _PlainTimes(NamedTuple):
    """Seconds of a step without drafts."""

    plain_s: float
    """Of the sequences that decode."""
    prompt_s: float
    """What prompts add."""


class _Chosen(NamedTuple):
    """What a step does, and why."""

    found: Allocation
    options: list[DraftOption]
    """What the drafters of `found` are counted by."""
    weighed: list[DraftOption]
    """What all drafters could do."""
    reading: FirstReading
    trial: Trial | None
    waking: set[str]
    """Drafters at rest that are wanted again."""


@final
class Planner:
    """Makes plans from what is known now."""

    def __init__(
        self,
        caps: RequestBudget,
        drafters: Seq[DrafterFacts],
        target: LearnedCost,
        costs: Mapping[str, DrafterCost],
        acceptance: LearnedAcceptance,
    ) -> None:
        """Nothing learnt yet beside what the models know.

        Args:
            caps: what users and operators allow.
            drafters: whom to choose from, in the order of the settings.
            target: seconds of the target's steps.
            costs: seconds of each drafter, by name.
            acceptance: of their drafts.
        """
        self.target, self.acceptance = target, acceptance
        self.account, self.ledger, self.lengths = Account(len(drafters)), Ledger(), OutputLengths()
        self.missed = MissedTime()
        self.drafters = {d.name: DrafterState(d, costs[d.name]) for d in drafters}
        self.forgone_tokens = 0.0
        """Tokens that were not written so that nobody is made slower."""
        self._caps = caps
        floors = {d.name: d.floor for d in drafters}
        self._floors = {name: floor for name, floor in floors.items() if floor is not None}
        self._requests: dict[str, TrackedRequest] = {}

    @property
    def operator(self) -> Speculation:
        """What the operator leaves of everything now."""
        return self._caps.operator

    @property
    def below_floor(self) -> frozenset[str]:
        """Drafters that are no choice now: too little of their drafts was accepted."""
        return frozenset(name for name, floor in self._floors.items() if floor.rests)

    def make(self, sequences: list[DecodingSequence], load: StepLoad) -> MadePlan:
        """The best plan for these sequences, or a trial that is due."""
        ids = [sequence.request.request_id for sequence in sequences]
        count = len(sequences)
        context = sum(sequence.num_tokens for sequence in sequences) / max(count, 1)
        shape = step_shape(count, load, context)
        if not count:
            plan = DraftPlan(load=load, drafts=(), resting=self._resting(()))
            return MadePlan(plan, ids, shape, np.zeros(0), np.zeros(0))
        tracked = [self._track(sequence) for sequence in sequences]
        gained_s = self.ledger.of(ids)
        left_N = self._left(tracked)
        times = self._plain_times(shape, count)
        worth_s = _READING * times.plain_s * left_N
        below_floor = self.below_floor
        able = [one for name, one in self.drafters.items() if name not in below_floor]
        views = [view_of(one, tracked, self._caps, worth_s, context) for one in able]
        passing = [view for view in views if not self.drafters[view.name].facts.looks_up]
        lookups = [view for view in views if self.drafters[view.name].facts.looks_up]
        allowed_s = self._allowed(tracked, gained_s, left_N, times.plain_s)
        scene = self._scene(ids, shape, times, left_N, allowed_s, views)
        alone = count == 1 and not load.num_prompt_tokens
        chosen = self._choose(scene, passing, views, alone=alone)
        found, options, reading, trial = chosen.found, chosen.options, chosen.reading, chosen.trial
        lengths: list[int] = found.drafts_N.tolist()
        names = [options[i].name if i >= 0 else "" for i in found.drafter_N.tolist()]
        free = bool(lookups) or any(sequence.request.brings_drafts for sequence in sequences)
        forecast = StepForecast(
            seconds=found.seconds + scene.prompt_s,
            plain_s=scene.plain_s + scene.prompt_s,
            prompt_s=scene.prompt_s,
            tokens=found.tokens,
            row_s=scene.row_s(sum(lengths)),
            free_rows=0 if trial is not None or not free else scene.free_rows(found),
        )
        drafts = budgets(sequences, lengths, lookups, self._caps, forecast.free_rows)
        plan = DraftPlan(
            load=load,
            drafts=drafts,
            lengths=tuple(lengths),
            drafters=tuple(names),
            surplus=surplus(found, options, forecast) if lookups else (),
            feeds=tuple(reading.feeds),
            resting=self._resting({*names, *reading.missing, *chosen.waking}),
            forecast=forecast,
            wanted=bool(below_floor) or any(view.most_N.any() for view in views),
        )
        return MadePlan(
            plan, ids, shape, gained_s, scene.model_s,
            trial="" if trial is None else trial.of,
            missing=reading.missing,
            chance_of_none=chance_of_none(found, options),
            below_floor=below_floor,
            unguarded=found.unguarded,
            weighed=(scene, chosen.weighed),
        )  # fmt: skip

    def carry_over(
        self, made: MadePlan, sequences: list[DecodingSequence], load: StepLoad
    ) -> MadePlan:
        """The plan `made` for a batch that is a little different: whoever is new decodes plainly.

        Where requests come and go in every step, planning each anew takes longer than it saves.
        """
        before = made.plan.forecast
        assert before is not None, "only a plan with a forecast is carried over"
        held = dict(
            zip(made.ids, zip(made.plan.lengths, made.plan.drafters, strict=True), strict=True)
        )
        ids = [sequence.request.request_id for sequence in sequences]
        kept = [held.get(request_id, _PLAIN) for request_id in ids]
        for sequence in sequences:
            self._track(sequence)
        count = len(ids)
        shape = step_shape(count, load, made.shape.context)
        plain_s, prompt_s = self._plain_times(shape, count)
        lengths = tuple(length for length, _ in kept)
        drafts_s = max(before.seconds - before.plain_s, 0.0) if any(lengths) else 0.0
        share = count / len(made.ids)
        forecast = StepForecast(
            seconds=plain_s + prompt_s + share * drafts_s,
            plain_s=plain_s + prompt_s,
            prompt_s=prompt_s,
            tokens=share * before.tokens,
            row_s=before.row_s,
            free_rows=0,
        )
        plan = DraftPlan(
            load=load,
            drafts=lengths,
            lengths=lengths,
            drafters=tuple(name for _, name in kept),
            surplus=(0.0,) * count,
            resting=made.plan.resting,
            forecast=forecast,
        )
        return MadePlan(
            plan, ids, shape, self.ledger.of(ids), np.zeros(0),
            chance_of_none=made.chance_of_none, below_floor=made.below_floor,
            weighed=made.weighed,
        )  # fmt: skip

    def _choose(
        self, scene: Scene, passing: list[DrafterView], views: list[DrafterView], *, alone: bool
    ) -> _Chosen:
        """The best allocation that can be carried out now, or a trial."""
        options = weighed = scene.options(passing)
        found = scene.best(options)
        waking = {options[i].name for i in found.drafter_N.tolist() if i >= 0}
        waking = {name for name in waking if not self.drafters[name].is_ready}
        if waking:
            # What they read of the target is kept from now on; they draft once there is enough.
            options = [option for option in options if self.drafters[option.name].is_ready]
            found = scene.best(options)
        trial = pick_trial(scene, found, options, passing, self.drafters, self.account)
        if trial is not None:
            found, options = trial.found, trial.options
        alone = alone or trial is not None
        reading = read_first(found, options, views, scene, alone=alone)
        if reading.waiting:
            options = scene.without(options, reading.waiting)
            found = scene.best(options)
        return _Chosen(found, options, weighed, reading, trial, waking)

    def put_away(self, made: MadePlan, steps: int) -> None:
        """A plan has held for so many steps."""
        alive = [i for i, request_id in enumerate(made.ids) if request_id in self._requests]
        forecast = made.plan.forecast
        # A trial is paid by the account, not by those who wait for it.
        if forecast is not None and not made.trial:
            made.gained_s += made.spare_s
            lost = max(made.unguarded - forecast.price, 0.0)
            self.forgone_tokens += lost * forecast.seconds * steps
            accepted = np.array([made.accepted.get(request_id, 0) for request_id in made.ids])
            gained_s = made.gained_s + forecast.token_s * accepted
            self.ledger.keep([made.ids[i] for i in alive], gained_s[alive])
        used = set()
        for request_id, name in zip(made.ids, made.plan.drafters, strict=True):
            if name:
                used.add(name)
                note_read(self._requests, request_id, name, None)
        for feed in made.plan.feeds:
            used.add(feed.drafter)
            rows = None if feed.window is not None else feed.rows
            if not made.plan.drafters[feed.place]:
                note_read(self._requests, made.ids[feed.place], feed.drafter, rows)
        for name, drafter in self.drafters.items():
            if not drafter.facts.looks_up:
                others = [
                    i for i, by in zip(made.ids, made.plan.drafters, strict=True) if by != name
                ]
                self.acceptance.fade(others, name, steps)
                if drafter.rests:
                    self.acceptance.rest(name, steps)
            rested = name in made.plan.resting
            drafter.pass_by(steps, used=name in used, tried=name == made.trial, rested=rested)

    def learn_trial(self, made: MadePlan, lost_steps: float) -> None:
        """A trial took so many plain steps more than it brought."""
        assert made.weighed is not None, "a trial was planned"
        scene, name = made.weighed[0], made.trial
        surprising, known = surprises(scene, name), is_known(scene, name)
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

    def _left(self, tracked: list[TrackedRequest]) -> Floats:
        """Tokens that each is still expected to write."""
        left = []
        for one in tracked:
            output, most = one.sequence.num_output, one.sequence.request.max_tokens
            left.append(self.lengths.remaining(one.class_key, output, max(most - output, 1)))
        return np.array(left)

    def _plain_times(self, shape: StepShape, count: int) -> _PlainTimes:
        """Of the step of `shape` without drafts, in which `count` sequences decode."""
        off, _ = self.missed.of(shape.sequences)
        alone = shape._replace(rows=count, sequences=count, prompt_rows=0)
        plain_s = float(self.target.curve(alone, 0)[0]) * math.exp(off)
        if not shape.prompt_rows:
            return _PlainTimes(plain_s, 0.0)
        whole_s = float(self.target.curve(shape, 0)[0]) * math.exp(off)
        return _PlainTimes(plain_s, whole_s - plain_s)

    def _allowed(
        self, tracked: list[TrackedRequest], gained_s: Floats, left_N: Floats, plain_s: float
    ) -> Floats:
        """Seconds that each may lose in the step."""
        outputs_N = np.array([one.sequence.num_output for one in tracked])
        return self.ledger.allowance(gained_s, outputs_N + left_N, plain_s)

    def _scene(
        self,
        ids: list[str],
        shape: StepShape,
        times: _PlainTimes,
        left_N: Floats,
        allowed_s: Floats,
        views: list[DrafterView],
    ) -> Scene:
        most = PREDICTED_DRAFTS * len(ids) + sum(int(view.most_N.sum()) for view in views)
        off, on = self.missed.of(shape.sequences)
        plain_s, prompt_s = times
        model_s = self.target.curve(shape, most)
        # Prompts take what they take, whether anybody drafts beside them or not. A draft is worth
        # the time that it saves in steps to come: that of steps without prompts.
        drafting_s = plain_s * math.exp(on - off)
        more_s = model_s - model_s[0]
        if shape.prompt_rows:
            # Beside many rows some more may be cheap, and what is begun now goes on without them.
            alone_s = self.target.curve(StepShape(len(ids), len(ids), shape.context), most)
            more_s = np.maximum(more_s, alone_s - alone_s[0])
        return Scene(
            ids=ids,
            context=shape.context,
            left_N=left_N,
            bound_s=plain_s + allowed_s,
            token_s=plain_s * np.where(allowed_s > 0.0, _BENEFIT, 1.0),
            plain_s=plain_s,
            model_s=model_s,
            prompt_s=prompt_s,
            rows_s=drafting_s + more_s * math.exp(on),
            acceptance=self.acceptance,
        )

    def _resting(self, used: Collection[str]) -> frozenset[str]:
        return frozenset(
            name for name, one in self.drafters.items() if one.rests and name not in used
        )
