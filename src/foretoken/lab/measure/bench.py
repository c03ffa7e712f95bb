"""One arm under one load, in blocks; and the plan that turns settings into segments.

`measure_blocks` is what `ab`, `sweep` and `dial` are made of too: it goes through segments in the
given order, and leaves out what a resumed run has finished.
"""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from foretoken.errors import ConfigError, one_of
from foretoken.lab.analysis.summary import ArmData, summarize_arm
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.http.timed import now
from foretoken.lab.measure.experiment import ArmConfig, RunConfig, Sizes, WorkloadConfig
from foretoken.lab.measure.loops import run_to_end
from foretoken.lab.measure.segments import RunFolder, Segment, SegmentEnd, busy_share, measure
from foretoken.lab.measure.traces import load_workload
from foretoken.lab.measure.workload import Item, Load, only, take, with_settings, with_temperatures
from foretoken.lab.records.results import RequestRecord, RunSummary
from foretoken.lab.records.run_files import SUMMARY, describe_client, read_requests, write_json

Watch = Callable[[Segment, RequestRecord | None], None]
"""Told of every segment that begins (None) and of every request that ends."""


def silent(segment: Segment, record: RequestRecord | None) -> None:
    """A Watch that shows nothing."""


def load_items(config: WorkloadConfig) -> tuple[list[Item], tuple[str, ...]]:
    """The items of a workload as they are to be sent, and notes on what was left out.

    Raises:
        ConfigError: the file cannot be read, or has nothing of the class.
    """
    loaded = load_workload(Path(config.file), format=config.format, strict=config.strict)
    items = with_temperatures(loaded.items, config.temperatures)
    items = with_settings(
        items, max_tokens=config.max_tokens, seed=config.seed, parameters=config.parameters
    )
    if config.category is not None:
        items = only(items, config.category)
        if not items:
            have = sorted({item.category for item in loaded.items if item.category})
            allowed = one_of(config.category, have) if have else "none: no request has a class"
            raise ConfigError("workload.category", config.category, allowed)
    notes: tuple[str, ...] = ()
    if loaded.skipped:
        notes = (f"{loaded.skipped} broken lines were skipped: {loaded.first_problem}",)
    return items, notes


def plan_block(
    items: Sequence[Item], sizes: Sizes, block: int
) -> tuple[tuple[Item, ...], tuple[Item, ...]]:
    """The items of a block, and those that warm its server up: other prompts where there are any.

    Blocks take the workload in turn, so that their prompts differ as long as it lasts.
    """
    count = sizes.requests_per_block
    own = take(items, count, block * count)
    warm = take(items, sizes.warm_up, len(items) - sizes.warm_up % len(items))
    return tuple(own), tuple(warm)


def plan_run(config: RunConfig, items: Sequence[Item]) -> list[Segment]:
    """The segments of a run."""
    return [segment_of(config.arm, config, items, block) for block in range(config.sizes.blocks)]


def segment_of(arm: ArmConfig, config: "RunConfig", items: Sequence[Item], block: int) -> Segment:
    """One block of one arm."""
    own, warm = plan_block(items, config.sizes, block)
    return Segment(
        arm=arm,
        block=block,
        items=own,
        warm_up=warm,
        load=config.load,
        arrival_seed=config.seed * 100_003 + block,
        keep_text=config.keep_text,
        scrape_every_s=config.scrape_every_s,
    )


async def measure_blocks(segments: Sequence[Segment], folder: RunFolder, watch: Watch) -> None:
    """Measure what is not measured yet, in order."""
    start_s = now()
    for segment in segments:
        if folder.is_finished(segment):
            continue
        watch(segment, None)
        await measure(segment, folder, start_s, lambda record, s=segment: watch(s, record))  # type: ignore[misc]


def run_bench(
    config: RunConfig, out: Path, *, resume: bool = False, watch: Watch = silent
) -> RunSummary:
    """Measure one arm; partial results are saved and summarized whatever happens.

    Raises:
        ConfigError: wrong settings. EndpointError: no server.
    """
    items, notes = load_items(config.workload)
    segments = plan_run(config, items)
    folder = RunFolder(out, config, resume=resume)
    try:
        run_to_end(measure_blocks(segments, folder, watch))
    finally:
        folder.close()
        if folder.finished:
            summary = summarize_run(config, out, folder.finished, notes)
            write_json(out / SUMMARY, summary)
    return summary


def summarize_run(
    config: RunConfig, out: Path, finished: Sequence[SegmentEnd], notes: tuple[str, ...] = ()
) -> RunSummary:
    """The summary of the finished blocks of a run's folder."""
    settled = without_start(kept(read_requests(out), finished))
    data = gather(config.arm.name, finished, (*notes, *settled.notes), config.load)
    return RunSummary(
        complete=len(data.seconds_of_block) >= config.sizes.blocks,
        config=asdict(config),
        environment={**describe_client(), "host_busy": busy_share(finished)},
        arm=summarize_arm(settled.records, settled.shorten(data), config.slo),
    )


def kept(records: Sequence[RequestRecord], finished: Sequence[SegmentEnd]) -> list[RequestRecord]:
    """Records of finished segments."""
    keys = {(end.arm, end.block) for end in finished}
    return [record for record in records if (record.arm, record.block) in keys]


def gather(
    arm: str,
    finished: Sequence[SegmentEnd],
    notes: tuple[str, ...] = (),
    load: Load | None = None,
) -> ArmData:
    """What the segments of an arm add up to, with a note on everything odd."""
    own = [end for end in finished if end.arm == arm]
    counters: Counter[str] = Counter()
    gauges: dict[str, float] = {}
    for end in own:
        counters.update(end.counters)
        gauges |= {n: max(v, gauges.get(n, 0.0)) for n, v in end.gauges.items()}
    return ArmData(
        arm=arm,
        server=own[-1].server,
        seconds_of_block={end.block: end.seconds for end in own},
        counters=dict(counters),
        gauges=gauges,
        in_flight=load.concurrency if load is not None and load.kind == "closed" else 0,
        notes=(*notes, *_oddities(own)),
    )


def _oddities(own: Sequence[SegmentEnd]) -> list[str]:
    notes = []
    versions = sorted({f"{end.server.engine} {end.server.version}" for end in own})
    if len(versions) > 1:
        notes.append(f"mixed versions of the server: {', '.join(versions)}")
    models = sorted({str(end.server.model) for end in own})
    if len(models) > 1:
        notes.append(f"mixed models: {', '.join(models)}")
    jumps = [f"{end.clock_jump_s:+.1f} s in block {end.block}" for end in own if end.clock_jump_s]
    if jumps:
        notes.append(f"the wall clock jumped ({'; '.join(jumps)}); all times here are monotonic")
    if not all(end.has_metrics for end in own):
        notes.append("the server has no /metrics: no counters, no KV usage, no queue")
    return notes
