"""Checks of variables of the environment: gone, never there, another engine's, or overridden."""

import re
from collections.abc import Iterator

from foretoken.config.other_engines import find_other, todays_names
from foretoken.errors import nearest
from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import ENGINES
from foretoken.lab.launch.launch import Launch, LaunchPart
from foretoken.lab.launch.read import owner_of
from foretoken.lab.lint.tables import engine_table

_ABOUT_DRAFTS = re.compile(r"_(SPEC|SPECULATIVE|DRAFT|NGRAM)(_|$)")
_COMPLETE = ("llama.cpp", "vllm")
"""Engines of whose variables about speculation the table holds all."""
_FORCED = "SGLANG_SIMULATE_ACC_"


def check_variables(launch: Launch) -> Iterator[Finding]:
    """What is wrong with the variables that a launch sets."""
    for part in launch.parts:
        owner = owner_of(part.written) if part.is_variable else None
        if owner is None or _is_referred_to(launch, part.written):
            continue
        found = _of_another if owner != launch.engine else _of_its_own
        yield from found(launch, part, owner)
        option = next((one for one in launch.arguments if one.name == part.name), None)
        if option is not None:
            message = f"{option.written} {option.value} is given too, and holds"
            yield _finding("warning", part, message, "leave one of them out")


def _of_its_own(launch: Launch, part: LaunchPart, owner: str) -> Iterator[Finding]:
    row = find_other("variables", part.written, owner)
    reader = f"{owner} {engine_table(owner)['version']}"
    if row is not None and row.gone:
        started = "starts without it" if row.unread else "does not start with it"
        why = f" ({row.why})" if row.why else ""
        kind, _, name = (row.now or "").partition(":")
        now = f"--{name.replace('_', '-')} {part.raw}" if kind == "flag" else f"{kind}={part.raw}"
        message = f"is read no more{why}; {reader} {started}"
        yield _finding("error", part, message, now if row.now else "leave it out")
    elif part.written.startswith(_FORCED):
        yield _finding("warning", part, "forced acceptance writes garbage: only to measure")
    elif row is None and owner in _COMPLETE and _ABOUT_DRAFTS.search(part.written):
        # A script around the server may read it all the same.
        flag = find_other("flags", part.written.removeprefix(ENGINES[owner].variables), owner)
        near = nearest(part.written, todays_names("variables", owner))
        remedy = f"did you mean {near}?" if near else ""
        if flag is not None and not near:
            kind, _, name = (flag.successor if flag.gone else f"flag:{flag.name}").partition(":")
            option = f"--{name.replace('_', '-')} {part.raw}"
            remedy = option if kind == "flag" else f"{name} in --speculative-config"
        level = "error" if near else "warning"
        yield _finding(level, part, f"{reader} reads no such variable", remedy)


def _of_another(launch: Launch, part: LaunchPart, owner: str) -> Iterator[Finding]:
    row = find_other("variables", part.written, owner)
    flag = find_other("flags", row.flag, owner) if row is not None else None
    if flag is None:
        return
    level, remedy = "warning", "leave it out"
    if launch.engine == "foretoken":  # which takes the flag that the variable stands for
        level, remedy = "error", flag.say or f"--{flag.name.replace('_', '-')} {part.raw}"
    yield _finding(level, part, f"{launch.engine} reads no variables of {owner}", remedy)


def _is_referred_to(launch: Launch, name: str) -> bool:
    """Whether the command itself puts the variable's value somewhere."""
    use = re.compile(rf"\$[({{]?{name}\b")
    return any(use.search(f"{p.raw} {p.value}") for p in launch.parts if p.written != name)


def _finding(level: str, part: LaunchPart, message: str, remedy: str = "") -> Finding:
    return Finding.of("variable", level, part.written, message, remedy)
