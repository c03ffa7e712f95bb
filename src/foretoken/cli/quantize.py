"""`foretoken quantize`: write a checkpoint with 8-bit or 4-bit matrices.

Owns argument parsing and what is shown; the work is `foretoken.training.quantize`'s.
"""

import statistics
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foretoken.cli.info import show_bytes
from foretoken.errors import ConfigError

if TYPE_CHECKING:
    from foretoken.training.quantize.job import Quantized
    from foretoken.training.quantize.settings import CalibrationSettings, QuantizeSettings

Packed = Annotated[
    bool,
    typer.Option(
        "--packed",
        help="Also write OUT/packed: the weights as this machine's kernels want them, which every "
        "start then maps.",
    ),
]


def quantize(
    model: Annotated[str, typer.Argument(help="Packaged name, folder, or Hugging Face id.")],
    out: Annotated[Path, typer.Argument(help="The folder to write; not there yet, or empty.")],
    scheme: Annotated[str, typer.Option(help="int8 or int4, of the layers' matrices.")],
    group_size: Annotated[
        int | None,
        typer.Option(help="Inputs that share a scale: 32, 64, 128; default: int4 32, int8 all."),
    ] = None,
    symmetric: Annotated[
        bool, typer.Option("--symmetric/--asymmetric", help="int4 only: groups with a zero point.")
    ] = True,
    calibrate: Annotated[
        str | None,
        typer.Option(
            metavar="FILE",
            help="Fit the weights to this text (GPTQ): a text file, JSON lines with prompt, text, "
            "messages or prompt_token_ids, or `python`, the packaged models' own. Left out: round "
            "to nearest.",
        ),
    ] = None,
    calibration_sequences: Annotated[
        int | None, typer.Option(help="Rows of the text that are read; default 128.")
    ] = None,
    calibration_length: Annotated[
        int | None, typer.Option(help="Tokens of a row; default 512.")
    ] = None,
    packed: Packed = False,
) -> None:
    """Write MODEL with quantized matrices to OUT, a checkpoint that vLLM reads too.

    Format compressed-tensors, pack-quantized. Embedding, norms, biases and the output head stay as
    they are; `quantization=` at load makes an int8 copy of the head.
    """
    from foretoken.training.quantize.settings import QuantizeSettings

    options = {"sequences": calibration_sequences, "length": calibration_length}
    settings = QuantizeSettings(
        scheme=scheme,
        group_size=group_size,
        symmetric=symmetric,
        calibration=_calibration(calibrate, options),
    )
    _print(_run(model, out, settings))
    _pack(out, wanted=packed)


def _calibration(source: str | None, options: dict[str, Any]) -> "CalibrationSettings | None":
    from foretoken.training.quantize.settings import CalibrationSettings

    given = {name: value for name, value in options.items() if value is not None}
    if source is not None:
        return CalibrationSettings(source=source, **given)
    if given:
        raise ConfigError("--calibrate", None, f"a text, since {', '.join(given)} was given")
    return None


def _run(model: str, out: Path, settings: "QuantizeSettings") -> "Quantized":
    from rich.console import Console
    from rich.progress import Progress

    from foretoken.training.quantize.job import quantize_model

    console = Console(stderr=True, highlight=False)
    with Progress(console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("layers", total=None)
        return quantize_model(
            model,
            out,
            settings,
            lambda done, total: progress.update(task, completed=done, total=total),
        )


def _pack(folder: Path, *, wanted: bool) -> None:
    """Packed weights as an engine with default settings on this machine's CPU wants them."""
    if not wanted:
        return
    import torch

    from foretoken.backend import packing_devices
    from foretoken.config.resolve import resolve_dtype
    from foretoken.hardware import Hardware
    from foretoken.models import LoadOptions
    from foretoken.models.load import write_packed
    from foretoken.shape import ModelShape

    shape = ModelShape.from_config(folder)
    dtype = resolve_dtype("auto", "cpu", Hardware.detect(), shape, packing_devices())
    cpu = torch.device("cpu")
    options = LoadOptions(
        dtype=getattr(torch, dtype), device=cpu, batch_invariant=True, page_size=16
    )
    try:
        path = write_packed(folder, options)
    except OSError as error:
        raise ConfigError(
            "--packed", str(folder), f"a folder with room to write ({error})"
        ) from error
    if path is None:
        typer.echo("no packed weights: smaller than 64 MiB, or there are no kernels for it here")
    else:
        typer.echo(f"wrote {path}: {show_bytes(path.stat().st_size)} of packed weights")


def _print(done: "Quantized") -> None:
    sizes = f"{show_bytes(done.weight_bytes)} of weights, {show_bytes(done.weight_bytes_before)}"
    typer.echo(f"wrote {done.folder}: {sizes} before")
    if done.text is None:
        return
    rows, length = done.text.rows_ST.shape
    calibrated = statistics.median(error.calibrated for error in done.errors.values())
    nearest = statistics.median(error.nearest for error in done.errors.values())
    typer.echo(
        f"read {rows} rows of {length} tokens of {done.text.tokens}; the median matrix's outputs "
        f"change by {calibrated:.2%}, rounded to nearest by {nearest:.2%}"
    )
