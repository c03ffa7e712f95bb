"""Results of AIPerf (profile_export.jsonl) or guidellm (its JSON), as a folder of `foretoken lab`.

    python examples/read_load_generator.py profile_export.jsonl --out run --slo ttft=0.2

What they do not store (chunk times, due arrivals) stays empty; a request counts as sent when it was
due. Broken entries are skipped and counted.
"""

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.cli.lab.options import parse_levels
from foretoken.cli.lab.run_tables import console, print_arms
from foretoken.errors import ConfigError
from foretoken.lab.analysis.summary import ArmData, summarize_arm
from foretoken.lab.http.read_answer import from_body
from foretoken.lab.measure.experiment import ServiceLevels
from foretoken.lab.records.results import AbSummary, RequestAcceptance, RequestRecord, ServerInfo
from foretoken.lab.records.run_files import (
    REQUESTS,
    SUMMARY,
    LineWriter,
    describe_client,
    write_json,
)

_TOOLS = "AIPerf's profile_export.jsonl or guidellm's JSON"


def main(words: list[str]) -> None:
    """Read a file, write the folder of a run, and show its table.

    Raises:
        ConfigError: the file is of neither tool, or the folder has a run already.
    """
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, help=_TOOLS)
    parser.add_argument("--out", type=Path, default=Path("read"), help="a new folder")
    parser.add_argument("--slo", help="such as ttft=0.2,tpot=0.05, in seconds")
    parser.add_argument("--strict", action="store_true", help="a broken entry is an error")
    given = parser.parse_args(words)
    levels = ServiceLevels(**parse_levels(given.slo)) if given.slo else None
    found = read_other_tool(given.file, "server", strict=given.strict)
    summary = summarize_imported(found, given.file, levels)
    write_imported(found, summary, given.out)
    print_arms(console(), summary.arms)


@dataclass(frozen=True, slots=True)
class ImportedRun:
    """Records of another tool's file."""

    records: tuple[RequestRecord, ...]
    tool: str
    skipped: int


def read_other_tool(path: Path, arm: str, *, strict: bool = False) -> ImportedRun:
    """The requests of a file of AIPerf or guidellm.

    Raises:
        ConfigError: it cannot be read, is neither, or with `strict` has a broken entry.
    """
    found = _read(path, arm)
    if strict and found.skipped:
        allowed = "a file without broken entries; without --strict they are left out"
        raise ConfigError("FILE", f"{path} with {found.skipped} broken entries", allowed)
    return found


def _read(path: Path, arm: str) -> ImportedRun:
    try:
        text = path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError("FILE", str(path), f"a readable file ({error})") from error
    if path.suffix == ".jsonl":
        found = _read_aiperf(text, arm)
    else:
        try:
            value = json.loads(text)
        except ValueError as error:
            raise ConfigError("FILE", str(path), f"{_TOOLS} ({error})") from error
        if not isinstance(value, dict) or not isinstance(value.get("benchmarks"), list):
            raise ConfigError("FILE", str(path), _TOOLS)
        found = _read_guidellm(value["benchmarks"], arm)
    if not found.records:
        given = f"{path} without a request of {found.tool} ({found.skipped} broken entries)"
        raise ConfigError("FILE", given, f"{_TOOLS}, with at least one request")
    return found


def summarize_imported(
    found: ImportedRun, path: Path, levels: ServiceLevels | None = None
) -> AbSummary:
    """The summary of another tool's records."""
    ends: dict[int, float] = {}
    for record in found.records:
        ends[record.block] = max(ends.get(record.block, 0.0), record.end_s or 0.0)
    notes = (f"read from {path.name} of {found.tool}; {found.skipped} broken entries skipped",)
    data = ArmData(
        arm="server",
        server=ServerInfo(url=path.name),
        seconds_of_block=ends,
        counters={},
        gauges={},
        notes=notes,
    )
    return AbSummary(
        config={"read": str(path)},
        environment=describe_client(),
        baseline="server",
        candidate="server",
        arms=(summarize_arm(found.records, data, levels or ServiceLevels()),),
    )


def write_imported(found: ImportedRun, summary: AbSummary, out: Path) -> None:
    """The folder of a run, as if it had been measured here.

    Raises:
        ConfigError: there is a run already, or no room.
    """
    if (out / REQUESTS).exists() or (out / SUMMARY).exists():
        raise ConfigError("--out", str(out), "a new folder: in this one there is a run already")
    try:
        with LineWriter(out / REQUESTS) as writer:
            for record in found.records:
                writer.write(record)
    except OSError as error:
        raise ConfigError("--out", str(out), f"a folder to write to ({error})") from error
    write_json(out / SUMMARY, summary)


