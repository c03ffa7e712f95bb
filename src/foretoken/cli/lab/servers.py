"""`foretoken lab record` and `foretoken lab mock`: servers that run until they are ended.

One stands before a real server and writes down its traffic, the other has no model, to try the lab
on.
"""

import json
from pathlib import Path
from typing import Annotated

import typer

from foretoken.errors import ConfigError


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
    as_json: Annotated[
        bool, typer.Option("--json", help="At the end what was recorded, as JSON to stdout.")
    ] = False,
) -> None:
    """Pass requests on to a server and write down what `bench` and `ab` need to replay them.

    Streams are passed on as they come. Headers x-class, x-tenant and x-conversation-id tag
    requests. With hashed prompts a replay has the lengths and repetitions, not the texts. It goes
    on until Ctrl-C or SIGTERM. Exit code 0: all is written; 1: some requests are not, as when the
    disk is full; 2: wrong settings.
    """
    from foretoken.errors import one_of
    from foretoken.lab.http.timed import Origin
    from foretoken.lab.mock.server import bind, serve
    from foretoken.lab.records.proxy import PROMPTS, RecordConfig, RecordingProxy
    from foretoken.lab.records.run_files import LineWriter

    if prompts not in PROMPTS:
        raise ConfigError("--prompts", prompts, one_of(prompts, PROMPTS))
    url = Origin.parse(upstream).url
    try:
        writer = LineWriter(out)
    except OSError as error:
        raise ConfigError("--out", str(out), f"a file to append to ({error})") from error
    try:
        listener = bind(port, host)
    except ConfigError:
        writer.close()
        raise
    config = RecordConfig(upstream=url, prompts=prompts)  # type: ignore[arg-type]
    proxy = RecordingProxy(config, writer)
    typer.echo(f"http://{host}:{listener.getsockname()[1]} -> {url}, writing {out}", err=True)
    try:
        serve(proxy, listener)
    except KeyboardInterrupt:
        pass
    finally:
        writer.close()
    typer.echo(f"{proxy.recorded} requests recorded, {proxy.lost} lost", err=True)
    if as_json:
        document = {"file": str(out), "recorded": proxy.recorded, "lost": proxy.lost}
        print(json.dumps(document))
    raise typer.Exit(1 if proxy.lost else 0)


def mock(
    port: Annotated[int, typer.Option(help="0: any free one.")] = 8000,
    step_ms: Annotated[float, typer.Option(help="A step of one request.")] = 8.0,
    row_ms: Annotated[float, typer.Option(help="More per further row of a step.")] = 0.05,
    prefill_ms: Annotated[float, typer.Option(help="Before the first token.")] = 15.0,
    k: Annotated[int, typer.Option(help="Draft tokens per step; 0: no speculation.")] = 0,
    draft_ms: Annotated[float, typer.Option(help="Per draft token of a step.")] = 0.4,
    alpha: Annotated[float, typer.Option(help="Chance of a draft token at temperature 0.")] = 0.7,
    alpha_spread: Annotated[float, typer.Option(help="Between requests.")] = 0.08,
    restart_sd: Annotated[float, typer.Option(help="Between starts, as a share.")] = 0.03,
    skew: Annotated[float, typer.Option(help="Above 0: samples wrongly, so much.")] = 0.0,
    rounding: Annotated[float, typer.Option(help="Between batches, of a logit.")] = 0.0,
    fault: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME[=SHARE]", help="A seeded fault for `audit` to find."),
    ] = None,
    seed: Annotated[int | None, typer.Option(help="Of its luck.", show_default=False)] = None,
) -> None:
    """Serve made-up words at a known pace and with known acceptance."""
    from foretoken.lab.mock.faults import faults_of
    from foretoken.lab.mock.generator import MockLaw, MockModel
    from foretoken.lab.mock.server import MockServer, bind, serve

    law = MockLaw(
        step_s=step_ms / 1000,
        row_s=row_ms / 1000,
        prefill_s=prefill_ms / 1000,
        k=k,
        draft_s=draft_ms / 1000,
        alpha=alpha,
        alpha_spread=alpha_spread,
        restart_sd=restart_sd,
        seed=seed,
    )
    faults = faults_of(fault or [])
    listener = bind(port)
    typer.echo(f"mock: http://127.0.0.1:{listener.getsockname()[1]}", err=True)
    serve(MockServer(law, MockModel(skew=skew, rounding=rounding), faults), listener)
