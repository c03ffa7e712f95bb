"""Runs every check over everything that a text holds, and gives launches back corrected.

A launch is checked for names as it was written, for all else in the names of today.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import Launch, LaunchPart
from foretoken.lab.launch.python import PYTHON_CHECK
from foretoken.lab.launch.sources import SHELL_CHECK, UNREAD_CHECK, LintSource
from foretoken.lab.launch.write import written
from foretoken.lab.lint import other_servers as other
from foretoken.lab.lint.fit import PAIR_CHECKS, Machine, check_pair, fitting
from foretoken.lab.lint.names import NAME_CHECKS, check_variables, gone_value, todays
from foretoken.lab.lint.shares import SHARE_CHECK
from foretoken.lab.lint.traffic import METRIC_CHECK, REFUSED_CHECK, check_metrics, check_requests
from foretoken.lab.lint.vllm import VLLM_CHECKS, check_vllm, mended

LAUNCH_CHECKS = (*NAME_CHECKS, *VLLM_CHECKS, *other.OTHER_CHECKS)
DEVICE_CHECKS = (SHARE_CHECK,)
"""Checks of a launch that need a device."""
TRAFFIC_CHECKS = (REFUSED_CHECK, METRIC_CHECK, PYTHON_CHECK, SHELL_CHECK, UNREAD_CHECK)
"""Checks that look at requests, dashboards and scripts."""
NAMES = (*LAUNCH_CHECKS, *TRAFFIC_CHECKS, *PAIR_CHECKS, *DEVICE_CHECKS)

_LEFT_OUT = ("leave it out", "left out")
OwnParser = Callable[[tuple[str, ...]], list[Finding]]
"""Judges the words of a `foretoken` command as the command line itself would."""
_SETTINGS_FILES = ("config", "extra-llm-api-options")
"""Options of vLLM, SGLang and TensorRT-LLM that name a file with more settings."""
_CHECKS = {
    "vllm": check_vllm,
    "llama.cpp": other.check_llama_cpp,
    "sglang": other.check_sglang,
    "foretoken": other.check_foretoken,
}
_MENDED = {
    "vllm": mended,
    "llama.cpp": other.mended_llama_cpp,
    "sglang": other.mended_sglang,
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
    fitting: str = ""
    """The same with smaller weights, where only these make it fit the devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LintResult:
    """What there is to say about one text."""

    launches: tuple[LaunchVerdict, ...]
    others: tuple[Finding, ...]
    """About requests, metrics and the text itself."""

    @property
    def findings(self) -> tuple[Finding, ...]:
        """Every finding, those of launches first."""
        return (*(f for verdict in self.launches for f in verdict.findings), *self.others)


def lint(
    source: LintSource, machine: Machine, engine: str = "auto", own: OwnParser | None = None
) -> LintResult:
    """Judge everything.

    Requests and metrics are judged by `engine`, or by that of the first launch, or by whose metrics
    they are, or by vLLM's rules.
    """
    serving = _serving(source) if engine == "auto" else engine
    exported = not source.reads_metrics
    others = (
        *source.findings,
        *check_requests(source.requests, serving),
        *check_metrics(source.metrics, serving, exported=exported),
    )
    verdicts = tuple(judge(launch, machine, own) for launch in source.launches)
    return LintResult(launches=verdicts, others=others)


def _serving(source: LintSource) -> str:
    """Whose server answers the requests and has the metrics of a text."""
    own = any(name.startswith("foretoken:") for name in source.metrics)
    named = next((launch.engine for launch in source.launches), "foretoken" if own else "vllm")
    return "vllm" if named == "unknown" else named


def judge(launch: Launch, machine: Machine, own: OwnParser | None = None) -> LaunchVerdict:
    """Everything about one launch, and how it should be."""
    if launch.engine == "foretoken" and launch.form.kind == "python":
        return _judge_own(launch, lambda one: list(other.check_foretoken(one)))
    if launch.engine == "foretoken" and launch.form.kind != "settings" and own is not None:
        return _judge_own(launch, lambda one: [*check_variables(one), *own(one.words)])
    today, found = todays(launch)
    found += _meaning(today, machine)
    if not other.speculates(today) and not found and launch.engine != "foretoken":
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
        fitting=fitting(right, machine, remaining),
    )


def _with_todays_value(engine: str, part: LaunchPart) -> LaunchPart:
    gone = gone_value(engine, part.name, part.value)
    return part if gone is None or not gone.now else replace(part, value=gone.now, raw="")


def _silent(launch: Launch) -> Finding:
    """Nothing in a launch speculates; what it has read from a file may."""
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
    """What a launch in today's names means, and whether its models fit."""
    check = _CHECKS.get(launch.engine)
    return [*(check(launch) if check else ()), *check_pair(launch, machine)]
