"""The settings of a training run: the keys and tables of its config.

Owns their names, defaults and checks; `config_file` reads them. Invariant: a `Settings` that exists
is usable as it is.
"""

from dataclasses import dataclass
from itertools import pairwise

from foretoken.config.methods import trained_kinds
from foretoken.config.reader import require
from foretoken.errors import ConfigError, one_of
from foretoken.training.model import LlamaShape
from foretoken.training.schedule import Cosine, RunLength, Stage, Staged, Wsd

SCHEDULES = ("wsd", "cosine", "stages")
ROWS = (None, "text", "answers")
LOSSES = ("distributions", "tokens")
DTYPES = ("bfloat16", "float16", "float32")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What kind of head, how large, and how far it looks.

    Raises:
        ConfigError: an unknown kind or a number out of range.
    """

    kind: str
    """`eagle`, `eagle3`, `peagle`, `mlp`, `medusa`, `parallel` (PARD) or `draft` (a model)."""
    depth: int = 5
    """Tokens ahead that are guessed in training: test-time steps, stages, heads or masks."""
    depth_decay: float = 0.8
    """What each further token counts in the loss."""
    inner_size: int = 512
    """Inner width of the gated MLP (eagle, eagle3, peagle), state width (mlp), or rank (medusa)."""
    num_layers: int = 1
    """medusa: residual blocks a head; peagle: decoder layers."""
    draft_vocab_size: int | None = None
    """eagle3, peagle: how many of the most frequent tokens it can draft; None: all."""
    mask_token_id: int = 1
    """parallel, peagle: the token that stands for one to be guessed."""
    keep_share: float = 0.7
    """parallel, peagle: the share of a depth's chains that the next goes on with in training."""
    anchored: bool = False
    """peagle: mask slots repeat the newest token and features and add a mask of their depth, a
    variant of our own that learns faster; vLLM does not read it."""
    start: str | None = None
    """Packaged name or folder of what to begin with. draft, parallel: a draft; None: random layers.
    peagle: an EAGLE-3 head; None: random. Layers that it lacks begin as the identity."""

    def __post_init__(self) -> None:
        """Check each field."""
        kinds = tuple(trained_kinds())
        fine = {
            "kind": (self.kind in kinds, one_of(self.kind, kinds)),
            "depth": (1 <= self.depth <= 16, "1..16"),
            "depth_decay": (0 < self.depth_decay <= 1, "above 0, at most 1"),
            "inner_size": (self.inner_size >= 1, "an integer >= 1"),
            "num_layers": (self.num_layers >= 1, "an integer >= 1"),
            "draft_vocab_size": (
                self.draft_vocab_size is None or self.draft_vocab_size >= 1,
                "an integer >= 1",
            ),
            "keep_share": (0 < self.keep_share <= 1, "above 0, at most 1"),
            "mask_token_id": (self.mask_token_id >= 0, "a token id"),
        }
        for name, (ok, allowed) in fine.items():
            if not ok:
                raise ConfigError(f"head.{name}", getattr(self, name), allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class DataSettings:
    """Where prompts come from, and how the target answers them.

    Raises:
        ConfigError: a number out of range.
    """

    prompts: str
    """A `.jsonl` or text file, or `hf:NAME` or `hf:NAME:SPLIT` for a Hugging Face data set."""
    skip_broken: bool = False
    """Leave out lines that cannot be read, and say how many; else they are an error."""
    most_prompts: int | None = None
    """Use the first so many; None: all."""
    text: str | None = None
    """Where text comes from, as `prompts`, for stages of rows = "text"; conversations whole."""
    most_texts: int | None = None
    """Use the first so many; None: all."""
    answer_tokens: int = 256
    """Most tokens of an answer."""
    temperatures: tuple[float, ...] = (0.0, 0.8, 1.0)
    """Answers take turns among them."""
    held_out: int = 16
    """Prompts for measurement only: answered greedily, never trained on."""
    batch: int = 32
    """Prompts answered at once; a killed run loses at most one such batch."""

    def __post_init__(self) -> None:
        """Check each field."""
        object.__setattr__(self, "temperatures", tuple(self.temperatures))
        most, texts = self.most_prompts, self.most_texts
        fine = {
            "prompts": (isinstance(self.prompts, str) and bool(self.prompts), "a file or hf:NAME"),
            "most_prompts": (most is None or most >= 2, "an integer >= 2"),
            "most_texts": (texts is None or texts >= 1, "an integer >= 1"),
            "answer_tokens": (self.answer_tokens >= 1, "an integer >= 1"),
            "temperatures": (
                len(self.temperatures) > 0 and min(self.temperatures) >= 0,
                "a list of numbers >= 0",
            ),
            "held_out": (self.held_out >= 1, "an integer >= 1"),
            "batch": (self.batch >= 1, "an integer >= 1"),
        }
        for name, (ok, allowed) in fine.items():
            if not ok:
                raise ConfigError(f"data.{name}", getattr(self, name), allowed)


@dataclass(frozen=True, slots=True, kw_only=True)
class StateSettings:
    """Hidden states kept on disk, the `[states]` table: computed once, before the first step.

    Raises:
        ConfigError: a number out of range.
    """

    folder: str | None = None
    """Where; None: `states` in the run's folder. Runs over the same answers may share one."""
    dtype: str = "auto"
    """`auto`: as the target computes them, so that nothing is lost; or one of DTYPES."""
    shard_megabytes: int = 512
    """Size of a shard; a killed run loses at most the one that it was writing."""

    def __post_init__(self) -> None:
        """Check each field."""
        known = ("auto", *DTYPES)
        if self.dtype not in known:
            raise ConfigError("states.dtype", self.dtype, ", ".join(known))
        if self.shard_megabytes < 1:
            raise ConfigError("states.shard_megabytes", self.shard_megabytes, "an integer >= 1")


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
            require(name, getattr(self, name), getattr(self, name) >= 1, "an integer >= 1")
        require("schedule", self.schedule, self.schedule in SCHEDULES, ", ".join(SCHEDULES))
        require("clip_norm", self.clip_norm, self.clip_norm > 0, "a number above 0")
        known = ("bfloat16", "float32")
        require("precision", self.precision, self.precision in known, " or ".join(known))
        for name in ("tv_share", "decay_share"):
            require(name, getattr(self, name), 0 <= getattr(self, name) <= 1, "0..1")
        require("stages", self.stages, len(self.stages) > 0, "at least one stage")
        for stage in self.stages:
            # The context of a target of one's own is known when it is loaded.
            most = self.shape.max_positions if self.data is None else self.batch_tokens
            allowed = f"2..{most}, dividing batch_tokens"
            fits = 2 <= stage.length <= most
            fits = fits and self.batch_tokens % stage.length == 0
            require("stages.length", stage.length, fits, allowed)
            self._check_stage(stage)
        order = [0.0, *(stage.until for stage in self.stages)]
        rising = all(a < b for a, b in pairwise(order))
        require("stages.until", order[1:], rising, "shares that rise from above 0")

    def _check_stage(self, stage: Stage) -> None:
        """What a stage of a head may ask for, and others may not."""
        require("stages.rows", stage.rows, stage.rows in ROWS, "text or answers")
        require("stages.loss", stage.loss, stage.loss in LOSSES, " or ".join(LOSSES))
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
    def kind(self) -> str:
        """What is trained: `lm`, `draft`, or the kind of head."""
        if self.head is not None:
            return self.head.kind
        return "lm" if self.target is None else "draft"

    @property
    def budget(self) -> RunLength:
        """When the run ends."""
        return RunLength(max_steps=self.max_steps, max_minutes=self.max_minutes)

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
