"""Two arms under the same arrivals, prompts and seeds, in blocks whose order turns (ABBA).

Each block starts both servers anew where the lab has their commands, since starts of one build
differ more than most effects that are looked for. Gains are above 1 where the candidate is better.
"""

from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from foretoken.lab.analysis.gains import (
    alone_gains,
    compare_texts,
    compute_gains,
    cost_of,
    gains_by_class,
)
from foretoken.lab.analysis.summary import summarize_arm
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.measure.bench import (
    Watch,
    gather,
    kept,
    load_items,
    measure_blocks,
    segment_of,
    silent,
)
from foretoken.lab.measure.experiment import AbConfig, ArmConfig, RunConfig
from foretoken.lab.measure.loops import run_to_end
from foretoken.lab.measure.segments import RunFolder, Segment, SegmentEnd, busy_share
from foretoken.lab.measure.workload import Item
from foretoken.lab.records.results import AbSummary
from foretoken.lab.records.run_files import (
    SUMMARY,
    describe_client,
    finished_ab,
    read_requests,
    write_json,
)
from foretoken.lab.stats.repeats import in_turn


def plan_ab(config: AbConfig, items: Sequence[Item]) -> list[Segment]:
    """Segments in the order they are measured: A B, B A, A B, ..."""
    segments = []
    for block in range(config.sizes.blocks):
        arms = (config.baseline, config.candidate)
        for arm in in_turn(arms, block):
            segments.append(segment_of(arm, as_run(config, arm), items, block))
    return segments


def as_run(config: AbConfig, arm: ArmConfig) -> RunConfig:
    """The settings of one arm by itself."""
    return RunConfig(
        arm=arm,
        workload=config.workload,
        load=config.load,
        sizes=config.sizes,
        slo=config.slo,
        seed=config.seed,
        keep_text=config.keep_text,
        scrape_every_s=config.scrape_every_s,
    )


def run_ab(
    config: AbConfig, out: Path, *, resume: bool = False, watch: Watch = silent
) -> AbSummary:
    """Measure both arms; what is measured is saved and summarized whatever happens.

    Raises:
        ConfigError: wrong settings. EndpointError: a server is not there.
    """
    items, notes = load_items(config.workload)
    before = finished_ab(out) if resume else None
    look = before.look + 1 if before else 1
    folder = RunFolder(out, config, resume=resume)
    summary = None
    try:
        run_to_end(measure_blocks(plan_ab(config, items), folder, watch))
        summary = summarize_ab(config, out, folder.finished, notes)
    finally:
        folder.close()
        if summary is None and len({end.arm for end in folder.finished}) == 2:
            partial = summarize_ab(config, out, folder.finished, notes)
            write_json(out / SUMMARY, replace(partial, look=look, complete=False))
    summary = replace(summary, look=look)
    if config.diagnose:
        summary = diagnose(config, summary, items, out, watch, resume=resume)
    write_json(out / SUMMARY, summary)
    return summary


def run_or_read(config: AbConfig, out: Path, *, resume: bool, watch: Watch) -> AbSummary:
    """With `resume`, an A/B that is measured whole is read: no further look at it."""
    found = finished_ab(out) if resume else None
    return found or run_ab(config, out, resume=resume, watch=watch)


def summarize_ab(
    config: AbConfig, out: Path, finished: Sequence[SegmentEnd], notes: tuple[str, ...] = ()
) -> AbSummary:
    """The summary of the blocks that both arms have finished."""
    names = (config.baseline.name, config.candidate.name)
    blocks = [{end.block for end in finished if end.arm == name} for name in names]
    common = blocks[0] & blocks[1]
    whole = [end for end in finished if end.block in common]
    settled = without_start(kept(read_requests(out), whole))
    records = settled.records
    data = [settled.shorten(gather(name, whole, load=config.load)) for name in names]
    base, other = (summarize_arm(records, d, config.slo) for d in data)
    gains = compute_gains(records, (data[0], data[1]), config.slo, config.price_per_hour)
    return AbSummary(
        complete=len(common) >= config.sizes.blocks,
        config=asdict(config),
        environment={**describe_client(), "host_busy": busy_share(whole)},
        baseline=names[0],
        candidate=names[1],
        arms=(base, other),
        gains=gains,
        equality=compare_texts(records, names),
        classes=gains_by_class(records, (data[0], data[1])),
        cost_per_million_tokens=cost_of((base, other), config.price_per_hour),
        notes=(*notes, *settled.notes, *_differences(base.server.version, other.server.version)),
    )


def _differences(one: str | None, other: str | None) -> tuple[str, ...]:
    return () if one == other else (f"the arms run different versions: {one} and {other}",)


def diagnose(
    config: AbConfig,
    summary: AbSummary,
    items: Sequence[Item],
    out: Path,
    watch: Watch,
    *,
    resume: bool,
) -> AbSummary:
    """Every class alone under the same load: is a P99 loss the mix's or speculation's?"""
    found = []
    for category in sorted({item.category for item in items if item.category}):
        alone = replace(
            config, workload=replace(config.workload, category=category), diagnose=False
        )
        result = run_ab(alone, out / f"alone-{category}", resume=resume, watch=watch)
        found.append(alone_gains(category, result))
    return replace(summary, diagnosis=tuple(found))
