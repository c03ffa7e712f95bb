"""`python -m tests.mock_server`: the mock until it is interrupted."""

from typing import Annotated

import typer

from foretoken.lab.http.listening import bind, serving
from tests.mock_server.faults import faults_of
from tests.mock_server.generator import MockLaw, MockModel
from tests.mock_server.server import MockServer


def main(
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
    model = MockModel(skew=skew, rounding=rounding)
    serving(MockServer(law, model, faults)).run(sockets=[listener])


if __name__ == "__main__":
    typer.run(main)
