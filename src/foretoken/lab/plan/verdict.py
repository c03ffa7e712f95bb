"""The answer of a plan in one word and one reason, over everything that was computed.

The first rule that speaks decides: what does not load, what is promised, what fits, what it gains.
Knows no tables. Invariant: where the word is not `use` or `measure`, no command that speculates is
given.
"""

from dataclasses import dataclass

from foretoken.lab.findings import Finding
from foretoken.lab.plan.checks import PlanContext
from foretoken.lab.plan.predict import GainRange, LoadPrediction, PlannedLatency, show_seconds
from foretoken.lab.verdict import EXIT_CODES, LEAVE_IT_OFF, MEASURE_MORE, USE_IT

LEAST_END_TO_END = 1.05
"""An answer that comes less than a twentieth sooner is not worth a second model."""
WORDS = {
    "use": USE_IT,
    "measure": MEASURE_MORE,
    "leave_off": LEAVE_IT_OFF,
    "plain": "NO SPECULATION ASKED",
}
OF_SETTINGS = ("tp_symmetry",)
"""Checks whose errors are about settings: the same drafter may be right with others."""
CLEARLY = 1.05
"""How much more another method has to gain to be named instead."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanVerdict:
    """One word and its reason."""

    word: str
    """`use`, `measure`, `leave_off`, or `plain` where no method was asked for."""
    reason: str
    k: int
    """Drafts per verification at the load that decides; 0: none."""

    @property
    def speculates(self) -> bool:
        """Whether a speculating server is worth starting, if only to measure it."""
        return self.word in ("use", "measure")

    @property
    def exit_code(self) -> int:
        """0: use it, or nothing was asked; 1: leave it off; 4: open until measured."""
        return EXIT_CODES.get(WORDS[self.word], 0)


def judge(
    context: PlanContext, findings: tuple[Finding, ...], times: PlannedLatency
) -> PlanVerdict:
    """The verdict on the asked method, with `times` at the load that decides."""
    if context.setup.method == "none":
        return PlanVerdict(word="plain", reason=_plain_reason(context), k=0)
    for reason in (
        _refused(findings),
        _first_token(context, times),
        _crowded(context),
        _no_gain(context, times),
        _too_short(context, times),
    ):
        if reason:
            return PlanVerdict(word="leave_off", reason=reason, k=0)
    gain = context.prediction.at(times.requests).gain(times.k)
    said = _gain_words(context, times)
    if gain.low > 1.0 and times.end_to_end_low >= 1.0:
        return PlanVerdict(word="use", reason=said, k=times.k)
    return PlanVerdict(
        word="measure", reason=f"{said}: a loss is within what is not known", k=times.k
    )


def _plain_reason(context: PlanContext) -> str:
    plain = context.plain
    if not plain.fits:
        return "and the target does not fit as it is"
    return f"{plain.requests:,} requests of {context.setup.settings.context:,} tokens fit at once"


def _refused(findings: tuple[Finding, ...]) -> str:
    """What would keep the server from starting."""
    error = next((finding for finding in findings if finding.level == "error"), None)
    if error is None or error.check not in OF_SETTINGS:
        return error.message if error else ""
    return f"{error.message}: {error.remedy}"


def _first_token(context: PlanContext, times: PlannedLatency) -> str:
    if context.setup.settings.slo != "ttft":
        return ""
    plain, drafted = show_seconds(times.ttft_plain_s), show_seconds(times.ttft_s)
    return (
        "the promise is about the first token, which drafts do not bring earlier "
        f"({plain} without, {drafted} with); only an A/B at your load that shows it unharmed "
        "speaks for it"
    )


def _crowded(context: PlanContext) -> str:
    """Fewer requests fit at once than are usually there, because of the draft."""
    usual = context.setup.settings.concurrency
    fit, plain = context.speculating.requests, context.plain.requests
    if fit >= min(usual, plain):
        return ""
    return (
        f"{fit} of the {usual} requests that are usually in flight fit beside the drafter, "
        f"{min(plain, usual)} without it: the others would wait"
    )


def _no_gain(context: PlanContext, times: PlannedLatency) -> str:
    load = context.prediction.at(times.requests)
    k = times.k or context.setup.k
    gain = load.gain(k) if k != context.setup.k else load
    if times.k and gain.middle > 1.0:
        return ""
    asked = context.setup.settings.num_speculative_tokens
    others = "" if times.k or asked else ", and no other k pays"
    return (
        f"{_predicted(context, gain)} with k = {k} and {load.requests} in flight"
        f"{others}{_elsewhere(context, load.requests)}"
    )


def _predicted(context: PlanContext, gain: GainRange | LoadPrediction) -> str:
    if context.setup.own_measured is not None and gain.low == gain.high:
        return f"{gain.middle:.2f}x per token by what was measured"
    return f"predicted {gain.middle:.2f}x ({gain.low:.2f} to {gain.high:.2f}) per token"


def _elsewhere(context: PlanContext, requests: int) -> str:
    """The load at which it would gain most, where that is another one."""
    fit = context.speculating.requests
    loads = [load for load in context.prediction.loads if load.requests <= fit and load.best_k]
    most = max(loads, key=lambda load: load.best, default=None)
    if context.setup.settings.num_speculative_tokens or most is None or most.requests == requests:
        return ""
    return f"; with {most.requests} in flight k = {most.best_k} would give {most.best:.2f}x"


def _too_short(context: PlanContext, times: PlannedLatency) -> str:
    if times.end_to_end_gain >= LEAST_END_TO_END:
        return ""
    first = times.ttft_s > 0.5 * times.end_to_end_s
    why = (
        "most of it is waiting for the first token"
        if first
        else f"less than the {LEAST_END_TO_END:g}x that a drafter is worth"
        f"{_elsewhere(context, times.requests)}"
    )
    return (
        f"a whole answer of {context.setup.settings.output_tokens} tokens comes "
        f"{times.end_to_end_gain:.2f}x as fast: {show_seconds(times.end_to_end_plain_s)} without, "
        f"{show_seconds(times.end_to_end_s)} with {times.requests} in flight; {why}"
    )


def _waiting(context: PlanContext) -> str:
    """What is said where fewer requests fit at once than are usually there."""
    usual, asked = context.setup.usual, context.setup.settings.concurrency
    return f" (as many as fit; the rest of {asked} waits)" if usual < asked else ""


def _gain_words(context: PlanContext, times: PlannedLatency) -> str:
    gain = context.prediction.at(times.requests).gain(times.k)
    said = (
        f"{_predicted(context, gain)} and {times.end_to_end_gain:.2f}x for a whole "
        f"answer of {context.setup.settings.output_tokens} tokens, with k = {times.k} and "
        f"{times.requests} in flight{_waiting(context)}"
    )
    peak = context.prediction.at(context.setup.peak)
    if times.requests == peak.requests:
        return said
    told, best = context.schedule.told(peak.requests), context.schedule.at(peak.requests)
    if told == 0:
        return f"{said}; off at the peak of {peak.requests}, where it would lose"
    said = f"{said}, {peak.gain(told).middle:.2f}x at the peak of {peak.requests}"
    if told == best or 1.0 < peak.gain(best).middle <= peak.gain(told).middle:
        return said
    better = f"k = {best} would give {peak.gain(best).middle:.2f}x" if best else "none is better"
    return f"{said}, where {better}"
