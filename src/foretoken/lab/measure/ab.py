"""One server, or two under the same arrivals, prompts and seeds, in blocks in turns (ABBA).

Each block starts its servers anew where the lab has their commands, since starts of one build
differ more than most effects that are looked for. Gains are above 1 where the candidate is better.
What a resumed run has finished is left out.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from foretoken.lab.analysis.summary import (
    ArmData,
    compare_texts,
    compute_gains,
    gains_by_class,
    summarize_arm,
)
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.http.timed import now
from foretoken.lab.measure.driving import run_to_end
from foretoken.lab.measure.experiment import AbConfig
from foretoken.lab.measure.segments import RunFolder, Segment, SegmentEnd, Watch, measure
from foretoken.lab.measure.workload import Item, Load, load_items, take
from foretoken.lab.records.results import AbSummary, RequestRecord
from foretoken.lab.records.run_files import (
    SUMMARY,
    describe_client,
    finished_ab,
    read_requests,
    write_json,
)
from foretoken.lab.stats.repeats import in_turn


def silent(segment: Segment, record: RequestRecord | None) -> None:
    """A Watch that shows nothing."""


def plan_ab(config: AbConfig, items: Sequence[Item]) -> list[Segment]:
    """Segments in the order they are measured: A B, B A, A B, ... Blocks take the workload in turn,
    so that their prompts differ as long as it lasts; other prompts warm the server up, where there
    are any."""
    count, warm = config.sizes.requests_per_block, config.sizes.warm_up
    warm_up = tuple(take(items, warm, len(items) - warm % len(items)))
    return [
        Segment(
            arm=arm,
            block=block,
            items=tuple(take(items, count, block * count)),
            warm_up=warm_up,
            load=config.load,
            arrival_seed=config.seed * 100_003 + block,
        )
        for block in range(config.sizes.blocks)
        for arm in in_turn(config.arms, block)
    ]


def run_ab(
    config: AbConfig, out: Path, *, resume: bool = False, watch: Watch = silent
) -> AbSummary:
    """Measure the arms; what is measured is saved and summarized whatever happens. Raises
    ConfigError: wrong settings; EndpointError: a server is not there."""
    items, notes = load_items(config.workload)
    before = finished_ab(out) if resume else None
    look = before.look + 1 if before else 1
    folder = RunFolder(out, config, resume=resume)
    found = None

    async def measure_blocks() -> None:
        start_s, measured = now(), {(end.arm, end.block) for end in folder.finished}
        for segment in plan_ab(config, items):
            if (segment.arm.name, segment.block) not in measured:
                watch(segment, None)
                await measure(segment, folder, start_s, watch)

    try:
        run_to_end(measure_blocks())
        found = summarize(config, out, folder.finished, notes, look)
    finally:
        folder.close()
        if found is None and len({end.arm for end in folder.finished}) == len(config.arms):
            partial = summarize(config, out, folder.finished, notes, look)
            write_json(out / SUMMARY, replace(partial, complete=False))
    write_json(out / SUMMARY, found)
    return found


def summarize(
    config: AbConfig,
    out: Path,
    finished: Sequence[SegmentEnd],
    notes: tuple[str, ...] = (),
    look: int = 1,
) -> AbSummary:
    """The summary of the blocks that all arms have finished."""
    names = [arm.name for arm in config.arms]
    common = set.intersection(*({e.block for e in finished if e.arm == name} for name in names))
    whole = [end for end in finished if end.block in common]
    keys = {(end.arm, end.block) for end in whole}
    settled = without_start([r for r in read_requests(out) if (r.arm, r.block) in keys])
    notes = (*notes, *settled.notes)
    data = [
        settled.shorten(gather(name, whole, notes if len(names) == 1 else (), config.load))
        for name in names
    ]
    arms = [summarize_arm(settled.records, own, config.slo) for own in data]
    busy = [end.host_busy for end in whole if end.host_busy is not None]
    environment = {**describe_client(), "host_busy": sum(busy) / len(busy) if busy else None}
    base = AbSummary(
        complete=len(common) >= config.sizes.blocks,
        config=asdict(config),
        environment=environment,
        baseline=names[0],
        candidate=names[-1],
        arms=tuple(arms),
        look=look,
    )
    if not base.compared:
        return base
    versions = [arm.server.version for arm in arms]
    if versions[0] != versions[1]:
        notes += (f"the arms run different versions: {versions[0]} and {versions[1]}",)
    pair = (data[0], data[1])
    return replace(
        base,
        gains=compute_gains(settled.records, pair, config.slo),
        equality=compare_texts(settled.records, (names[0], names[1])),
        classes=gains_by_class(settled.records, pair),
        notes=notes,
    )


def gather(
    arm: str,
    finished: Sequence[SegmentEnd],
    notes: tuple[str, ...] = (),
    load: Load | None = None,
) -> ArmData:
    own = [end for end in finished if end.arm == arm]
    counters: Counter[str] = Counter()
    gauges: dict[str, float] = {}
    for end in own:
        counters.update(end.counters)
        gauges |= {n: max(v, gauges.get(n, 0.0)) for n, v in end.gauges.items()}
    odd = []
    versions = sorted({f"{end.server.engine} {end.server.version}" for end in own})
    if len(versions) > 1:
        odd.append(f"mixed versions of the server: {', '.join(versions)}")
    models = sorted({str(end.server.model) for end in own})
    if len(models) > 1:
        odd.append(f"mixed models: {', '.join(models)}")
    if not all(end.has_metrics for end in own):
        odd.append("the server has no /metrics: no counters, no KV usage")
    return ArmData(
        arm=arm,
        server=own[-1].server,
        seconds_of_block={end.block: end.seconds for end in own},
        counters=dict(counters),
        gauges=gauges,
        in_flight=load.concurrency if load is not None and load.kind == "closed" else 0,
        notes=(*notes, *odd),
    )
