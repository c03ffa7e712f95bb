"""Training of draft models: small Llamas that learn what the target says.

A draft model reads nothing of the target but its tokens: what it guesses at one position, given the
true tokens before, is its guess of every depth there.
"""

from collections.abc import Iterator
from dataclasses import asdict, replace

import torch
from torch import Tensor

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError
from foretoken.training.heads.guesses import Guess, Guesser
from foretoken.training.heads.kind import FreshHead, HeadKind
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.llama import ADDED, Llama, read_llama
from foretoken.training.loop import prepare
from foretoken.training.settings import Settings


class DraftGuesser(Guesser):
    """One pass over the true tokens; the loss needs one depth, since all have the same guesses."""

    def __init__(self, net: Llama) -> None:
        self.net = net

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """What stands at slot t for depth s is the guess at position t + 1 + s."""
        hidden_BTD = self.net.hidden(captured.tokens_BT)
        for step in range(1 if self.net.training else depth):
            ahead = hidden_BTD[:, 1 + step :]
            fill = hidden_BTD[:, -1:].expand(-1, 1 + step, -1)
            states = torch.cat((ahead, fill), dim=1)
            yield Guess(states_BTD=states, weight_VD=self.net.embed_tokens.weight)


def draft_net(target: TargetParts, settings: Settings) -> Llama:
    """A draft of the config's shape that begins with `head.start`, or with what the target has.

    Without a start: random layers, over the target's embedding where the widths are equal.

    Raises:
        ConfigError: a start of another shape.
    """
    shape, head = settings.shape, settings.of_head
    net = Llama(shape)
    if head.start is not None:
        begin_with(net, read_llama(find_model(head.start)))
    elif shape.hidden_size == target.hidden_size:
        with torch.no_grad():
            net.embed_tokens.weight.copy_(target.embedding_VD)
    return net


def require_draft_fits(target: TargetParts, settings: Settings) -> None:
    """Raise ConfigError unless the draft has the target's vocabulary and room for the rows."""
    if settings.shape.vocab_size != target.vocab_size:
        given, allowed = settings.shape.vocab_size, f"{target.vocab_size}, as the target has"
        raise ConfigError("shape.vocab_size", given, allowed)
    longest = max(stage.length for stage in settings.stages) + settings.of_head.depth
    if longest > settings.shape.max_positions:
        given, allowed = settings.shape.max_positions, f"{longest} or more, for rows and drafts"
        raise ConfigError("shape.max_positions", given, allowed)


@torch.no_grad()
def begin_with(draft: Llama, start: Llama) -> None:
    """Give `draft` the weights of a shallower one; its further layers begin as the identity. Raises
    ConfigError: what `head.start` names has another shape, in more than the number of layers."""
    known, wanted = start.shape.layers, draft.shape.layers
    if known > wanted or replace(start.shape, layers=wanted) != draft.shape:
        ours, theirs = asdict(draft.shape), asdict(start.shape)
        wrong = [name for name in ours if ours[name] != theirs[name]]
        given = ", ".join(f"{name} {theirs[name]}" for name in wrong)
        allowed = ", ".join(f"{name} {ours[name]}" for name in wrong)
        raise ConfigError("head.start", given, f"{allowed}, as [shape] says, or fewer layers")
    missing = draft.load_state_dict(start.state_dict(), strict=False).missing_keys
    for name in missing:
        if name.endswith(ADDED):
            draft.get_parameter(name).zero_()


def _fresh(target: TargetParts, settings: Settings, _: Tensor) -> FreshHead:
    net = draft_net(target, settings)
    prepare(net, settings)
    return FreshHead(net, DraftGuesser(net))


KIND = HeadKind(fresh=_fresh, require_fit=require_draft_fits, compiles=True, begin=None)
