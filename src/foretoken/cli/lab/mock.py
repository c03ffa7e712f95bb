"""`foretoken lab mock`: an OpenAI-style server without a model, to try the lab on."""

from typing import Annotated

import typer


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
    seed: Annotated[int | None, typer.Option(help="Of its luck.", show_default=False)] = None,
) -> None:
    """Serve made-up words at a known pace and with known acceptance."""
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
    listener = bind(port)
    typer.echo(f"mock: http://127.0.0.1:{listener.getsockname()[1]}", err=True)
    serve(MockServer(law, MockModel(skew=skew)), listener)
