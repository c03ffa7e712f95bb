"""`foretoken lab record`: stands before a real server and writes down its traffic."""

import json
from pathlib import Path
from typing import Annotated

import typer

from foretoken.errors import ConfigError, one_of


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
    """Pass requests on to a server and write down what `ab` needs to replay them.

    Streams are passed on as they come. Headers x-class, x-tenant and x-conversation-id tag
    requests. With hashed prompts a replay has the lengths and repetitions, not the texts. It goes
    on until Ctrl-C or SIGTERM. Exit code 0: all is written; 1: some requests are not, as when the
    disk is full; 2: wrong settings.
    """
    from foretoken.lab.http.listening import bind, serving
    from foretoken.lab.http.timed import Origin
    from foretoken.lab.records.proxy import PROMPTS, RecordingProxy
    from foretoken.lab.records.run_files import LineWriter

    if prompts not in PROMPTS:
        raise ConfigError("--prompts", prompts, one_of(prompts, PROMPTS))
    url = Origin.parse(upstream).url
    listener = bind(port, host)
    try:
        writer = LineWriter(out)
    except OSError as error:
        listener.close()
        raise ConfigError("--out", str(out), f"a file to append to ({error})") from error
    proxy = RecordingProxy(url, writer, prompts)  # type: ignore[arg-type]
    typer.echo(f"http://{host}:{listener.getsockname()[1]} -> {url}, writing {out}", err=True)
    try:
        serving(proxy).run(sockets=[listener])
    except KeyboardInterrupt:
        pass
    finally:
        writer.close()
    typer.echo(f"{proxy.recorded} requests recorded, {proxy.lost} lost", err=True)
    if as_json:
        print(json.dumps({"file": str(out), "recorded": proxy.recorded, "lost": proxy.lost}))
    raise typer.Exit(1 if proxy.lost else 0)
