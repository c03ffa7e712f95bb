"""What every rule of acceptance is: logits and drafts of some spans in, their new tokens out.

Owns the values that rules are given and the helpers they share. Knows nothing of stopping,
scheduling, or how drafts were made. Invariants of every rule: each span gets between 1 and
num_drafts + 1 new tokens; all but the last are its leading drafts; a draft of -1 is never kept.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeAlias, TypeVar

from torch import Tensor

from foretoken.ops.noise import Stream, row_key
from foretoken.runtime.draft_tree import Tree
from foretoken.runtime.rows import Rows
from foretoken.runtime.sampler import Sampler
from foretoken.types import SamplingParams

DRAWN = ("standard", "block", "traversal")
"""Keep the distribution of the output, not the tokens of seeded requests: they weigh that which a
draft was drawn from."""
LOSSY = ("typical",)
"""Change what the model says; never chosen by `auto`."""
INVALID = ("synthetic",)
"""Rules whose output is not the model's at all; never chosen by `auto`."""


def rule_of(params: SamplingParams, rule: str, one_hot: bool) -> str:
    """The rule that checks the drafts of such a request.

    Args:
        params: of the request; greedy requests match, except under `synthetic`.
        rule: one of RULES.
        one_hot: whether the draft comes without a distribution (greedy drafts, look-up).
    """
    if rule == "synthetic":
        return rule
    if params.greedy:
        return "matching"
    if rule == "auto":
        return "matching" if params.deterministic or one_hot else "standard"
    return rule


def wants_distribution(params: SamplingParams, rule: str, one_hot: bool = False) -> bool:
    """Whether the rule for such a request weighs the distribution that a draft was drawn from."""
    return rule_of(params, rule, one_hot) in DRAWN


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleSettings:
    """What the rules with parameters need; see `RuleConfig`."""

    posterior_threshold: float = 0.09
    posterior_alpha: float = 0.3
    synthetic_rates: tuple[float, ...] = ()
    """Share of verifications that keep draft 0, 1, ...; non-increasing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One sampling span: its rows, and where its logits and draft distributions start."""

    index: int
    """Place of the span in its batch."""
    rows: Rows
    row: int
    """First of its sample rows in the step's logits."""
    drafted_row: int
    """First of its rows in the step's draft distributions."""
    num_rows: int
    """Sample rows of the span: one per draft and one more."""

    @property
    def drafts(self) -> tuple[int, ...]:
        """Draft ids, in order."""
        return self.rows.drafts


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeCheck:
    """One sampling span whose drafts are a tree."""

    index: int
    runs: tuple[Rows, ...]
    """Rows of the span, run by run of the tree; the first begins at the newest committed token."""
    ids: tuple[int, ...]
    tree: Tree
    row: int
    drafted_row: int
    num_rows: int

    @property
    def rows(self) -> Rows:
        """The first run."""
        return self.runs[0]

    def tokens(self, path: Seq[int]) -> tuple[int, ...]:
        """The tokens along a path of nodes."""
        return tuple(self.ids[node] for node in path)


class Branch(NamedTuple):
    """What stays of a tree."""

    path: tuple[int, ...]
    """Accepted nodes, from the root down."""
    new_ids: tuple[int, ...]
    """Tokens of the accepted nodes and one more."""


C = TypeVar("C", Check, TreeCheck)
F = TypeVar("F", tuple[int, ...], Branch)
_USUAL = RuleSettings()


class Rule(ABC, Generic[C, F]):
    """Decides which drafts of checks stay and what follows them."""

    name: str
    """The word the user types."""

    def __init__(self, sampler: Sampler, settings: RuleSettings = _USUAL) -> None:
        self._sampler, self._settings = sampler, settings

    @abstractmethod
    def decide(self, logits_PV: Tensor, checks: Seq[C], probs_KV: Tensor | None) -> list[F]:
        """New tokens of each chain, the drafts that stay and one more; of each tree its branch.

        Args:
            logits_PV: raw float32 logits of the checks' own rows, check after check, of a tree in
                the order of its nodes; read only.
            checks: the spans.
            probs_KV: distributions of all drafts of the step (`Check.drafted_row`), float32;
                None: all drafts are one-hot.
        """


ChainRule: TypeAlias = Rule[Check, tuple[int, ...]]
TreeRule: TypeAlias = Rule[TreeCheck, Branch]


def draw_last(
    sampler: Sampler,
    last_SV: Tensor,
    checks: Seq[Check | TreeCheck],
    kept: Seq[int],
    recovered: Seq[bool],
) -> list[int]:
    """One token after the kept drafts of each check, from processed logits [S, V].

    `recovered` says where it stands in place of a rejected draft, which has noise of its own.
    """
    keys = [
        row_key(
            sampler.profile(check.rows.sequence.request).key,
            check.rows.position + count,
            Stream.RECOVER if instead else Stream.TARGET,
        )
        for check, count, instead in zip(checks, kept, recovered, strict=True)
    ]
    return sampler.draw(last_SV, keys)


def with_last(checks: Seq[Check], kept: Seq[int], last: Seq[int]) -> list[tuple[int, ...]]:
    """Kept drafts and the token after them, per check."""
    return [
        (*check.drafts[:count], token)
        for check, count, token in zip(checks, kept, last, strict=True)
    ]
