"""What `choices` must be like: a static tree of drafts as paths of ranks.

Knows no config class; the field is in `foretoken.config.speculative`, which calls this.
"""

import ast
from collections.abc import Mapping, Sequence
from typing import Any

from foretoken.config.keys import is_int, require
from foretoken.config.methods import find_method, method_names
from foretoken.errors import ConfigError

_WHERE = "speculative_config."
_MOST_NODES = 128
OF_CHAINS = (
    "draft_confidence_threshold",
    "draft_expected_gain",
    "min_speculative_tokens",
    "use_string_matching",
)
"""Settings that trees do not go with."""


def read_choices(given: Any) -> tuple[tuple[int, ...], ...]:
    """`choices` as sorted paths of ranks; text is read as vLLM's speculative_token_tree.

    Raises:
        ConfigError: not paths, a path without its beginning, one given twice, or too many.
    """
    where, paths = _WHERE + "choices", given
    allowed = f"1 to {_MOST_NODES} different paths such as [[0], [0, 0], [1]], each beginning too"
    if isinstance(given, str):
        try:
            paths = ast.literal_eval(given)
        except (ValueError, SyntaxError):
            paths = None
    listed = isinstance(paths, Sequence) and 1 <= len(paths) <= _MOST_NODES
    require(where, given, listed, allowed)
    for path in paths:
        ok = isinstance(path, Sequence) and len(path) > 0 and all(is_int(r, 0) for r in path)
        require(where, given, ok, allowed)
    found = sorted(tuple(path) for path in paths)
    known = {(), *found}
    whole = all(path[:-1] in known for path in found) and len(set(found)) == len(found)
    require(where, given, whole, allowed)
    return tuple(found)


def check_choices(
    method: str, choices: Any, num_drafts: int, of_chains: Mapping[str, object]
) -> tuple[tuple[int, ...], ...]:
    """The paths of `choices`, if they fit the rest.

    Args:
        method: look-ups and users' classes draft no trees of a given shape.
        choices: as given.
        num_drafts: must be their number.
        of_chains: settings that only chains have; they must not be set.

    Raises:
        ConfigError: something does not fit.
    """
    if not find_method(method).trees:
        raise ConfigError(_WHERE + "choices", choices, f"nothing but for {_tree_methods()}")
    found = read_choices(choices)
    for name, value in of_chains.items():
        require(_WHERE + name, value, not value, "nothing: choices are a tree")
    text = f"left out, or the number of choices ({len(found)})"
    require(_WHERE + "num_speculative_tokens", num_drafts, num_drafts == len(found), text)
    return found


DEPTH, _WIDEST, _DEEPEST = 5, 32, 32


def check_dynamic(method: str, top_k: object, depth: object, others: Mapping[str, object]) -> None:
    """Check tree_top_k and tree_depth.

    Args:
        method: look-ups and users' classes draft no such trees.
        top_k: as given; None: no dynamic tree.
        depth: as given, or DEPTH.
        others: settings that do not go with such a tree; they must not be set.

    Raises:
        ConfigError: a value is out of range, or something does not fit.
    """
    where = _WHERE + "tree_depth"
    ok = is_int(depth, 1) and isinstance(depth, int) and depth <= _DEEPEST
    require(where, depth, ok, f"1 to {_DEEPEST}")
    if top_k is None:
        require(where, depth, depth == DEPTH, f"{DEPTH}: only trees with a tree_top_k have a depth")
        return
    ok = is_int(top_k, 1) and isinstance(top_k, int) and top_k <= _WIDEST
    require(_WHERE + "tree_top_k", top_k, ok, f"None or 1 to {_WIDEST}")
    if not find_method(method).trees:
        raise ConfigError(_WHERE + "tree_top_k", top_k, f"None but for {_tree_methods()}")
    for name, value in others.items():
        require(_WHERE + name, value, not value, "nothing beside tree_top_k")


def _tree_methods() -> str:
    return ", ".join(method_names(lambda method: method.trees))


def dynamic_nodes(top_k: object, depth: object) -> int:
    """How many drafts a dynamic tree has where nobody said."""
    sizes = top_k if isinstance(top_k, int) else 1, depth if isinstance(depth, int) else DEPTH
    return min(_MOST_NODES, max(1, sizes[0] * sizes[1]))
