"""The settings of a head, the `[head]` table of a training config."""

from dataclasses import dataclass

from foretoken.config.keys import one_of
from foretoken.config.methods import trained_kinds
from foretoken.errors import ConfigError


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadSettings:
    """What kind of head, how large, and how far it looks.

    Raises:
        ConfigError: an unknown kind or a number out of range.
    """

    kind: str
    """`eagle`, `eagle3`, `peagle`, `mlp`, `medusa`, `parallel` (PARD) or `draft` (a model)."""
    depth: int = 5
    """Tokens that a training rollout guesses: test-time steps, stages, heads or masks."""
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
    """parallel, peagle: the share of a depth's rollouts that the next goes on with in training."""
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
