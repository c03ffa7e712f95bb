"""`foretoken lab verify`: the black-box losslessness kit."""

import asyncio
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from foretoken.cli.lab.options import JsonOption, resolve_workload

if TYPE_CHECKING:
    from foretoken.lab.experiments import ArmConfig
    from foretoken.lab.verify import Verified, VerifyPlan


def verify(
    baseline: Annotated[str, typer.Option(help="A URL, or a command with {port}; off.")],
    candidate: Annotated[str, typer.Option(help="A URL, or a command with {port}; on.")],
    workload: Annotated[str, typer.Option(help="A file of prompts; `demo`: Python.")] = "demo",
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder of logs.")] = Path("lab-verify"),
    prompts: Annotated[int, typer.Option(help="How many prompts.", min=1)] = 20,
    max_tokens: Annotated[int, typer.Option(help="Of the compared texts.", min=1)] = 48,
    samples: Annotated[int, typer.Option(help="Per prompt, arm and set of parameters.")] = 200,
    as_json: JsonOption = False,
) -> None:
    """Compare two servers' outputs: equal texts, and equal distributions when sampling.

    Exit code 0: nothing differs; 4: outputs differ; 5: no server.
    """
    from foretoken.lab.bench import load_items
    from foretoken.lab.experiments import ArmConfig, WorkloadConfig, arm_of
    from foretoken.lab.plain import from_plain, to_plain
    from foretoken.lab.verify import VerifyPlan

    file = resolve_workload(workload, out)
    items = load_items(WorkloadConfig(file=file))[0]
    texts = [item.prompt for item in items if item.prompt][:prompts]
    arms = [
        from_plain(ArmConfig, arm_of(given, name), name)
        for given, name in ((baseline, "off"), (candidate, "on"))
    ]
    plan = VerifyPlan(max_tokens=max_tokens, samples=samples)
    found = asyncio.run(_run((arms[0], arms[1]), texts, plan, out))
    _show(found)
    if as_json:
        print(json.dumps({**to_plain(found), "lossless": found.lossless}))
    raise typer.Exit(0 if found.lossless else 4)


async def _run(
    arms: "tuple[ArmConfig, ArmConfig]", texts: list[str], plan: "VerifyPlan", out: Path
) -> "Verified":
    from foretoken.lab.servers import serving
    from foretoken.lab.verify import verify as check

    off, on = arms
    async with serving(off, out / "logs" / "off.log") as a:
        async with serving(on, out / "logs" / "on.log") as b:
            return await check(a, b, texts, plan)


def _show(found: "Verified") -> None:
    from foretoken.cli.lab.tables import console

    show = console()
    for text in found.texts:
        show.print(
            f"{text.kind}: {text.equal} of {text.compared} equal, {text.excused} at near-ties, "
            f"{text.different} different, {text.failed} without an answer"
        )
        for example in text.examples:
            show.print(f"  {example}", style="dim", soft_wrap=True)
    for check in found.distributions:
        names = ", ".join(f"{n} {v}" for n, v in check.parameters.items())
        if check.refused is not None:
            show.print(f"{names}: refused: {check.refused}", style="yellow", soft_wrap=True)
            continue
        show.print(
            f"{names}: {'same' if check.passed else 'DIFFERENT'} distribution, distance "
            f"{check.distance:.3f} (chance {check.expected:.3f}), p {check.p_value:.4f}, "
            f"{check.samples} samples per arm"
        )
    show.print("lossless as far as tested" if found.lossless else "NOT LOSSLESS")
