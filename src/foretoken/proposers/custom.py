"""A drafter of the user's own: found by its dotted path; it can only read what it is shown, and
what it gives is checked.

Our own drafters keep to their contract and are not checked in every step. A user's mistakes are
said with the drafter's name. A wrong distribution would not fail by itself: it would bias the
output without a word. Knows nothing of what the drafter does.
"""

import importlib
from collections.abc import Iterator, Sequence
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, fields, replace
from typing import Any, NoReturn, final, overload

import torch
from torch import Tensor

from foretoken.config import DrafterConfig
from foretoken.errors import ConfigError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer, ProposerSettings
from foretoken.proposers.method import BuildContext, DrafterSpec, Target
from foretoken.runtime.sequence import Sequence as RunningSequence
from foretoken.types.scalars import plain

_WHERE = "speculative_config.model"
_TOLERANCE = 1e-3
"""How far from 1 the sum of a distribution may be, in float32 over a large vocabulary."""


def load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """The drafter whose dotted path is `config.model`; nothing is imported yet."""

    def build(context: BuildContext) -> Proposer:
        settings = ProposerSettings(
            vocab_size=context.vocab_size,
            max_model_len=context.max_model_len,
            num_speculative_tokens=config.num_speculative_tokens,
        )
        assert config.model is not None, "checked by DrafterConfig"
        return load_custom(config.model, settings)

    return DrafterSpec(build=build, checked=True)


