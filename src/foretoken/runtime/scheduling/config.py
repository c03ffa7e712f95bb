"""The numbers that the scheduler works with, resolved from the engine's settings."""

from dataclasses import dataclass

from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerConfig:
    """Limits of a step and of a sequence.

    Raises:
        ConfigError: a limit is not an integer >= 1.
    """

    max_num_seqs: int = 64
    """Most sequences running at once."""
    max_num_batched_tokens: int = 2048
    """Most tokens of one step, prompt chunks and drafts included. Decoding comes first; drafts
    take at most half of the rest while prompts wait for it."""
    max_model_len: int
    """Most tokens of a sequence, prompt and output together."""
    enable_prefix_caching: bool = True
    """Share pages between sequences that begin alike."""
    cache_identity: str = ""
    """Names the model and whatever else the KV depends on."""
    max_prompt_logprob_tokens: int = 256
    """Most prompt tokens of one sequence and step if all of them need logits."""

    def __post_init__(self) -> None:
        """Check the ranges."""
        limits = (
            "max_num_seqs",
            "max_num_batched_tokens",
            "max_model_len",
            "max_prompt_logprob_tokens",
        )
        for name in limits:
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(name, value, "an integer >= 1")
