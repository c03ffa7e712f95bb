"""What a kind of drafter brings to be trained: first weights, its guesses, the layout of its file.

The table in `trained_kinds` names the module of each kind, which has a `KIND`. Here is what such a
record says, how it is found, how a new head begins with one that was trained before, and what files
of the `speculators` library have in common. Knows no kind.
"""

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from foretoken.checkpoint import find_model
from foretoken.errors import ConfigError, one_of
from foretoken.kv.features import FINAL
from foretoken.proposers.heads.base import DraftHead
from foretoken.proposers.heads.folder import method_of, read_head
from foretoken.training.heads.guesses import Guesser
from foretoken.training.heads.target import TargetParts
from foretoken.training.settings import Settings
from foretoken.training.trained_kinds import trained_kinds

_KEY = "head.start"


def begin_with_head(
    net: nn.Module, points: tuple[int, ...], folder: Path, target: TargetParts
) -> None:
    """Give `net` the weights of a head of its kind and sizes, its draft vocabulary included.

    Args:
        net: a head.
        points: where it reads the target's hidden states.
        folder: of the head to begin with.
        target: which `net` is for.

    Raises:
        ConfigError: the head is another kind, has other sizes, or reads other points.
        ModelError: its folder is broken.
    """
    start = read_start(net, points, folder, target)
    net.load_state_dict(start.state_dict())


def read_start(
    net: nn.Module, points: tuple[int, ...], folder: Path, target: TargetParts
) -> DraftHead:
    """The head in `folder`, all of whose tensors `net` has too; the rest as `begin_with_head`."""
    assert isinstance(net, DraftHead), type(net)
    read = read_head(folder)
    kind = method_of(read)
    if kind != net.method:
        raise ConfigError(_KEY, str(folder), f"a head of kind {net.method}, not {kind}")
    with torch.no_grad():
        start = type(net).read(read, target.layer_shape(inner_size=0, layers=target.layers))
    wanted = {name: list(tensor.shape) for name, tensor in net.state_dict().items()}
    for name, tensor in start.state_dict().items():
        if wanted.get(name) != list(tensor.shape):
            given = f"{name} {list(tensor.shape)}"
            raise ConfigError(_KEY, given, f"{wanted.get(name)}, as in this config")
    if start.points != points:
        allowed = f"one that reads the layers {points}, as this config's does"
        raise ConfigError(_KEY, f"a head that reads the layers {start.points}", allowed)
    return start


def proposing(algorithm: str, drafts: int, verifier: str) -> dict[str, Any]:
    """The part of config.json that says how many tokens the head drafts, and for which model."""
    return {
        "algorithm": algorithm,
        "default_proposal_method": "greedy",
        "proposal_methods": [
            {
                "proposal_type": "greedy",
                "speculative_tokens": drafts,
                "verifier_accept_k": 1,
                "accept_tolerance": 0.0,
            }
        ],
        "verifier": {"name_or_path": verifier, "architectures": ["LlamaForCausalLM"]},
    }


def with_both_ways(tensors: Mapping[str, Tensor], vocab_size: int) -> dict[str, Tensor]:
    """`t2d`, which target ids can be drafted, beside `d2t`; neither where all can be.

    The `speculators` package does not load a reduced vocabulary without both.
    """
    offsets = tensors.get("d2t")
    if offsets is None or len(offsets) == vocab_size:
        return {name: tensor for name, tensor in tensors.items() if name != "d2t"}
    return {**tensors, "t2d": drafted_ids(offsets, vocab_size)}


def drafted_ids(offsets: Tensor, vocab_size: int) -> Tensor:
    """Which target ids can be drafted, bool [V], by the offsets `d2t`."""
    drafted_V = torch.zeros(vocab_size, dtype=torch.bool)
    drafted_V[offsets + torch.arange(len(offsets))] = True
    return drafted_V


OWN = "own"
"""The format that every kind has; our loaders read it."""


class Layout(NamedTuple):
    """What a folder will hold."""

    tensors: dict[str, Tensor]
    config: dict[str, Any]


