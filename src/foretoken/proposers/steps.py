"""The steps of a draft: what a drafter runs to give logits, one token or level after the other.

`draft_chain` (`chain.py`) and `draft_trees` (`drafting.py`) turn the logits into tokens. Beside the
contract there are the two ways that most drafters have: one pass for all depths, and a state that
goes on. Knows nothing of how a token is chosen.
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence as Seq

from torch import Tensor

from foretoken.models.tensors import RolledOut, RolloutPlan
from foretoken.proposers.tree import SpanTree, newest_tokens
from foretoken.runtime.batch import Span


class DraftSteps(ABC):
    """What makes the logits of one draft of some spans, for `draft_chain` or `draft_trees`.

    Every drafter writes `first` and `after`, and who drafts trees `after_nodes`. The rest is for
    those that draft several tokens by one call, know how sure they are, or keep keys and values.
    """

    keeps_drafts: bool = False
    """Whether the keys and values of a draft that was fed are those of the token, should it be
    accepted. They are not where guesses stand in the place of features or tokens."""
    rolls_out: bool = False
    """Whether `roll_out` may be asked."""
    all_or_none: bool = False
    """Whether a rollout drafts everything from the start on, and only where all spans want equally
    many drafts."""

    @abstractmethod
    def first(self) -> Tensor:
        """float32 logits after the newest token of every span, [B, V]."""

    @abstractmethod
    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        """float32 logits after the drafts so far of the spans `active`, [len(active), V].

        Args:
            active: indices of spans, ascending, each among those of the call before.
            drafted: the drafts so far of each of them, equally many.
        """

    def after_nodes(self, trees: Seq[SpanTree]) -> Tensor:
        """float32 logits after every node of the frontiers, tree after tree, [N, V].

        Args:
            trees: those that go on, in order; each among those of the call before.
        """
        raise AssertionError("the table of methods says that it drafts no trees")

    def roll_out(
        self, active: list[int], drafted: list[list[int]], plan: RolloutPlan
    ) -> RolledOut | None:
        """Several drafts of each span by one call: those that one by one would give, or fewer.

        It is asked before `first`, with nothing drafted yet, and before every `after`; what it
        drafts from the start on makes `first` needless.

        Args:
            active: indices of spans, ascending.
            drafted: the drafts so far of each of them, equally many; they are not changed here.
            plan: how many tokens, how each is chosen, and where they end.

        Returns:
            The drafts. None: nothing was drafted, and token by token it goes on.
        """
        return None

    def sure(self, active: list[int], drafted: list[list[int]]) -> list[float] | None:
        """The chance that the next draft of each span is accepted, by an opinion of the drafter's
        own; judged before it is drawn. None: that of its best token.

        Args:
            active: indices of spans, ascending; their logits have just been asked for.
            drafted: the drafts so far of each of them, equally many.
        """
        return None


class DepthSteps(DraftSteps, ABC):
    """Steps of a drafter whose one pass gives the logits of all depths, whatever is drafted."""

    all_or_none = True

    def __init__(self, spans: Seq[Span], depths: Seq[int]) -> None:
        """Nothing is run yet; `depths` are the most drafts one after the other of each span."""
        self.sequences = [span.sequence for span in spans]
        self.depths = list(depths)
        self._starts = [sum(self.depths[:i]) for i in range(len(self.depths))]
        self._logits_KV: Tensor | None = None
        self._level = 0

    @abstractmethod
    def run(self) -> Tensor:
        """The pass: logits of all depths, span after span, [K, V]."""

    @property
    def ran(self) -> bool:
        """Whether logits were asked for, instead of all drafts in one call."""
        return self._logits_KV is not None

    @property
    def newest(self) -> list[int]:
        return [sequence.token_ids[-1] for sequence in self.sequences]

    def first(self) -> Tensor:
        self._logits_KV = self.run()
        return self.at(list(range(len(self.depths))), 0, self.newest)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        return self.at(active, len(drafted[0]), [tokens[-1] for tokens in drafted])

    def after_nodes(self, trees: Seq[SpanTree]) -> Tensor:
        self._level += 1
        owners = [tree.index for tree in trees for _ in tree.growth.frontier]
        return self.at(owners, self._level, newest_tokens(trees))

    def rows(self, spans: list[int], depth: int) -> list[int]:
        """The rows of the pass that give the drafts at this depth."""
        return [self._starts[i] + depth for i in spans]

    def at(self, spans: list[int], depth: int, previous: list[int]) -> Tensor:
        """float32 logits after `depth` drafts of some spans, the last of which are `previous`."""
        assert self._logits_KV is not None, "`first` was asked before"
        return self._logits_KV[self.rows(spans, depth)]


class StateSteps(DraftSteps, ABC):
    """Steps of a drafter that goes on from a state of each span, or of each node of a tree."""

    def __init__(self, spans: Seq[Span]) -> None:
        self.sequences = [span.sequence for span in spans]
        self._rows = list(range(len(spans)))
        self._nodes = {(index, -1): index for index in self._rows}
        """Of trees: the row of each newest node, by tree; the roots at first."""
        self._states_BD: Tensor

    @abstractmethod
    def begin(self) -> Tensor:
        """The states that the first drafts are chosen by, [B, D]."""

    @abstractmethod
    def advance(self, states_BD: Tensor, active: list[int], drafted: list[list[int]]) -> Tensor:
        """The next states of the spans `active`, after the newest of these drafts."""

    @abstractmethod
    def grow(self, states_FD: Tensor, trees: Seq[SpanTree]) -> Tensor:
        """The states of the frontiers, from those of the nodes before them."""

    @abstractmethod
    def logits(self, states_BD: Tensor) -> Tensor:
        """float32 logits of states, [B, V]."""

    def first(self) -> Tensor:
        self._states_BD = self.begin()
        return self.logits(self._states_BD)

    def after(self, active: list[int], drafted: list[list[int]]) -> Tensor:
        self.keep(active, self.advance(self.states_of(active), active, drafted))
        return self.logits(self._states_BD)

    def after_nodes(self, trees: Seq[SpanTree]) -> Tensor:
        nodes = [(tree, node) for tree in trees for node in tree.growth.frontier]
        # Siblings begin with the same state; nodes that were dropped leave theirs unused.
        before = [self._nodes[tree.index, tree.parent(node)] for tree, node in nodes]
        self._nodes = {(tree.index, node): row for row, (tree, node) in enumerate(nodes)}
        self._states_BD = self.grow(self._states_BD[before], trees)
        return self.logits(self._states_BD)

    def states_of(self, active: list[int]) -> Tensor:
        """The newest states of these spans; spans that ended have some that no one continues."""
        if len(active) == len(self._rows):
            return self._states_BD
        return self._states_BD[[self._rows.index(i) for i in active]]

    def keep(self, active: list[int], states_BD: Tensor) -> None:
        """Go on from these states of the spans `active`."""
        self._rows, self._states_BD = active, states_BD
