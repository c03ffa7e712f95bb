"""How long an A/B will take, told before it begins, and how much of one fits into given minutes.

Every server is asked one request first. A server that is given as a command is started for it, as
it will be for every block, and one that is to be restarted is restarted, so a command that does not
work is found here.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.errors import ConfigError, EndpointError
from foretoken.lab.http.timed import now
from foretoken.lab.measure.driving import LoadRun, drive, run_to_end
from foretoken.lab.measure.experiment import AbConfig, ArmConfig, Sizes
from foretoken.lab.measure.servers import serving
from foretoken.lab.measure.workload import Item, Load
from foretoken.lab.records.results import RequestRecord

MOST_BLOCKS, FEWEST_BLOCKS = 9, 5
MOST_REQUESTS, ENOUGH_REQUESTS, FEWEST_REQUESTS = 120, 20, 4


@dataclass(frozen=True, slots=True)
class Pace:
    """What one start and one request of a server take."""

    start_s: float
    request_s: float


def probe(config: AbConfig, items: Sequence[Item], logs: Path) -> dict[str, Pace]:
    """The pace of every arm, from one request each. Raises EndpointError: a server does not start,
    or does not answer."""
    return {arm.name: run_to_end(_pace(arm, items[0], logs)) for arm in config.arms}


async def _pace(arm: ArmConfig, item: Item, logs: Path) -> Pace:
    began = now()
    answers: list[RequestRecord] = []
    async with serving(arm, logs / f"{arm.name}-first.log") as client:
        ready = now()
        run = LoadRun(arm=arm.name, load=Load(), start_s=ready, warm_up=True)
        took = await drive(client, [item], run, answers.append)
    if not answers[0].ok:
        raise EndpointError(f"arm {arm.name!r} answered nothing: {answers[0].error}")
    return Pace(ready - began if arm.starts_anew else 0.0, took)


def seconds_of(config: AbConfig, paces: Mapping[str, Pace]) -> float:
    before, each = _parts(config, paces)
    return config.sizes.blocks * (before + config.sizes.requests_per_block * each)


def _parts(config: AbConfig, paces: Mapping[str, Pace]) -> tuple[float, float]:
    """Seconds of a block of all servers before its requests, and of one of these. Those of a
    warm-up are sent together."""
    warm, load = bool(config.sizes.warm_up), config.load
    before = sum(own.start_s + warm * own.request_s for own in paces.values())
    if load.kind == "closed":
        return before, sum(own.request_s for own in paces.values()) / load.concurrency
    return before, sum(1.0 / load.rate if load.rate else own.request_s for own in paces.values())


def fit_into(config: AbConfig, paces: Mapping[str, Pace], seconds: float) -> AbConfig:
    """The A/B with as many blocks and requests as fit: starts first, then requests of each. Raises
    ConfigError: not even a few starts with a few requests fit."""
    before, each = _parts(config, paces)
    for blocks in range(MOST_BLOCKS, FEWEST_BLOCKS - 1, -1):
        requests = min(MOST_REQUESTS, int((seconds / blocks - before) / each))
        least = FEWEST_REQUESTS if blocks == FEWEST_BLOCKS else ENOUGH_REQUESTS
        if requests >= least:
            sizes = Sizes(blocks=blocks, requests_per_block=requests, warm_up=config.sizes.warm_up)
            return replace(config, sizes=sizes)
    minutes = FEWEST_BLOCKS * (before + FEWEST_REQUESTS * each) / 60
    allowed = f"at least {minutes:.1f} with these servers, or fewer tokens per answer: --max-tokens"
    raise ConfigError("--minutes", round(seconds / 60, 2), allowed)


def announce(config: AbConfig, paces: Mapping[str, Pace]) -> str:
    told = []
    for name, own in paces.items():
        start = f" after a start of {own.start_s:.0f} s" if own.start_s else ""
        told.append(f"{name} answers in {own.request_s:.2g} s{start}")
    took = _show_time(seconds_of(config, paces))
    return f"{_sizes_of(config)} take {took} ({', '.join(told)})"


def announce_unasked(config: AbConfig, *, sized: bool = False) -> str:
    """The same before a server was started; with what will be measured if `sized`."""
    unit = seconds_of(config, {arm.name: Pace(0.0, 1.0) for arm in config.arms})
    starts = config.sizes.blocks * sum(arm.starts_anew for arm in config.arms)
    more = f", and {starts} starts of a server" if starts else ""
    what = f"{_sizes_of(config)}, " if sized else ""
    return f"{what}{_show_time(unit)} for every second that a request takes{more}"


def _sizes_of(config: AbConfig) -> str:
    sizes = config.sizes
    return f"{sizes.blocks} blocks of {sizes.requests_per_block} requests for each server"


def _show_time(seconds: float) -> str:
    if seconds < 90:
        return f"about {max(1, round(seconds))} s"
    if seconds < 5400:
        return f"about {seconds / 60:.0f} minutes"
    return f"about {seconds / 3600:.1f} hours"