@dataclass(frozen=True, slots=True)
class FreshHead:
    """A network, how it guesses, and what it reads from the target."""

    net: nn.Module
    guesser: Guesser
    points: tuple[int, ...] = (FINAL,)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadKind:
    """One kind of drafter, to be trained and written."""

    fresh: Callable[[TargetParts, Settings, Tensor], FreshHead]
    """A new one for a target. The tensor has all token ids, most frequent first, int64 [V]."""
    layout: Callable[[Mapping[str, Any], str, str | None], Layout] | None = None
    """Its file: of a checkpoint's state, the target's name, and a format or None for its own.
    None: a Llama folder."""
    llama_keys: Callable[[Mapping[str, Any]], dict[str, Any]] = lambda _: {}
    """Keys of config.json beside Llama's, from the state's `head`, where it is a Llama folder."""
    points: Callable[[TargetParts], tuple[int, ...]] = lambda _: (FINAL,)
    """Where it reads a target's hidden states; a ConfigError if the target has too few layers."""
    require_fit: Callable[[TargetParts, Settings], None] = lambda _, __: None
    """Raise ConfigError for settings that a target cannot have."""
    compiles: bool = False
    """Whether its network is compiled before the first step, which takes minutes."""
    may_embed: bool = False
    """Whether its file may bring the target's token embedding, as `speculators` needs it then."""
    begin: Callable[[nn.Module, tuple[int, ...], Path, TargetParts], None] | None = begin_with_head
    """Gives a fresh network, which reads these points, the weights in a folder (`head.start`).
    None: `fresh` does so itself."""
    usual: Callable[[TargetParts], dict[str, Any]] | None = None
    """The keys of `[head]` for a target on which nobody has tried any, which `foretoken train auto`
    takes; None: it leaves this kind out."""


def find_kind(word: str) -> HeadKind:
    """The kind of that word in a config's `[head]`."""
    trained = trained_kinds()[word]
    found = importlib.import_module(trained.code).KIND
    assert isinstance(found, HeadKind), f"{trained.code}.KIND"
    return found


def fresh_head(target: TargetParts, settings: Settings, frequent_ids: Tensor) -> FreshHead:
    """The head that `settings.head` describes.

    Args:
        target: frozen.
        settings: with a head.
        frequent_ids: all token ids, most frequent first, int64 [V].

    Raises:
        ConfigError: as `require_fit`; what `head.start` names is another kind, or has other sizes.
        ModelError: it is missing or broken.
    """
    require_fit(target, settings)
    kind, start = find_kind(settings.of_head.kind), settings.of_head.start
    made = kind.fresh(target, settings, frequent_ids)
    if start is not None and kind.begin is not None:
        kind.begin(made.net, made.points, find_model(start), target)
    return made


def usual_vocabulary(target: TargetParts) -> int:
    """Tokens that a head with an output head of its own drafts: half of them, at most 32,000, as
    published heads of large vocabularies do."""
    return min(max(1, target.vocab_size // 2), 32_000)


def usual_width(target: TargetParts) -> int:
    """The inner width of a head's gated MLP: between two and three times the target's width, as
    many of its own layers have."""
    return 8 * (target.hidden_size // 3)


def require_fit(target: TargetParts, settings: Settings) -> None:
    """Raise ConfigError for a head that this target cannot have, before anything is done for it."""
    head = settings.of_head
    kind = find_kind(head.kind)
    kind.points(target)
    kind.require_fit(target, settings)
    if (head.draft_vocab_size or 0) > target.vocab_size:
        allowed = f"at most {target.vocab_size}, the target's tokens"
        raise ConfigError("head.draft_vocab_size", head.draft_vocab_size, allowed)


def require_mask(target: TargetParts, settings: Settings) -> None:
    """Raise ConfigError for a mask token that the target does not know."""
    given = settings.of_head.mask_token_id
    if given >= target.vocab_size:
        allowed = f"below {target.vocab_size}, the target's tokens"
        raise ConfigError("head.mask_token_id", given, allowed)


def require_form(kind: str, form: str | None, option: str = "--format") -> None:
    """Raise ConfigError for a kind that has no such format; None is a kind's own, too."""
    known = trained_kinds()
    allowed = (OWN, *(known[kind].formats if kind in known else ()))
    if form is not None and form not in allowed:
        raise ConfigError(option, form, f"for {kind}: {one_of(form, allowed)}")
