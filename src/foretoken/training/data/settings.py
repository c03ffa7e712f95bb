"""The tables `[data]` and `[states]` of a training config."""

from dataclasses import dataclass

from foretoken.errors import ConfigError

DTYPES = ("bfloat16", "float16", "float32")


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
