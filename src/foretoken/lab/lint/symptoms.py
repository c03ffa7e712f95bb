"""Reads a server's log, its metrics page or its command, and names what is wrong with the drafts.

What is read comes to three things: lines; settings, of a command anywhere in the text or of the
dump that engines write at their start; and facts, numbers of all lines that tell acceptance. Each
row of symptoms.toml says by which of these it is known, and has its cause, what to do, and the
public thread where it was found.
"""

import ast
import json
import operator
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import fmean
from typing import Any

from foretoken.lab.findings import Finding
from foretoken.lab.http.client import PER_POSITION, parse_metrics
from foretoken.lab.launch.launch import as_text
from foretoken.lab.launch.read import read_source
from foretoken.lab.plain import read_table

_SIGNS = {
    "foretoken": r"\bforetoken\b|; mean acceptance length|control: ",
    "sglang": r"\bsglang|accept len:|ServerArgs\(",
    "tensorrt-llm": r"TRT-LLM|TensorRT-LLM|tensorrt_llm|trtllm",
    "llama.cpp": r"\bllama[_-]|\bslot +\w+:|\bsrv +\w+:|draft acceptance|llamacpp:|ggml|#calls\(b",
    "vllm": r"\bvllm\b|SpecDecoding metrics|EngineCore",
}
"""How the lines of an engine are known; the most lines win."""
_COMMAND = re.compile(
    r"(?:[\w./-]*/)?(?:vllm +serve|python3? +-m +(?:sglang|vllm)|sglang +serve|llama-server|"
    r"llama-cli|trtllm-serve|foretoken +serve)\b.*"
)
_NUMBER = r"([\d.]+)"
_RATE = re.compile(
    rf"(?:draft acceptance rate: |acceptance rate |accept rate: |draft acceptance(?: rate)? = )"
    rf"{_NUMBER}(%?)",
    re.IGNORECASE,
)
_LENGTH = re.compile(
    rf"(?:mean acceptance length:? *=? *|accept len: |mean len = +){_NUMBER}", re.IGNORECASE
)
_POSITIONS = re.compile(
    r"(?:per[- ]position(?: acceptance rate)?:? |per position = \()((?:[\d.]+, )*[\d.]+)",
    re.IGNORECASE,
)
_DRAFTED = re.compile(r"Drafted: (\d+)|/ +(\d+) generated")
_PROMPT = re.compile(r"prompt eval time = .*?/ +(\d+) tokens")
_HITS = re.compile(r"prefix cache hit rate: ([\d.]+)%", re.IGNORECASE)
_FULL = re.compile(r"KV cache usage: ([\d.]+)%|token usage: ([\d.]+)", re.IGNORECASE)
_DRAFTING = re.compile(
    r"statistics +\S+ +#calls\(b,g,a\) = +\d+ +(\d+) .*dur\(b,g,a\) = [\d.]+, ([\d.]+)"
)
_COMPARE = {"<": operator.lt, ">": operator.gt, "=": operator.eq}
_LONG, _SHORT = 4096, 2048
"""Tokens of a prompt."""


@dataclass(frozen=True, slots=True)
class _Sample:
    """Acceptance as one line tells it."""

    line: int
    rate: float
    length: float | None
    positions: tuple[float, ...]
    drafted: int
    prompt: int | None


