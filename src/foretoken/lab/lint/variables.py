"""Checks of variables of the environment: gone, never there, another engine's, or overridden."""

import re
from collections.abc import Iterator

from foretoken.config.other_engines import OtherName, find_other, todays_names
from foretoken.errors import nearest
from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import ENGINES, Launch, LaunchCheck, LaunchPart, engine_table
from foretoken.lab.launch.variables import PREFIXES, owner_of

_ABOUT_DRAFTS = re.compile(r"_(SPEC|SPECULATIVE|DRAFT|NGRAM)(_|$)")
_COMPLETE = ("llama.cpp", "vllm")
"""Engines of whose variables about speculation the table holds all."""
_FORCED = "SGLANG_SIMULATE_ACC_"


def _variables(launch: Launch) -> Iterator[Finding]:
    for part in launch.parts:
        owner = owner_of(part.written) if part.place is not None else None
        if owner is None or _is_referred_to(launch, part.written):
            continue
        row = find_other("variables", part.written, owner)
        if owner != launch.engine:
            yield from _of_another(launch, part, owner, row)
        elif row is not None and row.gone:
            yield _gone(launch, part, row)
        elif part.written.startswith(_FORCED):
            yield _finding("warning", part, "forced acceptance writes garbage: only to measure")
        elif row is None and owner in _COMPLETE and _ABOUT_DRAFTS.search(part.written):
            yield _never(launch, part)
        yield from _overridden(launch, part)


def _gone(launch: Launch, part: LaunchPart, row: OtherName) -> Finding:
    started = "starts without it" if row.unread else "does not start with it"
    why = f" ({row.why})" if row.why else ""
    version = engine_table(launch.engine)["version"]
    message = f"is read no more{why}; {launch.engine} {version} {started}"
    return _finding("error", part, message, _today(row, part) or "leave it out")


def _today(row: OtherName, part: LaunchPart) -> str:
    now = row.now or ""
    if now.startswith("flag:"):
        return f"--{now[5:].replace('_', '-')} {part.raw}"
    return f"{now}={part.raw}" if now else ""


def _never(launch: Launch, part: LaunchPart) -> Finding:
    """One that no version has; a script around the server may read it all the same."""
    version = engine_table(launch.engine)["version"]
    start = next(start for start, own in PREFIXES.items() if own == launch.engine)
    flag = find_other("flags", part.written.removeprefix(start), launch.engine)
    near = nearest(part.written, todays_names("variables", launch.engine))
    remedy = f"did you mean {near}?" if near else ""
    if flag is not None and not near:
        name = flag.successor if flag.gone else f"flag:{flag.name}"
        kind, _, name = name.partition(":")
        option = f"--{name.replace('_', '-')} {part.raw}"
        remedy = option if kind == "flag" else f"{name} in --speculative-config"
    message = f"{launch.engine} {version} reads no such variable"
    return _finding("error" if near else "warning", part, message, remedy)


def _of_another(
    launch: Launch, part: LaunchPart, owner: str, row: OtherName | None
) -> Iterator[Finding]:
    flag = find_other("flags", row.flag, owner) if row is not None and row.flag else None
    if flag is None:
        return
    level, remedy = "warning", "leave it out"
    if launch.engine == "foretoken":  # which takes the flag that the variable stands for
        level, remedy = "error", flag.say or f"--{flag.name.replace('_', '-')} {part.raw}"
    yield _finding(level, part, f"{launch.engine} reads no variables of {owner}", remedy)


def _overridden(launch: Launch, part: LaunchPart) -> Iterator[Finding]:
    option = next((p for p in launch.arguments if p.name == part.name), None)
    if option is not None:
        message = f"{option.written} {option.value} is given too, and holds"
        yield _finding("warning", part, message, "leave one of them out")


def _is_referred_to(launch: Launch, name: str) -> bool:
    """Whether the command itself puts the variable's value somewhere."""
    use = re.compile(rf"\$[({{]?{name}\b")
    written = [f"{part.raw} {part.value}" for part in launch.parts if part.written != name]
    return any(use.search(text) for text in (*written, *(word.raw for word in launch.before)))


def _finding(level: str, part: LaunchPart, message: str, remedy: str = "") -> Finding:
    return Finding(
        check="variable", level=level, where=part.written, message=message, remedy=remedy
    )


VARIABLE_CHECK = LaunchCheck("variable", ENGINES, _variables)