def _read_aiperf(text: str, arm: str) -> ImportedRun:
    records: list[RequestRecord] = []
    skipped = 0
    zero: float | None = None
    for line in text.splitlines():
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            start = row["metadata"]["request_start_ns"] / 1e9
            zero = start if zero is None else zero
            records.append(_aiperf_record(len(records), row, arm, start - zero))
        except (ValueError, KeyError, TypeError, AttributeError):
            skipped += 1
    return ImportedRun(tuple(records), "aiperf", skipped)


def _aiperf_record(index: int, row: Mapping[str, Any], arm: str, start: float) -> RequestRecord:
    metadata, metrics = row["metadata"], row.get("metrics") or {}
    error = row.get("error")
    ttft, latency = _seconds(metrics, "time_to_first_token"), _seconds(metrics, "request_latency")
    tokens = _value(metrics, "output_sequence_length") or _value(metrics, "output_token_count")
    gaps = (metrics.get("inter_chunk_latency") or {}).get("value") or []
    first = None if ttft is None else start + ttft
    chunks = [] if first is None else [first]
    for gap in gaps:
        chunks.append(chunks[-1] + float(gap) / 1000)
    return RequestRecord(
        index=index,
        arm=arm,
        cluster=str(metadata.get("conversation_id") or index),
        warm_up=metadata.get("benchmark_phase") == "warmup",
        scheduled_s=start,
        sent_s=start,
        first_s=first,
        last_s=None if latency is None else start + latency,
        end_s=None if latency is None else start + latency,
        chunk_s=tuple(chunks),
        prompt_tokens=_whole(_value(metrics, "input_sequence_length")),
        output_tokens=_whole(tokens),
        error=None if error is None else f"server: {error.get('type')}: {error.get('message')}",
        acceptance=_aiperf_acceptance(row),
    )


def _aiperf_acceptance(row: Mapping[str, Any]) -> RequestAcceptance | None:
    found = row.get("spec_decode_acceptance") or row.get("spec_decode")
    return from_body({"speculative_decoding": found}) if isinstance(found, dict) else None


def _value(metrics: Mapping[str, Any], name: str) -> float | None:
    value = (metrics.get(name) or {}).get("value")
    return float(value) if isinstance(value, int | float) else None


def _seconds(metrics: Mapping[str, Any], name: str) -> float | None:
    value = _value(metrics, name)
    scale = {"ms": 1e-3, "us": 1e-6, "ns": 1e-9, "s": 1.0}
    unit = (metrics.get(name) or {}).get("unit", "ms")
    return None if value is None else value * scale.get(unit, 1e-3)


def _whole(value: float | None) -> int | None:
    return None if value is None else round(value)


def _read_guidellm(benchmarks: list[Any], arm: str) -> ImportedRun:
    records: list[RequestRecord] = []
    skipped = 0
    for block, benchmark in enumerate(benchmarks):
        if not isinstance(benchmark, dict):
            skipped += 1
            continue
        groups = benchmark.get("requests") or {}
        pairs: list[tuple[Any, str | None]] = [
            (row, None) for row in groups.get("successful") or ()
        ]
        pairs += [(row, "server") for row in groups.get("errored") or ()]
        zero = min((r["request_start_time"] for r, _ in pairs if _has_start(r)), default=0.0)
        for row, error in pairs:
            try:
                records.append(_guidellm_record(len(records), row, arm, (block, zero, error)))
            except (KeyError, TypeError, ValueError, AttributeError):
                skipped += 1
    return ImportedRun(tuple(records), "guidellm", skipped)


def _has_start(row: Mapping[str, Any]) -> bool:
    return isinstance(row, dict) and isinstance(row.get("request_start_time"), int | float)


def _guidellm_record(
    index: int, row: Mapping[str, Any], arm: str, place: tuple[int, float, str | None]
) -> RequestRecord:
    block, zero, error = place
    start = float(row["request_start_time"]) - zero
    ttft, latency = row.get("time_to_first_token_ms"), row.get("request_latency")
    return RequestRecord(
        index=index,
        arm=arm,
        block=block,
        scheduled_s=start,
        sent_s=start,
        first_s=None if ttft is None else start + float(ttft) / 1000,
        last_s=None if latency is None else start + float(latency),
        end_s=None if latency is None else start + float(latency),
        prompt_tokens=row.get("prompt_tokens"),
        output_tokens=row.get("output_tokens"),
        error=f"{error}: {row.get('error') or 'guidellm says no more'}" if error else None,
    )


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except ConfigError as error:
        sys.exit(str(error))