def load_custom(path: str, settings: ProposerSettings) -> Proposer:
    """Import `package.module.Class`, a `Proposer`, and call it with `settings`. Raises ConfigError:
    there is no such module or class, or it is no Proposer."""
    module_name, _, class_name = path.rpartition(".")
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{module_name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(_WHERE, path, f"an importable module, not {error.name!r}") from error
    found = getattr(module, class_name, None)
    if not (isinstance(found, type) and issubclass(found, Proposer)):
        raise ConfigError(_WHERE, path, f"a class of {module_name} that is a foretoken Proposer")
    proposer: object = found(settings)  # type: ignore[call-arg]
    assert isinstance(proposer, Proposer), type(proposer)
    return proposer


@final
@dataclass(frozen=True, slots=True)
class DraftCheck:
    """Checks the drafts of one drafter."""

    name: str
    vocab_size: int

    def checked(self, draft: Any, context: Context) -> Draft:
        """The draft as it was given, its sequences as tuples. Raises ConfigError: it is no draft
        for these spans; with the drafter's name."""
        if not isinstance(draft, Draft):
            self._refuse("its draft", draft, "a foretoken.models.tensors.Draft")
        spans = context.spans
        ids = self._per_span("ids", draft.ids, len(spans))
        for one, span in zip(ids, spans, strict=True):
            if len(one) > span.draft_budget:
                self._refuse("ids", f"{len(one)} drafts", f"at most {span.draft_budget} here")
            for token in one:
                whole = isinstance(token, int) and not isinstance(token, bool)
                if not whole or not 0 <= token < self.vocab_size:
                    self._refuse("ids", token, f"integers from 0 to {self.vocab_size - 1}")
        parents = None if draft.parents is None else self._parents(draft.parents, ids)
        for field in ("drafters", "promises"):
            given = getattr(draft, field)
            if given is not None and len(given) != len(spans):
                self._refuse(field, given, f"one for each of {len(spans)} spans")
        if draft.probs_KV is not None:
            self._check_probs(draft.probs_KV, [token for one in ids for token in one])
        return replace(draft, ids=ids, parents=parents)

    def _per_span(self, field: str, given: Any, count: int) -> tuple[tuple[Any, ...], ...]:
        """A sequence of sequences, one per span."""
        parts = given if isinstance(given, Sequence) else ()
        if len(parts) != count or not all(isinstance(one, Sequence) for one in parts):
            self._refuse(field, given, f"a tuple for each of {count} spans")
        return tuple(tuple(map(plain, one)) for one in parts)

    def _parents(
        self, given: Any, ids: tuple[tuple[int, ...], ...]
    ) -> tuple[tuple[int, ...] | None, ...]:
        if not isinstance(given, Sequence) or len(given) != len(ids):
            self._refuse("parents", given, f"a tuple or None for each of {len(ids)} spans")
        found = [tuple(map(plain, one)) if isinstance(one, Sequence) else one for one in given]
        for one, tokens in zip(found, ids, strict=True):
            if one is None:
                continue
            fits = isinstance(one, tuple) and len(one) == len(tokens)
            if not fits or not all(isinstance(p, int) and -1 <= p < i for i, p in enumerate(one)):
                allowed = f"for each of {len(tokens)} drafts -1 or the place of one before it"
                self._refuse("parents", one, allowed)
        return tuple(found)

    def _check_probs(self, probs_KV: Any, tokens: list[int]) -> None:
        """Distributions that the tokens can have been drawn from."""
        shape = (len(tokens), self.vocab_size)
        if not isinstance(probs_KV, Tensor):
            self._refuse("probs_KV", probs_KV, "a tensor, or None")
        if tuple(probs_KV.shape) != shape or probs_KV.dtype != torch.float32:
            given = f"{list(probs_KV.shape)} of {probs_KV.dtype}"
            self._refuse("probs_KV", given, f"{list(shape)} of torch.float32")
        if not tokens:
            return
        lowest_K, sums_K = probs_KV.amin(dim=-1), probs_KV.sum(dim=-1)
        own_K = probs_KV.gather(1, torch.tensor(tokens, device=probs_KV.device)[:, None])[:, 0]
        each = zip(tokens, lowest_K.tolist(), sums_K.tolist(), own_K.tolist(), strict=True)
        for row, (token, lowest, total, own) in enumerate(each):
            if not abs(total - 1) <= _TOLERANCE:
                self._refuse("probs_KV", f"sum {total:g} in row {row}", "rows that sum to 1")
            if lowest < 0:
                self._refuse("probs_KV", f"{lowest:g} in row {row}", "no negative probability")
            if own <= 0:
                given = f"probability 0 of token {token}, which it drafted, in row {row}"
                self._refuse("probs_KV", given, "the distribution that the token was drawn from")

    def _refuse(self, field: str, given: object, allowed: str) -> NoReturn:
        raise ConfigError(f"proposer {self.name!r}, {field}", given, allowed)


def read_only(context: Context) -> Context:
    """The step as a drafter of the user's own sees it: its sequences can be read, not changed."""
    spans = (replace(span, sequence=shown(span.sequence)) for span in context.spans)
    return replace(context, spans=tuple(spans))


def shown(sequence: RunningSequence) -> RunningSequence:
    """A sequence whose fields can be read, not changed. Nothing is copied."""
    view: Any = _ShownSequence(sequence)
    return view  # type: ignore[no-any-return]


_LISTS = frozenset(one.name for one in fields(RunningSequence) if "list[" in str(one.type))


@final
class _ShownSequence:
    """Answers as the sequence does; equal to any other view of it."""

    __slots__ = ("_sequence",)

    def __init__(self, sequence: RunningSequence) -> None:
        object.__setattr__(self, "_sequence", sequence)

    def __getattr__(self, name: str) -> Any:
        value = getattr(self._sequence, name)
        return _ShownList(value) if name in _LISTS else value

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{name}: a drafter can only read the sequences of a step")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _ShownSequence) and other._sequence is self._sequence

    def __hash__(self) -> int:
        return hash(self._sequence)


@final
class _ShownList(ReadOnlyList[Any]):
    """A list of a sequence, as it is and as it grows; a slice of it is a list."""

    __slots__ = ("_items",)

    def __init__(self, items: list[Any]) -> None:
        self._items = items

    @overload
    def __getitem__(self, index: int) -> Any: ...
    @overload
    def __getitem__(self, index: slice) -> list[Any]: ...
    def __getitem__(self, index: int | slice) -> Any:
        return self._items[index]

    def __len__(self) -> int:
        return len(self._items)

    def __iter__(self) -> Iterator[Any]:
        return iter(self._items)

    def __eq__(self, other: object) -> bool:
        return self._items == (other._items if isinstance(other, _ShownList) else other)

    def __add__(self, other: Sequence[Any]) -> list[Any]:
        return [*self._items, *other]

    def __repr__(self) -> str:
        return repr(self._items)
