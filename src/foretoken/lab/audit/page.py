"""One page about one audit, and its row in a table of audits that others made too.

Markdown: the page stands beside audit.json, the row goes into any table that begins with HEADER, as
docs/audits.md does.
"""

import re
from datetime import UTC, datetime
from pathlib import Path

from foretoken import __version__
from foretoken.errors import ConfigError
from foretoken.lab.audit.judging import CheckResult
from foretoken.lab.audit.run import Audited
from foretoken.lab.stats.intervals import share_interval

PAGE = "audit.md"
STATUS = {
    "ok": "ok",
    "fault": "FAULT",
    "both": "not by speculation",
    "open": "open",
    "unasked": "not asked",
}
"""How a status is said."""
HEADER = (
    "| day | engine | version | model | method | card | checks | verdict |",
    "|---|---|---|---|---|---|---|---|",
)


def rate_of(count: int, total: int) -> str:
    share = share_interval(count, total)
    between = f"{share.low:.1%} to {share.high:.1%}"
    return f"{count} of {total} identifiers ({share.estimate:.1%}, {between})"


def lines_of(result: CheckResult) -> list[str]:
    """What stands below a check's own line."""
    found = list(result.told)
    bad = result.wrong + result.differs
    if bad or result.plain_wrong or result.plain_differs:
        usual = f"; without speculation {result.plain_wrong + result.plain_differs} of "
        usual = usual + str(result.plain_answers) if result.plain_answers else ""
        verb = "are wrong" if result.wrong + result.plain_wrong else "differ"
        looked_at = "sets of parameters" if result.name == "sampling" else "looks"
        found.append(f"{bad} of {result.answers} {looked_at} {verb}{usual}")
    if result.altered:
        found.append(f"{rate_of(result.altered, result.identifiers)} came altered")
    if 2 * result.altered > result.identifiers and result.status == "ok":
        found.append("most are the model's own: of so small a model this check sees little")
    if result.plain_altered:
        found.append(
            f"without speculation {rate_of(result.plain_altered, result.plain_identifiers)}"
        )
    if result.near_ties:
        found.append(f"{result.near_ties} of {result.answers} part at near-ties: rounding")
    if result.failed:
        found.append(f"{result.failed} requests failed")
    found += [f"not asked: {why}" for why in result.untested]
    if result.status == "unasked":
        return [*found, result.why]
    if result.status != "ok":
        found += [f"such as: {example}" for example in result.examples]
        found += [result.why] if result.why and result.why not in result.examples else []
    return found


def verdict_of(found: Audited) -> str:
    if found.faults:
        return f"FAULTY: {', '.join(found.faults)}"
    if found.missing:
        return f"not enough compared: {found.missing}"
    return f"no fault in {found.num_asked} checks"


def _about(found: Audited, day: str) -> list[tuple[str, str]]:
    return [
        ("day", day),
        ("engine", found.engine),
        ("version", found.version or "not told"),
        ("model", _named(found.model)),
        ("method", _named(found.method) or "not told"),
        ("card", found.card or "not told"),
    ]


def _named(text: str) -> str:
    """A name, of a file that lies on the machine its last part: a table is for others."""
    return re.sub(r"(^|:)(?:~|\.{0,2})/(?:[^/:]*/)*([^/:]+)/?$", r"\1\2", text)


def page_of(found: Audited, day: str = "") -> str:
    """The page."""
    day = day or _today()
    rows = [*_about(found, day), ("compared with", found.baseline)]
    rows.append(("asked", f"{found.requests} requests in {found.seconds:.0f} s"))
    rows.append(("by", f"foretoken {__version__}"))
    parts = [f"# Audit of {found.engine}", "", f"**{verdict_of(found)}.**"]
    if found.false_alarms:
        often = int(1 / found.false_alarms)
        parts.append(f"A right server is accused by at most one audit like this in {often}.")
    parts += ["", "| | |", "|---|---|", *(f"| {_cell(k)} | {_cell(v)} |" for k, v in rows), ""]
    parts += ["| check | result | looked at |", "|---|---|---|"]
    for check in found.checks:
        seen = "<br>".join([check.sentence, *lines_of(check)])
        parts.append(f"| {check.name} | {STATUS[check.status]} | {_cell(seen)} |")
    parts += ["", *(f"- not reached: {missed}" for missed in found.missed)]
    return "\n".join(parts).rstrip() + "\n"


def row_of(found: Audited, day: str = "") -> str:
    """The row."""
    passed = sum(check.status == "ok" for check in found.checks)
    cells = [value for _, value in _about(found, day or _today())]
    cells += [f"{passed} of {found.num_asked} ok", verdict_of(found)]
    return f"| {' | '.join(map(_cell, cells))} |"


def submit(found: Audited, path: Path) -> None:
    """Write the row below the others of a table; a file that is not there is begun. Raises
    ConfigError: the file is no such table, or cannot be written."""
    check_table(path)
    lines = path.read_text("utf-8").splitlines() if path.exists() else list(HEADER)
    last = max(at for at, line in enumerate(lines) if line.startswith("|"))
    lines.insert(last + 1, row_of(found))
    try:
        path.write_text("\n".join(lines) + "\n", "utf-8")
    except OSError as error:
        raise ConfigError("--submit", str(path), f"a file that can be written ({error})") from error


def check_table(path: Path) -> None:
    """Raises ConfigError: the file is there, and has no table of audits."""
    if not path.exists():
        return
    try:
        has = all(line in path.read_text("utf-8") for line in HEADER)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("--submit", str(path), f"a text file ({error})") from error
    if not has:
        allowed = f"a new file, or one with the table that begins `{HEADER[0]}`"
        raise ConfigError("--submit", str(path), allowed)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _today() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%d")


def write_page(found: Audited, folder: Path) -> None:
    (folder / PAGE).write_text(page_of(found), "utf-8")
