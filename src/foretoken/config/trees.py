"""The keys of `speculative_config` that ask for trees of drafts: of a given shape, or growing.

Knows no method and no drafter. Torch-free.
"""

import ast
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any

from foretoken.config.reader import between, check_fields, is_int, require

WHERE = "speculative_config."
MOST_DRAFTS = 128
TREE_DEPTH = 5
_PATHS = f"1 to {MOST_DRAFTS} different paths such as [[0], [0, 0], [1]], each beginning too"


@dataclass(frozen=True, slots=True, kw_only=True)
class TreeConfig:
    """Whether a tree is drafted, and of which shape."""

    choices: Sequence[Sequence[int]] | None = None
    """Draft a tree of this shape instead of a chain (draft_model and heads): paths of ranks, each
    with its beginnings, such as [[0], [0, 0], [1]]; num_speculative_tokens is their number."""
    tree_top_k: Annotated[int, between(1, 32)] | None = None
    """Draft a tree that grows by confidence (EAGLE-2; draft_model and heads): so many nodes a level
    get as many children; the num_speculative_tokens best (default: top_k * depth) are checked."""
    tree_depth: Annotated[int, between(1, 32)] = TREE_DEPTH
    """With tree_top_k: most drafts on a branch."""

    def __post_init__(self) -> None:
        """Check ranges; `choices` become sorted tuples."""
        if self.choices is not None:
            object.__setattr__(self, "choices", _read_choices(self.choices))
        check_fields(self, WHERE)
        if self.tree_top_k is None:
            allowed = f"{TREE_DEPTH}: only trees with a tree_top_k have a depth"
            require(WHERE + "tree_depth", self.tree_depth, self.tree_depth == TREE_DEPTH, allowed)
        else:
            allowed = "nothing beside tree_top_k"
            require(WHERE + "choices", self.choices, self.choices is None, allowed)

    @property
    def num_nodes(self) -> int | None:
        """Drafts of a tree where nobody says how many; None for chains."""
        if self.choices is not None:
            return len(self.choices)
        if self.tree_top_k is not None:
            return min(MOST_DRAFTS, self.tree_top_k * self.tree_depth)
        return None

    def depth_of(self, num_drafts: int) -> int:
        """Most drafts that one verification can accept, of so many."""
        if self.choices is not None:
            return max(len(path) for path in self.choices)
        return num_drafts if self.tree_top_k is None else min(self.tree_depth, num_drafts)


def _read_choices(given: Any) -> tuple[tuple[int, ...], ...]:
    """`choices` as sorted paths of ranks; text is read as vLLM's speculative_token_tree.

    Raises:
        ConfigError: not paths, a path without its beginning, one given twice, or too many.
    """
    where, paths = WHERE + "choices", given
    if isinstance(given, str):
        try:
            paths = ast.literal_eval(given)
        except (ValueError, SyntaxError):
            paths = None
    listed = isinstance(paths, Sequence) and 1 <= len(paths) <= MOST_DRAFTS
    require(where, given, listed, _PATHS)
    for path in paths:
        ok = isinstance(path, Sequence) and len(path) > 0 and all(is_int(r, 0) for r in path)
        require(where, given, ok, _PATHS)
    found = sorted(tuple(path) for path in paths)
    known = {(), *found}
    whole = all(path[:-1] in known for path in found) and len(set(found)) == len(found)
    require(where, given, whole, _PATHS)
    return tuple(found)
