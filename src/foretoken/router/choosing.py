"""One replica for one request, and the reason in a sentence.

A replica that holds the beginning of the prompt saves its prefill; one that has a queue costs its
wait. Where somebody holds a beginning, the request goes where its first token is expected first.
Where nobody does, it goes where all prompts of that beginning go: by rendezvous hashing (Thaler and
Ravishankar 1998), so that they meet, and a replica that leaves moves only its own.

No replica is taken for what it holds whose wait is above `OVERLOAD` times the median one, and none
by its hash whose wait is above `OVERLOAD` times the shortest: a hash saves nothing, and with the
median alone some replicas could stay idle beside a majority that is equally busy.

The order of the views and what was chosen before change nothing. Knows no time: numbers are those
of the views.
"""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from hashlib import blake2b
from statistics import median
from typing import NamedTuple, final

from foretoken.router.prefix_index import PrefixIndex
from foretoken.router.prompt import RoutedPrompt
from foretoken.router.view import Refusal, ReplicaView, RouteNeeds

OVERLOAD = 1.3
"""How many times the median wait a replica may have to be taken for what it holds, and the shortest
wait to be taken by its hash."""
_ANY = RouteNeeds()


class RouteReason(StrEnum):
    """What decided."""

    PREFIX = "prefix"
    """It holds the beginning, and answers first."""
    LOAD = "load"
    """Others hold more of the beginning, but this one answers first."""
    HASH = "hash"
    """Nobody that may be taken for it holds the beginning."""
    NONE = "none"
    """No replica may serve the request."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Route:
    """Where a request goes, and why."""

    replica: ReplicaView | None
    """None: no replica may serve it."""
    reason: RouteReason
    hit_tokens: int = 0
    """Of the prompt, known to be held by the replica."""
    first_token_s: float = 0.0
    """Expected, with what it holds."""
    why: str
    """One sentence with the numbers that decided."""


class _Weighed(NamedTuple):
    """A replica that may serve, with what decides."""

    view: ReplicaView
    hit_tokens: int
    wait_s: float
    """With nothing held."""
    near: bool
    """Its wait is at most `OVERLOAD` median ones."""
    place: int
    """Its rank by rendezvous hashing, 0 for the first."""

    @property
    def taken_tokens(self) -> int:
        """Hit tokens that count for it."""
        return self.hit_tokens if self.near else 0

    @property
    def first_token_s(self) -> float:
        return self.wait_s - self.taken_tokens * self.view.prefill_token_s


def choose(
    prompt: RoutedPrompt,
    views: Sequence[ReplicaView],
    index: PrefixIndex,
    needs: RouteNeeds = _ANY,
) -> Route:
    """The replica for a request.

    The score is hit tokens x seconds to prefill one - seconds of queue; among replicas of different
    speed the prefill of the rest counts too. Equal scores are decided by rendezvous hashing.

    Args:
        prompt: what has to be computed.
        views: one of each replica, in any order.
        index: what they are known to hold; only looked at.
        needs: which of them may serve.
    """
    ids = {view.replica_id for view in views}
    assert len(ids) == len(views), f"{len(views)} views of {len(ids)} replicas"
    able = [view for view in views if needs.allows(view)]
    if not able:
        return Route(replica=None, reason=RouteReason.NONE, why=_why_none(views, needs))
    limit_s = OVERLOAD * median(view.wait_s(prompt.tokens) for view in able)
    weighed = _weigh(prompt, able, index, limit_s)
    if not any(one.taken_tokens for one in weighed):
        limit_s = OVERLOAD * min(one.wait_s for one in weighed)
        best = min((one for one in weighed if one.wait_s <= limit_s), key=lambda one: one.place)
        reason, why = RouteReason.HASH, _why_hash(best, prompt, weighed, limit_s)
    else:
        best = min(weighed, key=lambda one: (one.first_token_s, one.place))
        most = max(weighed, key=lambda one: (one.hit_tokens, one.near, -one.place))
        if best.taken_tokens and best.hit_tokens == most.hit_tokens:
            reason, why = RouteReason.PREFIX, _why_prefix(best, prompt, limit_s)
        else:
            reason, why = RouteReason.LOAD, _why_load(best, most, prompt, limit_s)
    return Route(
        replica=best.view,
        reason=reason,
        hit_tokens=best.hit_tokens,
        first_token_s=best.wait_s - best.hit_tokens * best.view.prefill_token_s,
        why=why,
    )


def rendezvous(key: bytes, replica_ids: Iterable[str]) -> list[str]:
    """The replicas in the order in which a key prefers them: each has a hash with the key, so that
    others come and go without changing their order."""

    def weight(replica_id: str) -> tuple[bytes, str]:
        return blake2b(replica_id.encode(), key=key, digest_size=8).digest(), replica_id

    return sorted(replica_ids, key=weight)


def _weigh(
    prompt: RoutedPrompt, able: Sequence[ReplicaView], index: PrefixIndex, limit_s: float
) -> list[_Weighed]:
    known = index.known(prompt.names)
    order = rendezvous(prompt.key, (view.replica_id for view in able))
    return [
        _Weighed(
            view=view,
            hit_tokens=prompt.hit_tokens(known.get(view.replica_id, 0)),
            wait_s=view.wait_s(prompt.tokens),
            near=view.wait_s(prompt.tokens) <= limit_s,
            place=order.index(view.replica_id),
        )
        for view in able
    ]


def _why_prefix(best: _Weighed, prompt: RoutedPrompt, limit_s: float) -> str:
    saved_s = best.hit_tokens * best.view.prefill_token_s
    return (
        f"replica {best.view.replica_id} holds {best.hit_tokens:,} of {prompt.tokens:,} tokens, "
        f"which saves {saved_s:.3g} s, and its queue takes {best.view.queue_s:.3g} s; without them "
        f"it would take {best.wait_s:.3g} s (at most {limit_s:.3g}, {OVERLOAD} times the median)"
    )


def _why_load(best: _Weighed, most: _Weighed, prompt: RoutedPrompt, limit_s: float) -> str:
    held = (
        f"replica {most.view.replica_id} holds {most.hit_tokens:,} of {prompt.tokens:,} tokens, "
        f"but its queue takes {most.view.queue_s:.3g} s"
    )
    if not most.near:
        held += f" (a wait of {most.wait_s:.3g} s; {OVERLOAD} times the median is {limit_s:.3g})"
    first_s = best.first_token_s
    return f"{held}; replica {best.view.replica_id} answers first, after {first_s:.3g} s"


def _why_hash(
    best: _Weighed, prompt: RoutedPrompt, weighed: Sequence[_Weighed], limit_s: float
) -> str:
    holders = sum(one.hit_tokens > 0 for one in weighed)
    held = (
        f"{holders} that hold some of these {prompt.tokens:,} tokens have too long a wait"
        if holders
        else f"no replica is known to hold the first of these {prompt.tokens:,} tokens"
    )
    passed = f", {best.place} before it wait too long" if best.place else ""
    return (
        f"{held}; by their hash they go to replica {best.view.replica_id}{passed}: its wait of "
        f"{best.wait_s:.3g} s is at most {limit_s:.3g} s, {OVERLOAD} times the shortest"
    )


def _why_none(views: Sequence[ReplicaView], needs: RouteNeeds) -> str:
    if not views:
        return "there is no replica"
    refusals = Counter(needs.refusal(view) for view in views)
    said = ", ".join(f"{refusals[one]} {one}" for one in Refusal if refusals[one])
    return f"none of {len(views)} replicas may serve it: {said}"