@dataclass(frozen=True, slots=True)
class ServerLog:
    """What a text says."""

    engine: str
    lines: list[str]
    settings: dict[str, str] = field(default_factory=dict)
    facts: dict[str, float] = field(default_factory=dict)
    where: dict[str, int] = field(default_factory=dict)
    """The line that a fact is best seen in."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Symptom:
    """One row; all of `lines`, `settings` and `facts` that it has must be there."""

    name: str
    cause: str
    do: str
    thread: str
    level: str = "warning"
    engines: tuple[str, ...] = ()
    """Empty: all."""
    lines: tuple[str, ...] = ()
    """Patterns, one of which is found in a line."""
    settings: Mapping[str, str] = field(default_factory=dict)
    """Setting -> pattern of its value; one that begins with `!` must not be found."""
    facts: tuple[tuple[str, str, float], ...] = ()
    times: int = 1
    """In how many lines a pattern is found."""


@cache
def symptoms() -> tuple[Symptom, ...]:
    rows = read_table("foretoken.lab.lint", "symptoms.toml")
    return tuple(_symptom(name, row) for name, row in rows.items())


def _symptom(name: str, row: Mapping[str, Any]) -> Symptom:
    given: dict[str, Any] = dict(row)
    for key in ("engines", "lines"):
        given[key] = tuple(row.get(key, ()))
    given["facts"] = tuple((name, sign, float(limit)) for name, sign, limit in row.get("facts", ()))
    return Symptom(name=name, **given)


def diagnose(text: str, engine: str = "auto") -> tuple[ServerLog, list[Finding]]:
    """What a text shows, the worst first as `Finding`s: where is the evidence."""
    log = read_log(text, engine)
    found = []
    for symptom in symptoms():
        evidence = _evidence(symptom, log)
        if evidence:
            cause = f"{symptom.cause} ({symptom.thread})"
            found.append(Finding(symptom.name, symptom.level, evidence, cause, symptom.do))
    return log, found


def _evidence(symptom: Symptom, log: ServerLog) -> str:
    """Where a symptom is seen; empty: it is not."""
    if symptom.engines and log.engine not in symptom.engines:
        return ""
    seen = []
    for name, pattern in symptom.settings.items():
        value = log.settings.get(name)
        wanted = not pattern.startswith("!")
        if wanted and (value is None or not re.search(pattern, value, re.IGNORECASE)):
            return ""
        if not wanted and value is not None and re.search(pattern[1:], value, re.IGNORECASE):
            return ""
        seen += [f"{name} {value}"] if wanted else []
    for name, sign, limit in symptom.facts:
        if name not in log.facts or not _COMPARE[sign](log.facts[name], limit):
            return ""
        line = log.where.get(name)
        where = "" if line is None else f", line {line + 1}: {_short(log.lines[line])}"
        seen.append(f"{name.replace('_', ' ')} {log.facts[name]:.3g}{where}")
    if symptom.lines:
        any_of = re.compile("|".join(symptom.lines), re.IGNORECASE)
        at = [number for number, line in enumerate(log.lines) if any_of.search(line)]
        if len(at) < symptom.times:
            return ""
        seen.insert(0, f"line {at[0] + 1}: {_short(log.lines[at[0]])}")
    return "; ".join(seen)


def _short(line: str) -> str:
    text = " ".join(line.split())
    return text if len(text) <= 110 else text[:107] + "..."


def read_log(text: str, engine: str = "auto") -> ServerLog:
    """Lines, settings and facts of a text, whatever it is: a log, a metrics page, a command."""
    lines = text.splitlines()
    if engine == "auto":
        counts = {name: sum(bool(re.search(sign, line)) for line in lines)
                  for name, sign in _SIGNS.items()}  # fmt: skip
        engine = max(counts, key=lambda name: counts[name]) if any(counts.values()) else "auto"
    log = ServerLog(engine, lines)
    for line in lines:
        log.settings.update(_settings(line))
    samples = list(_samples(lines))
    if samples:
        _add_facts(log, samples)
    for name, pattern in (("hit_rate", _HITS), ("kv_usage", _FULL)):
        told = [(float(match[1] or match[2] or 0) / (100 if "%" in match[0] else 1), at)
                for at, line in enumerate(lines) if (match := pattern.search(line))]  # fmt: skip
        if told:
            log.facts[f"{name}_max"], log.where[f"{name}_max"] = max(told)
            log.facts[f"{name}_lines"] = float(len(told))
    drafting = [match for line in lines if (match := _DRAFTING.search(line))]
    if drafting and int(drafting[-1][1]):
        log.facts["ms_per_draft"] = float(drafting[-1][2]) / int(drafting[-1][1])
    _add_metrics(log, parse_metrics(text))
    return log


def _settings(line: str) -> dict[str, str]:
    """Settings of a command, or of a dump of settings, in one line."""
    found: dict[str, str] = {}
    command = _COMMAND.search(line)
    if command is not None:
        for launch in read_source(command[0]).launches:
            found |= {name: as_text(value) for name, value in launch.options.items()}
            found |= {f"spec.{name}": as_text(value) for name, value in launch.speculation.items()}
            found["speculates"] = str(launch.speculates)
            found |= {"model": launch.model} if launch.model else {}
    elif "non-default args: {" in line:  # vLLM's
        try:
            found = _flat(ast.literal_eval(line[line.index("{") :]))
        except (ValueError, SyntaxError):
            return {}
        found["speculates"] = str(any(name.startswith("spec.") for name in found))
    elif "server_args=ServerArgs(" in line:  # SGLang's
        pairs = re.findall(r"(\w+)=('[^']*'|[^,)\s]+)", line[line.index("(") :])
        given = {k: v.strip("'") for k, v in pairs if v not in ("None", "False", "''")}
        found = {name.replace("_", "-"): value for name, value in given.items()}
        found["speculates"] = str("speculative-algorithm" in found)
        found |= {"model": found["model-path"]} if "model-path" in found else {}
    return found


def _flat(given: Mapping[str, Any]) -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in given.items():
        if name == "speculative_config" and isinstance(value, str):
            value = json.loads(value)
        if name == "speculative_config" and isinstance(value, dict):
            found |= {f"spec.{key}": as_text(one) for key, one in value.items()}
        else:
            found[name.replace("_", "-")] = as_text(value)
    if "model-tag" in found:
        found.setdefault("model", found["model-tag"])
    return found


def _samples(lines: Sequence[str]) -> Iterator[_Sample]:
    prompt = None
    for at, line in enumerate(lines):
        asked = _PROMPT.search(line)
        prompt = int(asked[1]) if asked else prompt
        rate, length = _RATE.search(line), _LENGTH.search(line)
        places, drafted = _POSITIONS.search(line), _DRAFTED.search(line)
        if rate is None:
            continue
        value = float(rate[1].rstrip(".")) / (100 if rate[2] else 1)
        yield _Sample(
            line=at,
            rate=value,
            length=float(length[1].rstrip(".")) if length else None,
            positions=tuple(map(float, places[1].split(", "))) if places else (),
            drafted=int(drafted[1] or drafted[2]) if drafted else 0,
            prompt=prompt,
        )


def _add_facts(log: ServerLog, samples: Sequence[_Sample]) -> None:
    rates = [one.rate for one in samples]
    lengths = [one.length for one in samples if one.length is not None]
    worst = min(samples, key=lambda one: one.rate)
    log.facts.update(
        {
            "acceptance_lines": float(len(samples)),
            "acceptance_min": min(rates),
            "acceptance_max": max(rates),
            "acceptance_mean": fmean(rates),
            "zero_share": sum(rate == 0 for rate in rates) / len(rates),
            "drafted": float(sum(one.drafted for one in samples)),
        }
    )
    log.where.update(dict.fromkeys(("acceptance_min", "zero_share"), worst.line))
    log.where["acceptance_max"] = max(samples, key=lambda one: one.rate).line
    if lengths:
        log.facts.update({"length_mean": fmean(lengths), "length_max": max(lengths)})
        log.where["length_mean"] = samples[-1].line
    half = len(rates) // 2
    if half >= 3 and fmean(rates[:half]) > 0:
        log.facts["later_over_earlier"] = fmean(rates[half:]) / fmean(rates[:half])
        log.where["later_over_earlier"] = samples[-1].line
    long = [one.rate for one in samples if one.prompt is not None and one.prompt >= _LONG]
    short = [one.rate for one in samples if one.prompt is not None and one.prompt < _SHORT]
    if long and short and fmean(short) > 0:
        log.facts["long_over_short"] = fmean(long) / fmean(short)
    placed = [one for one in samples if len(one.positions) > 1]
    if placed:
        _add_positions(log, placed[-1].positions, placed[-1].line)


def _add_positions(log: ServerLog, rates: Sequence[float], line: int | None) -> None:
    log.facts.update(
        {"k": float(len(rates)), "first_position": rates[0], "last_position": rates[-1]}
    )
    if rates[0] > 0:
        log.facts["second_over_first"] = rates[1] / rates[0]
    if line is not None:
        log.where.update(
            dict.fromkeys(("first_position", "last_position", "second_over_first"), line)
        )


def _add_metrics(log: ServerLog, page: Mapping[str, float]) -> None:
    """Facts of a metrics page, by vLLM's names."""
    spec = "vllm:spec_decode_num_"
    steps, drafted, accepted = (
        page.get(spec + what, 0.0) for what in ("drafts", "draft_tokens", "accepted_tokens")
    )
    if drafted:
        rate = accepted / drafted
        log.facts.update({"drafted": drafted, "acceptance_mean": rate, "acceptance_max": rate,
                      "acceptance_min": rate, "acceptance_lines": 1.0})  # fmt: skip
    if drafted and steps:
        log.facts["length_mean"] = 1.0 + accepted / steps
        names = [name for name in page if name.startswith(f"{PER_POSITION}.")]
        names.sort(key=lambda name: int(name.rpartition(".")[2]))
        if len(names) > 1:
            _add_positions(log, [page[name] / steps for name in names], None)
    asked, found = page.get("vllm:prefix_cache_queries"), page.get("vllm:prefix_cache_hits")
    if asked and found is not None:
        log.facts.update({"hit_rate_max": found / asked, "hit_rate_lines": asked})
    if "vllm:num_preemptions" in page:
        log.facts["preemptions"] = page["vllm:num_preemptions"]
