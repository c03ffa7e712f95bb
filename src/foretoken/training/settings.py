"""The settings of a training run, read from a TOML file.

Owns their names, defaults and checks. Invariant: a `Settings` that exists is usable as it is.
"""

import tomllib
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.training.data.settings import DataSettings, StateSettings
from foretoken.training.heads.settings import HeadSettings
from foretoken.training.model import LlamaShape
from foretoken.training.schedule import Budget, Cosine, Stage, Staged, Wsd

SCHEDULES = ("wsd", "cosine", "stages")
ROWS = (None, "text", "answers")
LOSSES = ("distributions", "tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run: what is trained on which data, the schedule and the optimizer's numbers."""

    name: str
    """The run's name; the file's own if it is left out."""
    shape: LlamaShape
    """Sizes of a draft model, the table `[shape]`."""
    stages: tuple[Stage, ...]
    """What is trained on, in order: `[[stages]]`; one of rows of 512 if left out."""
    head: HeadSettings | None = None
    """What is trained for a target, the table `[head]`."""
    data: DataSettings | None = None
    """Prompts and text, the table `[data]`."""
    states: StateSettings | None = None
    """Hidden states on disk, the table `[states]`; None: computed as they are used."""
    target: str | None = None
    """Folder, packaged name or hub id of the target; `--target` comes before it."""
    out: str | None = None
    """The run's folder; `--out` comes before it; None: `runs/NAME`."""
    max_steps: int = 2000
    """The run ends after so many steps,"""
    max_minutes: float | None = None
    """or minutes of work, whichever comes first."""
    batch_tokens: int = 8192
    """Tokens of a step and process; gradients of its parts add up to it."""
    micro_tokens: int = 1024
    """Tokens of a part, which must fit the memory; a row at least."""
    helpers: int = 0
    """Further processes on this machine that share each step; torchrun takes their place."""
    tv_share: float = 0.5
    """The share of total variation in the distance of distributions; the rest is KL divergence."""
    warmup_steps: int = 40
    """Steps over which the rates rise."""
    decay_share: float = 0.3
    """Schedule wsd: the share of the run over which they fall to zero."""
    matrix_rate: float = 0.02
    """Peak rate of hidden matrices, which Muon trains."""
    other_rate: float = 0.003
    """Peak rate of tables and vectors, which AdamW trains."""
    weight_decay: float = 0.05
    """Weight decay of hidden matrices."""
    checkpoint_minutes: float = 3.0
    """Between checkpoints, which is what a killed run loses at most."""
    evaluate_steps: int = 100
    """Between held-out measurements."""
    compile: bool = True
    """Whether draft models are compiled."""
    precision: str = "bfloat16"
    """The type of products, `bfloat16` or `float32`; weights are float32."""
    schedule: str = "wsd"
    """`wsd` (rise, stay, fall), `cosine`, or `stages`: rise and fall within each."""
    clip_norm: float = 1.0
    """Most norm of the gradient of what AdamW trains; Muon's steps have a norm of their own."""
    seed: int = 0
    """Decides first weights and the order of data."""

    def __post_init__(self) -> None:
        """Check every number that can be wrong."""
        for name in ("max_steps", "batch_tokens", "micro_tokens", "warmup_steps", "evaluate_steps"):
            _require(name, getattr(self, name), getattr(self, name) >= 1, "an integer >= 1")
        _require("schedule", self.schedule, self.schedule in SCHEDULES, ", ".join(SCHEDULES))
        _require("clip_norm", self.clip_norm, self.clip_norm > 0, "a number above 0")
        known = ("bfloat16", "float32")
        _require("precision", self.precision, self.precision in known, " or ".join(known))
        for name in ("tv_share", "decay_share"):
            _require(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "0..1")
        _require("stages", self.stages, len(self.stages) > 0, "at least one stage")
        for stage in self.stages:
            # The context of a target of one's own is known when it is loaded.
            most = self.shape.max_positions if self.data is None else self.batch_tokens
            allowed = f"2..{most}, dividing batch_tokens"
            fits = 2 <= stage.length <= most
            fits = fits and self.batch_tokens % stage.length == 0
            _require("stages.length", stage.length, fits, allowed)
            self._check_stage(stage)
        order = [0.0, *(stage.until for stage in self.stages)]
        rising = all(a < b for a, b in pairwise(order))
        _require("stages.until", order[1:], rising, "shares that rise from above 0")

    def _check_stage(self, stage: Stage) -> None:
        """What a stage of a head may ask for, and others may not."""
        _require("stages.rows", stage.rows, stage.rows in ROWS, "text or answers")
        _require("stages.loss", stage.loss, stage.loss in LOSSES, " or ".join(LOSSES))
        _require("stages.rate", stage.rate, 0 < stage.rate <= 1, "above 0, at most 1")
        if self.head is None:
            _require(
                "stages.rows", stage.rows, stage.rows is None, "no key where no head is trained"
            )
            _require("stages.loss", stage.loss, stage.loss == LOSSES[0], "no key without a head")
        if self.schedule != "stages":
            _require("stages.rate", stage.rate, stage.rate == 1.0, "1 but with schedule stages")
        if self.data is not None and stage.rows == "text":
            _require("data.text", self.data.text, self.data.text is not None, "a file or hf:NAME")

    @property
    def kind(self) -> str:
        """What is trained: `lm`, `draft`, or the kind of head."""
        if self.head is not None:
            return self.head.kind
        return "lm" if self.target is None else "draft"

    @property
    def budget(self) -> Budget:
        """When the run ends."""
        return Budget(max_steps=self.max_steps, max_minutes=self.max_minutes)

    @property
    def rates(self) -> Wsd | Cosine | Staged:
        """The learning rate's course."""
        if self.schedule == "cosine":
            return Cosine(warmup_steps=self.warmup_steps)
        if self.schedule == "stages":
            return Staged(
                stages=self.stages, warmup_steps=self.warmup_steps, max_steps=self.max_steps
            )
        return Wsd(warmup_steps=self.warmup_steps, decay_share=self.decay_share)


def _require(name: str, given: object, fine: bool, allowed: str) -> None:
    if not fine:
        raise ConfigError(name, given, allowed)


def _build(cls: Any, table: dict[str, Any], where: str) -> Any:
    known = [field.name for field in fields(cls)]
    for key in table:
        _require(f"{where}.{key}", table[key], key in known, f"the names {', '.join(known)}")
    try:
        return cls(**table)
    except TypeError as error:
        raise ConfigError(where, table, str(error)) from error


def read_settings(path: str | Path) -> Settings:
    """The settings that the TOML file at `path` gives.

    Raises ConfigError for a missing file, an unknown key or a number out of range.
    """
    return build_settings(read_table(path))


def read_table(path: str | Path) -> dict[str, Any]:
    """The keys and tables of a TOML file; `name` is the file's own where it gives none.

    Raises ConfigError for a missing file, or one that is no TOML.
    """
    file = Path(path)
    _require("CONFIG", str(path), file.is_file(), "a TOML file (docs/training.md shows one)")
    try:
        table = tomllib.loads(file.read_text())
    except tomllib.TOMLDecodeError as error:
        raise ConfigError("CONFIG", str(file), f"a valid TOML file ({error})") from error
    table.setdefault("name", file.stem)
    return table


def build_settings(table: dict[str, Any]) -> Settings:
    """The settings of a config's keys and tables.

    Raises ConfigError for an unknown key or a number out of range.
    """
    table["shape"] = _build(LlamaShape, table.get("shape", {}), "shape")
    if "head" in table:
        table["head"] = _build(HeadSettings, table["head"], "head")
    if "data" in table:
        _require("data", table["data"], "head" in table, "a table beside [head] only")
        table["data"] = _build(DataSettings, table["data"], "data")
    if "states" in table:
        _require("states", table["states"], "data" in table, "a table beside [data] only")
        table["states"] = _build(StateSettings, table["states"], "states")
    stages = table.get("stages", [{"until": 1.0, "length": 512}])
    table["stages"] = tuple(_build(Stage, stage, "stages") for stage in stages)
    given = table.get("decay_share")
    fine = given is None or table.get("schedule", "wsd") == "wsd"
    _require("decay_share", given, fine, "no key: only schedule wsd decays over a share")
    settings: Settings = _build(Settings, table, "config")
    _check_text(settings)
    return settings


def _check_text(settings: Settings) -> None:
    """Text that no stage reads is a mistake."""
    if settings.data is not None and settings.data.text is not None:
        used = any(stage.rows == "text" for stage in settings.stages)
        _require("data.text", settings.data.text, used, 'no key without a stage of rows = "text"')
