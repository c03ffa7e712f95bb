"""What a quantization is asked for: scheme, groups, and the text it is calibrated on, if any.

Torch-free but for the scheme it makes. Invariant: settings that exist can be carried out on some
model; whether they fit a given one is `check_fits`' affair.
"""

from dataclasses import dataclass

from foretoken.config.quantization import QUANTIZATIONS
from foretoken.errors import ConfigError, UnsupportedModelError, one_of
from foretoken.quant.weights import Scheme
from foretoken.shape import ModelShape
from foretoken.shape.families import family_names
from foretoken.shape.stored import GROUPS

PYTHON_TEXT = "python"
"""The word that stands, instead of a file, for some of what the packaged models were trained on."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CalibrationSettings:
    """How much of which text weights are fitted to. Raises ConfigError: a number out of range."""

    source: str
    """A text file, JSON lines, or PYTHON_TEXT."""
    sequences: int = 128
    """Rows of the text that are used, spread evenly over it."""
    length: int = 512
    """Tokens of a row."""

    def __post_init__(self) -> None:
        fine = {
            "calibration-sequences": (self.sequences, self.sequences >= 1, "an integer >= 1"),
            "calibration-length": (self.length, self.length >= 2, "an integer >= 2"),
        }
        for name, (given, ok, allowed) in fine.items():
            if not ok:
                raise ConfigError(f"--{name}", given, allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSettings:
    """How matrices are written. Raises ConfigError: a scheme unknown or without a kernel."""

    scheme: str
    """`int8` or `int4`."""
    group_size: int | None = None
    """Inputs that share a scale; None: what `quantization=` at load does."""
    symmetric: bool = True
    calibration: CalibrationSettings | None = None
    """None: round to nearest."""

    def __post_init__(self) -> None:
        if self.scheme not in QUANTIZATIONS:
            names = one_of(self.scheme, QUANTIZATIONS)
            allowed = f"{names} (--calibrate gives them what GPTQ and AWQ are for)"
            raise ConfigError("--scheme", self.scheme, allowed)
        if self.group_size is not None and self.group_size not in GROUPS:
            allowed = ", ".join(str(group) for group in sorted(GROUPS))
            raise ConfigError("--group-size", self.group_size, allowed)
        if self.scheme == "int8" and not self.symmetric:
            allowed = "--symmetric with int8: no kernel holds 8 bits with zero points"
            raise ConfigError("--asymmetric", True, allowed)

    @property
    def as_scheme(self) -> Scheme:
        """These settings as `quant` takes them."""
        bits = 4 if self.scheme == "int4" else 8
        group = self.group_size or (32 if bits == 4 else 0)
        return Scheme(name=self.scheme, bits=bits, group=group, asymmetric=not self.symmetric)


def check_fits(shape: ModelShape, scheme: Scheme) -> None:
    """Raise unless this model's matrices can be written so. Raises UnsupportedModelError: quantized
    already, or not run by our own layers; ConfigError: groups that do not divide the inputs."""
    if shape.stored is not None:
        allowed = "a checkpoint of 16 or 32 bits, such as the one it was made from"
        raise UnsupportedModelError(
            "model", f"quantized already: {shape.stored.describe()}", allowed
        )
    if not shape.is_own:
        allowed = f"{family_names()}; others with quantization= at load"
        raise UnsupportedModelError("model_type", shape.model_type, allowed)
    if shape.inside is not None:
        allowed = "text decoders stored alone; others with quantization= at load"
        raise UnsupportedModelError("model_type", shape.inside, allowed)
    if shape.experts is not None or shape.wide is not None:
        allowed = (
            "a model without experts and with heads of one size; others with quantization= at load"
        )
        raise UnsupportedModelError("model_type", shape.model_type, allowed)
    widths = {
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "all heads together": shape.query_size,
    }
    fitting = [g for g in sorted(GROUPS) if not any(width % g for width in widths.values())]
    wrong = [f"{name} {width}" for name, width in widths.items() if width % (scheme.group or 1)]
    if wrong:
        allowed = ", ".join(map(str, fitting)) or "none that fits; --scheme int8 needs none"
        given = f"{scheme.group}, which does not divide {' and '.join(wrong)}"
        raise ConfigError("--group-size", given, allowed)
