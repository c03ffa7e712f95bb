"""Runs every check over everything that a text holds, and gives launches back corrected.

A launch is checked for names as it was written, for all else in the names of today.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import Launch, LaunchPart
from foretoken.lab.launch.sources import TEXT_CHECKS, LintSource
from foretoken.lab.launch.write import written
from foretoken.lab.lint import rules
from foretoken.lab.lint.fit import PAIR_CHECKS, Machine, check_pair
from foretoken.lab.lint.names import NAME_CHECKS, gone_value, todays

OWN_CHECKS = (*NAME_CHECKS, *rules.VLLM_CHECKS, *rules.OTHER_CHECKS, *TEXT_CHECKS)
NAMES = (*OWN_CHECKS, *PAIR_CHECKS)

_LEFT_OUT = ("leave it out", "left out")
OwnParser = Callable[[tuple[str, ...]], list[Finding]]
_SETTINGS_FILES = ("config", "extra-llm-api-options")
"""Options of vLLM, SGLang and TensorRT-LLM that name a file with more settings."""
_CHECKS = {
    "vllm": rules.check_vllm,
    "llama.cpp": rules.check_llama_cpp,
    "sglang": rules.check_sglang,
    "foretoken": rules.check_foretoken,
}
_MENDED = {
    "vllm": rules.mended_vllm,
    "llama.cpp": rules.mended_llama_cpp,
    "sglang": rules.mended_sglang,
}
"""Engine -> its launch with mistakes put right that have one obvious answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchVerdict:
    """What there is to say about one launch."""

    launch: Launch
    findings: tuple[Finding, ...]
    corrected: str = ""
    """The whole launch as it should be, ready to paste; empty where it needs no change, or where
    nobody can tell what was meant."""
    remaining: tuple[Finding, ...] = ()
    """Errors that the corrected one still has."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """What there is to say about one text."""

    launches: tuple[LaunchVerdict, ...]
    others: tuple[Finding, ...]

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, those of launches first."""
        return (*(f for verdict in self.launches for f in verdict.findings), *self.others)


def lint(source: LintSource, machine: Machine, own: OwnParser | None = None) -> LintResult:
    """Judge every launch of a text."""
    verdicts = tuple(judge(launch, machine, own) for launch in source.launches)
    return LintResult(launches=verdicts, others=source.findings)


def judge(launch: Launch, machine: Machine, own: OwnParser | None = None) -> LaunchVerdict:
    """Everything about one launch, and how it should be."""
    if launch.engine == "foretoken" and launch.form.kind == "python":
        return _judge_own(launch, lambda one: list(rules.check_foretoken(one)))
    if launch.engine == "foretoken" and launch.form.kind != "settings" and own is not None:
        return _judge_own(launch, lambda one: own(one.words))
    today, found = todays(launch)
    found += _meaning(today, machine)
    if not rules.speculates(today) and not found and launch.engine != "foretoken":
        found.append(_silent(launch))
    if launch.broken:
        return LaunchVerdict(launch=launch, findings=tuple(found))
    right = _MENDED.get(launch.engine, lambda one: one)(today)
    right = right.having(_with_todays_value(launch.engine, part) for part in right.parts)
    left = (*todays(right)[1], *_meaning(right, machine))
    remaining = tuple(finding for finding in left if finding.level == "error")
    return LaunchVerdict(
        launch=launch,
        findings=tuple(found),
        corrected="" if right == launch else written(right),
        remaining=remaining,
    )


def _with_todays_value(engine: str, part: LaunchPart) -> LaunchPart:
    gone = gone_value(engine, part.name, part.value)
    return part if gone is None or not gone.now else replace(part, value=gone.now, raw="")


def _silent(launch: Launch) -> Finding:
    for part in launch.parts:
        if part.name in _SETTINGS_FILES and isinstance(part.value, str):
            message = f"whether it speculates stands in {part.value}, which was not read"
            remedy = f"foretoken lab lint {part.value}"
            return Finding.of("speculation", "note", part.written, message, remedy)
    return Finding.of("speculation", "note", "", "speculation is off")


def _judge_own(launch: Launch, ask: Callable[[Launch], list[Finding]]) -> LaunchVerdict:
    """What Foretoken itself says of its launch; corrected where options only have to go."""
    findings = left = ask(launch)
    kept = launch
    while (error := _first_error(left)) is not None and error.remedy.startswith(_LEFT_OUT):
        shorter = kept.without(error.where.removeprefix("LLM.").lstrip("-").replace("_", "-"))
        if shorter == kept:
            break
        kept, left = shorter, ask(shorter)
        findings = [*findings, *(finding for finding in left if finding.level == "error")]
    corrected = written(kept) if kept != launch and _first_error(left) is None else ""
    return LaunchVerdict(launch=launch, findings=tuple(findings), corrected=corrected)


def _first_error(findings: Iterable[Finding]) -> Finding | None:
    return next((finding for finding in findings if finding.level == "error"), None)


def _meaning(launch: Launch, machine: Machine) -> list[Finding]:
    check = _CHECKS.get(launch.engine)
    return [*(check(launch) if check else ()), *check_pair(launch, machine)]
