"""Tuning of simulated servers whose best setting is known: does the search find it?

Sixteen servers: dense targets and mixtures of experts, on a laptop, on one device and on several,
with draft models, heads and look-ups, traffic of one class and of classes of which some lose, loads
from one request to 128, and engines that can be told one length, falling lengths or any. `play` is
one search; what came of it is held against the truth, which the simulator knows.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import Any, final

import numpy as np

from benchmarks.simulate.machine import (
    LOOKUP_S,
    SimulatedDrafter,
    SimulatedMachine,
    TableCost,
    planned_machine,
)
from benchmarks.simulate.traffic import DraftChance, RequestClass
from benchmarks.simulate.tune_answers import SimulatedAnswers, SimulatedCase, SimulatedServer
from foretoken.lab.launch.engines import Schedule
from foretoken.lab.plan.setup import EngineCost, PlanSettings
from foretoken.lab.tune.search import Search, best_setting, checked_gain, next_visit, spent_s, stand
from foretoken.lab.tune.settings import OFF, Question, Setting, Visit

LENGTHS = (1, 2, 3, 5, 8)
HOST = EngineCost(step_s=1.0e-3, draft_s=0.5e-3)
"""What the engine of a rehearsed server adds. Its own: what the planner assumes of vLLM is fitted
to published speed-ups, and a search is not better or worse for that."""
MODEL, HEAD, LOOKUP, CONTROL = "draft_model", "eagle3", "ngram", "auto"


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsedCase:
    """A simulated server and what its engine can be told."""

    case: SimulatedCase
    drafters: tuple[str, ...]
    schedule: Schedule = "falling"

    @property
    def question(self) -> Question:
        """Every drafter at every length."""
        settings = [
            Setting(drafter, () if drafter == CONTROL else (length,))
            for drafter in self.drafters
            for length in ((0,) if drafter == CONTROL else LENGTHS)
        ]
        return Question(loads=self.case.loads, settings=tuple(settings), schedule=self.schedule)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rehearsed:
    """What one search came to, held against the truth."""

    case: str
    emitted: Setting
    true_gain: float
    """Of what was emitted; 1 where that is to leave it off."""
    best: Setting
    best_gain: float
    visits: int
    minutes: float

    @property
    def share(self) -> float:
        """Speed of what was emitted over the best one's."""
        return self.true_gain / self.best_gain


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class RehearsalSummary:
    median_share: float
    """Of the best speed."""
    near: float
    """Share of searches that reached 95 % of it."""
    slower: float
    """Share of searches whose setting is truly slower than no speculation."""
    median_minutes: float
    most_minutes: float

    def as_asked(self, minutes: float) -> bool:
        """Whether the search is as good as is promised of it."""
        good = self.median_share >= 0.97 and self.near >= 0.95 and self.slower <= 0.01
        return good and self.most_minutes <= minutes


def summarize(found: Sequence[Rehearsed]) -> RehearsalSummary:
    """Medians and shares over searches."""
    return RehearsalSummary(
        median_share=median(one.share for one in found),
        near=sum(one.share >= 0.95 for one in found) / len(found),
        slower=sum(one.true_gain < 1.0 for one in found) / len(found),
        median_minutes=median(one.minutes for one in found),
        most_minutes=max(one.minutes for one in found),
    )


def truth(rehearsed: RehearsedCase, answers: SimulatedAnswers) -> tuple[Setting, float]:
    """The best setting that the engine can be told, and its mean logarithm of the gain."""
    question = rehearsed.question
    gains_SL = np.array([
        [
            math.log(answers.true_pace(OFF, load) / answers.true_pace(setting, load))
            for load in question.loads
        ]
        for setting in question.settings
    ])  # fmt: skip
    return best_setting(question, gains_SL)


def play(
    rehearsed: RehearsedCase, answers: SimulatedAnswers, seed: int, *, minutes: float = 60.0
) -> Rehearsed:
    """One search, from nothing to what it emits."""
    search = Search(question=rehearsed.question, budget_s=60.0 * minutes)
    server = SimulatedServer(answers, seed)
    visits: list[Visit] = []
    while (wanted := next_visit(search, visits)) is not None:
        visits.append(server.visit(wanted))
    now = stand(search, [visit for visit in visits if not visit.check])
    gain = checked_gain(visits, search, now)
    emitted = now.chosen if gain.low > 1.0 else OFF
    best, value = truth(rehearsed, answers)
    return Rehearsed(
        case=rehearsed.case.name,
        emitted=emitted,
        true_gain=math.exp(answers.true_value(emitted)) if not emitted.is_off else 1.0,
        best=best,
        best_gain=math.exp(value),
        visits=len(visits),
        minutes=spent_s(visits) / 60.0,
    )


def _sheet(target: str, *, draft: str | None = None, **settings: Any) -> SimulatedMachine:
    """A target by data sheet, with a draft model or a head, and look-ups."""
    method = {"method": "draft_model", "draft": draft} if draft else {"method": "eagle3"}
    given = {"target": target, "num_speculative_tokens": max(LENGTHS), **method, **settings}
    drafter = MODEL if draft else HEAD
    machine = planned_machine(PlanSettings.from_mapping(given), drafter, host=HOST)
    return replace(machine, drafters=(*machine.drafters, _LOOKUPS))


