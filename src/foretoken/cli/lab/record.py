"""`foretoken lab record` and `foretoken lab watch`: real traffic, written down or looked at."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.lab.watching import Alarm, Reading


def record(
    upstream: Annotated[str, typer.Argument(help="The URL of the server to stand in front of.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The JSONL file to append to.")] = Path(
        "recorded.jsonl"
    ),
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8080,
    host: Annotated[str, typer.Option(help="The address to listen on.")] = "127.0.0.1",
    prompts: Annotated[
        str, typer.Option(metavar="keep|hash|none", help="What is written of prompts.")
    ] = "hash",
) -> None:
    """Pass requests on to a server and write down what `bench` and `ab` need to replay them.

    Streams are passed on as they come. Headers x-class, x-tenant and x-conversation-id tag
    requests. With hashed prompts a replay has the lengths and repetitions, not the texts.
    """
    from foretoken.lab.mock_run import bind, serve
    from foretoken.lab.origin import Origin
    from foretoken.lab.record import RecordConfig, RecordingProxy
    from foretoken.lab.results_io import LineWriter

    if prompts not in ("keep", "hash", "none"):
        raise ConfigError("--prompts", prompts, "keep, hash or none")
    url = Origin.parse(upstream).url
    kept = {"keep": "keep", "hash": "hash", "none": "none"}[prompts]
    try:
        writer = LineWriter(out)
        listener = bind(port, host)
    except OSError as error:
        raise ConfigError("--out or --port", f"{out}, {port}", f"usable ({error})") from error
    config = RecordConfig(upstream=url, prompts=kept)  # type: ignore[arg-type]
    proxy = RecordingProxy(config, writer)
    typer.echo(f"http://{host}:{listener.getsockname()[1]} -> {url}, writing {out}", err=True)
    serve(proxy, listener)
    writer.close()
    typer.echo(f"{proxy.recorded} requests recorded, {proxy.lost} lost", err=True)


def watch(
    url: Annotated[str, typer.Argument(help="The server to watch; it needs /metrics.")],
    every: Annotated[float, typer.Option(help="Seconds between readings.", min=0.1)] = 5.0,
    break_even: Annotated[
        float | None, typer.Option(help="Draft acceptance rate to stay above; from `fit`.")
    ] = None,
    baseline: Annotated[
        Path | None, typer.Option(help="An A/B's folder, for the baseline's TPOT.")
    ] = None,
    page: Annotated[Path | None, typer.Option("--html", help="A page to keep up to date.")] = None,
    ticks: Annotated[int | None, typer.Option(help="Stop after so many readings.")] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="A JSON line per reading to stdout, nothing else.")
    ] = False,
) -> None:
    """Watch a running server's acceptance, load and latencies, and say which rule fires.

    Exit code 0: no rule fired; 1: one did; 5: no metrics.
    """
    from foretoken.lab.watch import WatchConfig
    from foretoken.lab.watch import watch as follow
    from foretoken.lab.watching import Targets

    p50, p99 = _baseline_tpot(baseline)
    targets = Targets(break_even=break_even, tpot_p50_s=p50, tpot_p99_s=p99)
    config = WatchConfig(url=url, every_s=every, targets=targets, page=page, ticks=ticks)
    try:
        fired = asyncio.run(follow(config, _write if as_json else _show))
    except KeyboardInterrupt:
        return
    raise typer.Exit(1 if fired else 0)


def _baseline_tpot(folder: Path | None) -> tuple[float | None, float | None]:
    from foretoken.lab.results_io import read_ab

    if folder is None:
        return None, None
    summary = read_ab(folder, "--baseline")
    tpot = summary.arm(summary.baseline).tpot
    return (None, None) if tpot is None else (tpot.p50.estimate, tpot.p99.estimate)


def _write(readings: "list[Reading]", alarms: "list[Alarm]") -> None:
    from foretoken.lab.plain import to_plain

    line = {**to_plain(readings[-1]), "alarms": to_plain(alarms)}
    print(json.dumps(line), flush=True)


def _show(readings: "list[Reading]", alarms: "list[Alarm]") -> None:
    from foretoken.cli.lab.tables import console
    from foretoken.lab.watch import describe

    show = console()
    told = "  ".join(f"{name} {value}" for name, value in describe(readings[-1]).items())
    show.print(f"{readings[-1].time_s:7.1f} s  {told}", soft_wrap=True)
    for alarm in alarms:
        show.print(f"          {alarm.rule}: {alarm.text}", style="bold red", soft_wrap=True)
