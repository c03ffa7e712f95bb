"""Runs the losslessness checks on two arms: settings, what is saved after every check, going on.

The folder gets verify.json, replaced whole after every check, and the servers' logs.
"""

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from foretoken.errors import ConfigError
from foretoken.lab.measure.bench import load_items
from foretoken.lab.measure.experiment import ArmConfig, WorkloadConfig
from foretoken.lab.measure.loops import run_to_end
from foretoken.lab.measure.lossless import KINDS, Verified, VerifyFollower, VerifyPlan, verify
from foretoken.lab.measure.segments import TAKEN, require_same_settings
from foretoken.lab.measure.servers import serving
from foretoken.lab.plain import from_plain, to_plain
from foretoken.lab.records.run_files import describe_client, make_folder, write_json

RESULT = "verify.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifyConfig:
    """`foretoken lab verify`."""

    baseline: ArmConfig
    candidate: ArmConfig
    workload: WorkloadConfig
    plan: VerifyPlan = VerifyPlan()

    @property
    def whole_plan(self) -> VerifyPlan:
        """The plan, with the workload's length of outputs if it has one."""
        length = self.workload.max_tokens
        return self.plan if length is None else replace(self.plan, max_tokens=length)


def prompts_of(config: VerifyConfig) -> list[str]:
    """The texts to compare.

    Raises:
        ConfigError: the workload cannot be read, or has conversations only.
    """
    items = load_items(config.workload)[0]
    found = [item.prompt for item in items if item.prompt][: config.plan.prompts]
    if not found:
        raise ConfigError("--workload", config.workload.file, "prompts, not conversations")
    return found


def run_verify(
    config: VerifyConfig, out: Path, *, resume: bool = False, follow: VerifyFollower | None = None
) -> Verified:
    """Every check that `out` does not have yet; each is saved when it ends.

    Raises:
        ConfigError: wrong settings, or no room. EndpointError: a server is not there.
    """
    prompts, done = prompts_of(config), _before(config, out, resume)
    make_folder(out)
    told = follow or VerifyFollower()

    def checked(found: Verified) -> None:
        _save(config, found, out)
        told.checked(found)

    if len(done.texts) == len(KINDS) and len(done.distributions) == len(config.plan.parameters):
        return done
    return run_to_end(_run(config, prompts, out, done, replace(told, checked=checked)))


async def _run(
    config: VerifyConfig, prompts: Sequence[str], out: Path, done: Verified, follow: VerifyFollower
) -> Verified:
    async with serving(config.baseline, out / "logs" / "off.log") as off:
        async with serving(config.candidate, out / "logs" / "on.log") as on:
            return await verify((off, on), prompts, config.whole_plan, done=done, follow=follow)


def _before(config: VerifyConfig, out: Path, resume: bool) -> Verified:
    """What the folder has.

    Raises:
        ConfigError: it has something and `resume` is not set, or its settings were others.
    """
    path = out / RESULT
    if not path.is_file():
        return Verified()
    if not resume:
        raise ConfigError("--out", str(out), TAKEN)
    try:
        value = json.loads(path.read_text("utf-8"))
        before, found = value["config"], value["found"]
    except (ValueError, KeyError, TypeError) as error:
        allowed = f"what verify wrote ({error!r}); delete it to begin anew"
        raise ConfigError("--resume", str(path), allowed) from error
    require_same_settings(before, to_plain(asdict(config)))
    return from_plain(Verified, found, RESULT)


def _save(config: VerifyConfig, found: Verified, out: Path) -> None:
    value = {"kind": "verify", "schema": 1, "config": asdict(config), "found": found,
             "lossless": found.lossless, "environment": describe_client()}  # fmt: skip
    write_json(out / RESULT, value)