_LOOKUPS = SimulatedDrafter(
    name=LOOKUP, max_drafts=max(LENGTHS), call_s=LOOKUP_S, looks_up=True, reads=False
)
_LAPTOP = SimulatedMachine(
    target=TableCost(
        ((1, 0.030), (4, 0.033), (6, 0.036), (8, 0.042), (16, 0.066), (64, 0.200), (2048, 5.9)),
        key_s=2e-7,
    ),
    drafters=(
        SimulatedDrafter(
            name=MODEL,
            max_drafts=max(LENGTHS),
            passes=TableCost(
                ((1, 0.0022), (4, 0.0025), (8, 0.003), (16, 0.0045), (64, 0.0135), (2048, 0.4)),
                key_s=3e-8,
            ),
            call_s=3e-4,
        ),
        _LOOKUPS,
    ),
    host_s=5e-4,
)


def _class(name: str, chances: Mapping[str, tuple[float, float]], **changes: Any) -> RequestClass:
    """Requests by class; for each drafter the chance of a first draft, and how it falls."""
    laws = {
        drafter: DraftChance(
            chance=chance, deeper=deeper, spread=0.4, found=0.45 if drafter == LOOKUP else 1.0
        )
        for drafter, (chance, deeper) in chances.items()
    }
    given: dict[str, Any] = {"prompt": 300, "output": 120, "chances": laws, **changes}
    return RequestClass(name=name, **given)


def _mix(kind: str, drafter: str) -> tuple[RequestClass, ...]:
    """A traffic: how good the drafter is on each class, and how good look-ups are."""
    chat = _class("chat", {drafter: (0.68, 0.95), LOOKUP: (0.35, 0.9)})
    code = _class("code", {drafter: (0.82, 0.97), LOOKUP: (0.6, 0.95)})
    json = _class("json", {drafter: (0.9, 0.98), LOOKUP: (0.7, 0.97)}, output=80)
    creative = _class("creative", {drafter: (0.4, 0.85), LOOKUP: (0.15, 0.8)}, output=160)
    edit = _class("edit", {drafter: (0.75, 0.96), LOOKUP: (0.93, 0.99)}, prompt=600)
    long = _class("long", {drafter: (0.66, 0.95), LOOKUP: (0.5, 0.95)}, prompt=2500)
    return {
        "chat": (chat,),
        "code": (code,),
        "creative": (creative,),
        "json and creative": (replace(json, share=0.6), replace(creative, share=0.4)),
        "chat and code": (replace(chat, share=0.5), replace(code, share=0.5)),
        "edits": (replace(edit, share=0.7), replace(chat, share=0.3)),
        "long and chat": (replace(long, share=0.3), replace(chat, share=0.7)),
    }[kind]


_LLAMA, _LLAMA_DRAFT = "meta-llama/Llama-3.3-70B-Instruct", "meta-llama/Llama-3.2-1B-Instruct"
_BIG_DRAFT = "meta-llama/Llama-3.1-8B-Instruct"
_QWEN, _QWEN_DRAFT = "Qwen/Qwen3-8B", "Qwen/Qwen3-0.6B"
_EXPERTS, _OPEN = "Qwen/Qwen3-30B-A3B", "openai/gpt-oss-120b"


def rehearsed_cases() -> tuple[RehearsedCase, ...]:
    llama = _sheet(_LLAMA, draft=_LLAMA_DRAFT, count=4, draft_tensor_parallel_size=1)
    big = _sheet(_LLAMA, draft=_BIG_DRAFT, count=4)
    qwen = _sheet(_QWEN, draft=_QWEN_DRAFT)
    qwen_head = _sheet(_QWEN)
    llama_head = _sheet(_LLAMA, count=4)
    experts = _sheet(_EXPERTS, draft=_QWEN_DRAFT)
    experts_head = _sheet(_EXPERTS)
    opened = _sheet(_OPEN, count=2)
    low, wide, busy = (1, 4, 16), (1, 8, 64), (8, 32, 128)
    model, head = (MODEL, LOOKUP), (HEAD, LOOKUP)
    own = (CONTROL, MODEL, LOOKUP)
    rows: list[tuple[str, SimulatedMachine, str, tuple[int, ...], tuple[str, ...], Schedule]] = [
        ("70B, 1B draft", llama, "chat", wide, model, "falling"),
        ("70B, 1B draft, mix", llama, "json and creative", low, model, "falling"),
        ("70B, 8B draft, busy", big, "creative", busy, model, "falling"),
        ("70B, head", llama_head, "chat and code", wide, head, "falling"),
        ("70B, head, long", llama_head, "long and chat", low, head, "one"),
        ("8B, 0.6B draft", qwen, "code", wide, model, "falling"),
        ("8B, 0.6B draft, creative", qwen, "creative", low, model, "falling"),
        ("8B, head, edits", qwen_head, "edits", low, head, "falling"),
        ("8B, head, busy", qwen_head, "chat", busy, head, "falling"),
        ("experts, draft", experts, "chat", wide, model, "falling"),
        ("experts, draft, any length", experts, "json and creative", wide, model, "any"),
        ("experts, head, busy", experts_head, "code", busy, head, "any"),
        ("gpt-oss, head", opened, "chat", wide, head, "falling"),
        ("laptop, draft", _LAPTOP, "chat", (1, 4), model, "one"),
        ("laptop, edits", _LAPTOP, "edits", (1, 4), model, "one"),
        ("laptop, control", _LAPTOP, "json and creative", (1, 4, 16), own, "any"),
    ]
    return tuple(
        RehearsedCase(
            case=SimulatedCase(
                name=name,
                machine=machine,
                classes=_mix(mix, drafters[-2]),
                loads=loads,
                start_s=15.0 if machine is _LAPTOP else 60.0,
            ),
            drafters=drafters,
            schedule=schedule,
        )
        for name, machine, mix, loads, drafters, schedule in rows
    )
