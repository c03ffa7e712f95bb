"""What every reader of head folders gives and needs: the loaded head, and the target's sizes.

Knows no format.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import nn

from foretoken.errors import ConfigError
from foretoken.proposers.heads.eagle3.network import Eagle3


class TargetFacts(Protocol):
    """What a head must fit; `ModelShape` has it."""

    @property
    def hidden_size(self) -> int:
        """Width of the residual stream."""

    @property
    def vocab_size(self) -> int:
        """Tokens that the target knows."""

    @property
    def num_hidden_layers(self) -> int:
        """Layers whose inputs can be read."""

    @property
    def max_position_embeddings(self) -> int:
        """Positions that the target reaches."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadedHead:
    """A network and what it needs from the target."""

    kind: str
    net: nn.Module
    points: tuple[int, ...]
    """Where hidden states are taken (see `foretoken.kv.features`), in the order it wants them."""
    mask_token_id: int | None = None
    """P-EAGLE: the token of slots that are not drafted yet; None for anchored ones."""

    @property
    def parallel(self) -> bool:
        """Whether it drafts all tokens in one pass."""
        return isinstance(self.net, Eagle3) and self.net.shape.parallel


def check_fits(name: str, given: int, wanted: int) -> None:
    """The head's size must be the target's."""
    if given != wanted:
        allowed = f"a head of this target, whose {name} is {wanted}"
        raise ConfigError("speculative_config.model", f"{name} {given}", allowed)
