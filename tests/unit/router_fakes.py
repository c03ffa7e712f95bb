"""Replicas and prompts for tests of the router."""

from collections.abc import Sequence
from typing import Any

from foretoken.router.prefix_index import PrefixIndex
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.view import ReplicaView
from foretoken.types.fingerprint import Fingerprint

PAGE = 4
HERE = Fingerprint("1.0", "int8", "avx512 x2")


def view(replica_id: str, **given: Any) -> ReplicaView:
    """A replica at 10 ms a prompt token, idle unless said otherwise."""
    given = {"fingerprint": HERE, "prefill_token_s": 0.01, **given}
    return ReplicaView(replica_id=replica_id, **given)


def prompt(token_ids: Sequence[int], salt: str | None = None) -> RoutedPrompt:
    return RoutedPrompt.of(token_ids, salt, page_size=PAGE)


def index_of(*replica_ids: str, most_pages: int = 100) -> PrefixIndex:
    index = PrefixIndex(most_pages)
    for replica_id in replica_ids:
        index.add(replica_id)
    return index
