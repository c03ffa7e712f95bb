"""The settings of a training run: the keys and tables of its config, a TOML file.

Owns their names, defaults and checks, and what a mistake is called: the table and key, what was
given, what is allowed. Invariant: a `Settings` that exists is usable as it is.
"""

import tomllib
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, TypeVar

from foretoken.config.reader import Allowed, at_least, between, check_fields, read, require, words
from foretoken.errors import ConfigError, one_of
from foretoken.training.schedule import Stage, cosine, staged, wsd
from foretoken.training.trained_kinds import trained_kinds

LOSSES = ("distributions", "tokens")
DTYPES = ("bfloat16", "float16", "float32")
_PART = Allowed("a number above 0, at most 1", lambda value: bool(0 < value <= 1))
_POSITIVE = Allowed("a number above 0", lambda value: bool(value > 0))
_TEMPERATURES = Allowed("a list of numbers >= 0", lambda value: bool(value) and min(value) >= 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama model; the embedding is tied to the output head."""

    vocab_size: Annotated[int, at_least(1)] = 8000
    """Tokens of the vocabulary; a draft has its target's."""
    hidden_size: Annotated[int, at_least(1)] = 192
    """Width of the residual stream."""
    layers: Annotated[int, at_least(1)] = 24
    """Decoder layers."""
    heads: Annotated[int, at_least(1)] = 6
    """Attention heads, which divide the width."""
    kv_heads: Annotated[int, at_least(1)] = 2
    """Heads of keys and values, which divide the heads."""
    ffn_size: Annotated[int, at_least(1)] = 512
    """Inner width of the gated MLP."""
    max_positions: Annotated[int, at_least(1)] = 2048
    """Longest sequence."""
    rope_theta: float = 10000.0
    """Base of the rotary frequencies."""
    norm_eps: float = 1e-5
    """Added to the mean square in RMSNorm."""

    def __post_init__(self) -> None:
        check_fields(self, "shape.")
        even = self.hidden_size % (2 * self.heads) == 0
        allowed = f"a divisor of half of shape.hidden_size {self.hidden_size}"
        require("shape.heads", self.heads, even, allowed)
        shared = self.heads % self.kv_heads == 0
        allowed = f"a divisor of shape.heads {self.heads}"
        require("shape.kv_heads", self.kv_heads, shared, allowed)

    @property
    def head_dim(self) -> int:
        """Channels of one attention head."""
        return self.hidden_size // self.heads


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What kind of head, how large, and how far it looks. Raises ConfigError: an unknown kind or a
    number out of range."""

    kind: str
    """`eagle`, `eagle3`, `peagle`, `dflash`, `dspark`, `mlp`, `medusa`, `parallel` (PARD) or
    `draft` (a model)."""
    depth: Annotated[int, between(1, 16)] = 5
    """Tokens ahead that are guessed in training: test-time steps, stages, heads, masks, or drafts
    of a block."""
    depth_decay: Annotated[float, _PART] = 0.8
    """What each further token counts in the loss."""
    inner_size: Annotated[int, at_least(1)] = 512
    """Inner width of the gated MLP (eagle, eagle3, peagle, dflash, dspark), state width (mlp), or
    rank (medusa)."""
    num_layers: Annotated[int, at_least(1)] = 1
    """medusa: residual blocks a head; peagle, dflash, dspark: decoder layers."""
    draft_vocab_size: Annotated[int, at_least(1)] | None = None
    """eagle3, peagle, dflash, dspark: how many of the most frequent tokens it can draft; None:
    all."""
    mask_token_id: Annotated[int, at_least(0)] = 1
    """parallel, peagle, dflash, dspark: the token that stands for one to be guessed; best one that
    the target never writes."""
    keep_share: Annotated[float, _PART] = 0.7
    """parallel, peagle: the share of a depth's chains that the next goes on with in training."""
    block_share: Annotated[float, _PART] = 0.2
    """dflash, dspark: the share of a row's places at which a block begins in training."""
    markov_rank: Annotated[int, at_least(1)] = 256
    """dspark: numbers of the short embedding of the token before a draft."""
    anchored: bool = False
    """peagle: mask slots repeat the newest token and features and add a mask of their depth, a
    variant of our own that learns faster; vLLM does not read it."""
    start: str | None = None
    """Packaged name or folder of what to begin with; None: random layers. draft, parallel: a draft;
    peagle: an EAGLE-3 head; layers that it lacks begin as the identity. Others: a head of the same
    kind and sizes, such as that of the model from which this target was trained on."""

    def __post_init__(self) -> None:
        check_fields(self, "head.")
        kinds = tuple(trained_kinds())
        require("head.kind", self.kind, self.kind in kinds, one_of(self.kind, kinds))


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where prompts come from, and how the target answers them. Raises ConfigError: a number out of
    range."""

    prompts: Annotated[str, Allowed("a file or hf:NAME", bool)]
    """A `.jsonl` or text file, or `hf:NAME` or `hf:NAME:SPLIT` for a Hugging Face data set."""
    skip_broken: bool = False
    """Leave out lines that cannot be read, and say how many; else they are an error."""
    most_prompts: Annotated[int, at_least(2)] | None = None
    """Use the first so many; None: all."""
    text: str | None = None
    """Where text comes from, as `prompts`, for stages of rows = "text"; conversations whole."""
    most_texts: Annotated[int, at_least(1)] | None = None
    """Use the first so many; None: all."""
    answer_tokens: Annotated[int, at_least(1)] = 256
    """Most tokens of an answer."""
    temperatures: Annotated[tuple[float, ...], _TEMPERATURES] = (0.0, 0.8, 1.0)
    """Answers take turns among them."""
    held_out: Annotated[int, at_least(1)] = 16
    """Prompts for measurement only: answered greedily, never trained on."""
    batch: Annotated[int, at_least(1)] = 32
    """Prompts answered at once; a killed run loses at most one such batch."""

    def __post_init__(self) -> None:
        check_fields(self, "data.")


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """Hidden states kept on disk, the `[states]` table: computed once, before the first step.
    Raises ConfigError: a number out of range."""

    folder: str | None = None
    """Where; None: `states` in the run's folder. Runs over the same answers may share one."""
    dtype: Annotated[str, words("auto", *DTYPES)] = "auto"
    """`auto`: as the target computes them, so that nothing is lost; or one of DTYPES."""
    shard_megabytes: Annotated[int, at_least(1)] = 512
    """Size of a shard; a killed run loses at most the one that it was writing."""

    def __post_init__(self) -> None:
        check_fields(self, "states.")


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
    max_steps: Annotated[int, at_least(1)] = 2000
    """The run ends after so many steps,"""
    max_minutes: Annotated[float, _POSITIVE] | None = None
    """or minutes of work, whichever comes first."""
    batch_tokens: Annotated[int, at_least(1)] = 8192
    """Tokens of a step and process; gradients of its parts add up to it."""
    micro_tokens: Annotated[int, at_least(1)] = 1024
    """Tokens of a part, which must fit the memory; a row at least."""
    tv_share: Annotated[float, between(0.0, 1.0)] = 0.5
    """The share of total variation in the distance of distributions; the rest is KL divergence."""
    warmup_steps: Annotated[int, at_least(1)] = 40
    """Steps over which the rates rise."""
    decay_share: Annotated[float, between(0.0, 1.0)] = 0.3
    """Schedule wsd: the share of the run over which they fall to zero."""
    matrix_rate: float = 0.02
    """Peak rate of hidden matrices, which Muon trains."""
    other_rate: float = 0.003
    """Peak rate of tables and vectors, which AdamW trains."""
    weight_decay: float = 0.05
    """Weight decay of hidden matrices."""
    checkpoint_minutes: float = 3.0
    """Between checkpoints, which is what a killed run loses at most."""
    evaluate_steps: Annotated[int, at_least(1)] = 100
    """Between held-out measurements."""
    compile: bool = True
    """Whether draft models are compiled."""
    precision: Annotated[str, words("auto", "bfloat16", "float32")] = "auto"
    """The type of products: `bfloat16`, `float32`, or `auto`, the first where the device multiplies
    it, else the second. Weights are float32."""
    schedule: Annotated[str, words("wsd", "cosine", "stages")] = "wsd"
    """`wsd` (rise, stay, fall), `cosine`, or `stages`: rise and fall within each."""
    clip_norm: Annotated[float, _POSITIVE] = 1.0
    """Most norm of the gradient of what AdamW trains; Muon's steps have a norm of their own."""
    seed: int = 0
    """Decides first weights and the order of data."""

    def __post_init__(self) -> None:
        check_fields(self)
        require("stages", self.stages, len(self.stages) > 0, "at least one stage")
        for stage in self.stages:
            # The context of a target of one's own is known when it is loaded.
            most = self.shape.max_positions if self.data is None else self.batch_tokens
            allowed = f"2 to {most}, a divisor of batch_tokens {self.batch_tokens}"
            fits = 2 <= stage.length <= most
            fits = fits and self.batch_tokens % stage.length == 0
            require("stages.length", stage.length, fits, allowed)
            self._check_stage(stage)
        order = [0.0, *(stage.until for stage in self.stages)]
        rising = all(a < b for a, b in pairwise(order))
        require("stages.until", order[1:], rising, "shares that rise from above 0")

    def _check_stage(self, stage: Stage) -> None:
        """What a stage of a head may ask for, and others may not."""
        require("stages.rows", stage.rows, stage.rows in (None, "text", "answers"), "text, answers")
        require("stages.loss", stage.loss, stage.loss in LOSSES, ", ".join(LOSSES))
        require("stages.rate", stage.rate, 0 < stage.rate <= 1, "above 0, at most 1")
        if self.head is None:
            require(
                "stages.rows", stage.rows, stage.rows is None, "no key where no head is trained"
            )
            require("stages.loss", stage.loss, stage.loss == LOSSES[0], "no key without a head")
        if self.schedule != "stages":
            require("stages.rate", stage.rate, stage.rate == 1.0, "1 but with schedule stages")
        if self.data is not None and stage.rows == "text":
            require("data.text", self.data.text, self.data.text is not None, "a file or hf:NAME")

    @property
    def of_head(self) -> HeadSettings:
        """The table `[head]` of a run that has one."""
        assert self.head is not None, "a run of a head"
        return self.head

    @property
    def of_data(self) -> DataSettings:
        """The table `[data]` of a run that has one."""
        assert self.data is not None, "a run on data of one's own"
        return self.data

    @property
    def kind(self) -> str:
        """What is trained: `lm`, `draft`, or the kind of head."""
        if self.head is not None:
            return self.head.kind
        return "lm" if self.target is None else "draft"

    def progress(self, step: int, seconds: float) -> float:
        """The share of the run that is done, 0..1, after `step` steps and `seconds` of work."""
        used = step / self.max_steps
        if self.max_minutes is not None:
            used = max(used, seconds / (60 * self.max_minutes))
        return min(used, 1.0)

    def rate_scale(self, step: int, progress: float) -> float:
        """The schedule's factor on the peak learning rates, 0..1."""
        if self.schedule == "cosine":
            return cosine(step, progress, self.warmup_steps)
        if self.schedule == "stages":
            return staged(self.stages, progress, self.warmup_steps, self.max_steps)
        return wsd(step, progress, self.warmup_steps, self.decay_share)


Table = TypeVar("Table")
_GONE = {
    "helpers": "no such key; `torchrun --nproc_per_node=N -m foretoken train` has N processes, "
    "and each does batch_tokens of a step"
}
"""Keys of before, and what to write instead."""
CONFIG = (
    "a TOML file, as docs/training.md shows one (the packaged models are made in the root of the "
    "sources: python -m tools.demo_models train NAME)"
)


def read_settings(path: str | Path) -> Settings:
    """The settings that the TOML file at `path` gives.

    Raises ConfigError for a missing file, an unknown key or a value that cannot be.
    """
    return build_settings(read_table(path))


def read_table(path: str | Path) -> dict[str, Any]:
    """The keys and tables of a TOML file; `name` is the file's own where it gives none.

    Raises ConfigError for a missing file, or one that is no TOML.
    """
    file = Path(path)
    require("CONFIG", str(path), file.is_file(), CONFIG)
    try:
        table = tomllib.loads(file.read_text("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise ConfigError("CONFIG", str(file), f"a valid TOML file ({error})") from error
    table.setdefault("name", file.stem)
    return table


def build_settings(table: dict[str, Any]) -> Settings:
    """The settings of a config's keys and tables.

    Raises ConfigError for an unknown key or a value that cannot be.
    """
    for name in sorted(_GONE.keys() & table.keys()):
        raise ConfigError(f"config.{name}", table[name], _GONE[name])
    table["shape"] = _table(LlamaShape, table.get("shape", {}), "shape")
    if "head" in table:
        table["head"] = _table(HeadSettings, table["head"], "head")
    if "data" in table:
        require("data", table["data"], "head" in table, "a table beside [head] only")
        table["data"] = _table(DataSettings, table["data"], "data")
    if "states" in table:
        require("states", table["states"], "data" in table, "a table beside [data] only")
        table["states"] = _table(StateSettings, table["states"], "states")
    stages = table.get("stages", [{"until": 1.0, "length": 512}])
    require("stages", stages, isinstance(stages, list), "tables, each under [[stages]]")
    table["stages"] = tuple(_table(Stage, stage, "stages") for stage in stages)
    given = table.get("decay_share")
    fine = given is None or table.get("schedule", "wsd") == "wsd"
    require("decay_share", given, fine, "no key: only schedule wsd decays over a share")
    settings = _table(Settings, table, "config")
    if settings.data is not None and settings.data.text is not None:
        used = any(stage.rows == "text" for stage in settings.stages)
        require("data.text", settings.data.text, used, 'no key without a stage of rows = "text"')
    return settings


def _table(kind: type[Table], table: Any, where: str) -> Table:
    require(where, table, isinstance(table, dict), f"a table, [{where}]")
    found: Table = read(kind, table, where)
    return found
