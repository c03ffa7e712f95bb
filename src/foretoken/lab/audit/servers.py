"""An audit of running or started servers, and its result file.

Speculation off is a server of its own, or, where the server knows it, a field of the request. The
folder gets audit.json and the servers' logs.
"""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from foretoken.lab.audit.asking import Asker
from foretoken.lab.audit.judging import CheckResult
from foretoken.lab.audit.run import AuditFollower, AuditPlan, audit
from foretoken.lab.audit.turns import Turns
from foretoken.lab.http.client import EXTRAS, Client
from foretoken.lab.measure.bench import load_items
from foretoken.lab.measure.experiment import ArmConfig, WorkloadConfig
from foretoken.lab.measure.loops import run_to_end
from foretoken.lab.measure.lossless import promises_seeds
from foretoken.lab.measure.servers import serving
from foretoken.lab.records.run_files import describe_client, make_folder, write_json

RESULT = "audit.json"
OFF_BY_REQUEST: dict[str, dict[str, Any]] = {"foretoken": {"speculation": {"enabled": False}}}
"""Engines that leave speculation out of a request with these fields."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AuditConfig:
    """`foretoken lab audit`."""

    candidate: ArmConfig
    baseline: ArmConfig | None
    workload: WorkloadConfig
    plan: AuditPlan = AuditPlan()


@dataclass(frozen=True, slots=True, kw_only=True)
class Audited:
    """What an audit found, and of whom."""

    candidate: str
    baseline: str
    """What plain decoding was: a server, a field of the request, or nothing."""
    requests: int
    seconds: float
    checks: tuple[CheckResult, ...]

    @property
    def num_faults(self) -> int:
        """Checks that found one."""
        return sum(check.status == "fault" for check in self.checks)

    @property
    def num_asked(self) -> int:
        """Checks that could be made."""
        return sum(check.status != "unasked" for check in self.checks)


def texts_of(workload: WorkloadConfig) -> list[str]:
    """The prompts of a workload; of a conversation its last message."""
    items = load_items(workload)[0]
    found = [item.prompt or str((item.messages or [{}])[-1].get("content", "")) for item in items]
    return [text for text in found if text.strip()]


def run_audit(config: AuditConfig, out: Path, follow: AuditFollower | None = None) -> Audited:
    """Make the checks and save what they found.

    Raises:
        ConfigError: wrong settings. EndpointError: a server is not there.
    """
    texts = texts_of(config.workload)
    make_folder(out)
    found = run_to_end(_run(config, texts, out, follow))
    value = {"kind": "audit", "schema": 1, "config": asdict(config), "found": asdict(found),
             "environment": describe_client()}  # fmt: skip
    write_json(out / RESULT, value)
    return found


async def _run(
    config: AuditConfig, texts: list[str], out: Path, follow: AuditFollower | None
) -> Audited:
    began = time.monotonic()
    async with serving(config.candidate, out / "logs" / "on.log") as on:
        async with _plain(config.baseline, on, out / "logs" / "off.log") as (off, fields, said):
            turns = None if off is None else _turns_of(on, off)
            arm = _asker(on, config.plan, turns)
            plain = None if off is None else _asker(off, config.plan, turns, fields)
            same_seeds = promises_seeds(on, off)
            checks = await audit(
                arm, plain, texts, config.plan, same_seeds=same_seeds, follow=follow
            )
    return Audited(
        candidate=f"{on.info.engine} at {on.info.url}",
        baseline=said,
        requests=arm.num_asked + (0 if plain is None else plain.num_asked),
        seconds=time.monotonic() - began,
        checks=checks,
    )


@asynccontextmanager
async def _plain(
    baseline: ArmConfig | None, on: Client, log: Path
) -> AsyncIterator[tuple[Client | None, dict[str, Any], str]]:
    """Whom to ask without speculation, with which fields, and how that is said."""
    if baseline is not None:
        async with serving(baseline, log) as off:
            yield off, {}, f"{off.info.engine} at {off.info.url}"
        return
    fields = OFF_BY_REQUEST.get(on.info.engine)
    if fields is None:
        yield None, {}, "none"
        return
    yield on, fields, "the same server, speculation off in the request"


def _turns_of(on: Client, off: Client) -> Turns | None:
    """Servers of one machine are asked in turns: both at once would starve each other."""
    same_machine = urlsplit(on.info.url).hostname == urlsplit(off.info.url).hostname
    return Turns() if same_machine and on.info.url != off.info.url else None


def _asker(
    client: Client,
    plan: AuditPlan,
    turns: Turns | None,
    fields: dict[str, Any] | None = None,
) -> Asker:
    """Token ids are asked for where the server knows the word."""
    known = {k: v for k, v in EXTRAS.get(client.info.engine, {}).items() if k == "return_token_ids"}
    return Asker(
        client.pool,
        client.info.model,
        extra_body={**known, **client.config.extra_body, **(fields or {})},
        concurrency=plan.concurrency,
        timeout_s=client.config.timeout_s,
        turns=turns,
    )
