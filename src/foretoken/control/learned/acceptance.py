"""The acceptance of drafts as it is learnt from what requests show, by depth.

Owns the chances that each drafter's drafts have for each running request. A request is judged by
its own trials and, while those are few, by its class: requests that share a drafter, a range of
temperatures, a cache salt and a grammar. Knows neither tokens nor seconds. Invariants: a draft that
was not reached is no trial, and everything depends on past steps alone.
"""

from array import array
from collections.abc import Mapping, Sequence
from math import inf, log
from typing import Any, final

import numpy as np
from numpy.typing import NDArray

from foretoken.control.learned.classes import (
    CLASS_WEIGHT,
    LEAST,
    AcceptanceClass,
    DrafterAcceptance,
    RequestTrack,
)
from foretoken.control.learned.lengths import MOST_CLASSES
from foretoken.control.learned.spread import likely_part
from foretoken.control.learned.trials import (
    BUCKET_OF_DEPTH,
    BUCKETS,
    BucketTrials,
    NumberRows,
    chances_by_bucket,
    chances_of_rows,
    trials_of_draft,
)

_RISE_LIMIT = 2.5
"""A class rose when that explains the trials of a resting drafter so much better, in nats."""
_SURPRISE = 0.06
"""What is likelier or less likely than this counts as if it were not: two surprises alone prove
nothing."""
_KEEPS_REST = 0.9995
"""What a class showed is multiplied by at each step in which a drafter rests."""
_KEEPS_STEP = 0.99
"""What a request showed is multiplied by at each step without a draft."""
_STALE = 32.0
"""A class's chances are worked out again after one new trial to so many old ones."""
_FEW = 8
"""Up to so many requests, plain arithmetic is faster than arrays."""
_LOG_2 = log(2.0)


@final
class LearnedAcceptance:
    """Hazards by depth for each request and drafter, censored where a draft ended.

    A draft of d tokens of which a are accepted is a success at depths 1 to a, a failure at a + 1 if
    a < d, and says nothing beyond. Trials fade. That a class rose is noticed in the trials of a
    resting drafter by a cumulative sum (Page 1954) of log-likelihood ratios against half the chance
    of failure.
    """

    def __init__(self, priors: Mapping[str, float]) -> None:
        """For each drafter by name the usual chance that its first draft is accepted."""
        self._priors = dict(priors)
        self._rows = NumberRows()
        self._nothing = self._rows.take()
        self._rows.cells[self._nothing + 2 * BUCKETS] = 1.0
        self._class_keys: dict[str, str] = {}
        self._drafters: dict[str, DrafterAcceptance] = {}

    def begin(self, request_id: str, class_key: str) -> None:
        """Learn of this request from now on, until it is released. The key names what requests have
        in common that accept alike: range of temperatures, cache salt, grammar."""
        self._class_keys.setdefault(request_id, class_key)

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine. What it taught its class stays."""
        self._class_keys.pop(request_id, None)
        for drafter in self._drafters.values():
            track = drafter.tracks.pop(request_id, None)
            if track is not None:
                own, cells = track.own_class, self._rows.cells
                own.members -= 1
                chance = cells[self._refreshed(own)]
                own.spread.add(cells[track.row], cells[track.row + BUCKETS], chance)
                self._rows.give_back(track.row)

    def chances(
        self, request_ids: Sequence[str], drafter: str, max_drafts: int
    ) -> NDArray[np.float64]:
        """[N, max_drafts]: the chance of draft j of request i, if all before it are accepted."""
        assert max_drafts <= len(BUCKET_OF_DEPTH), (max_drafts, len(BUCKET_OF_DEPTH))
        owner = self._owner(drafter)
        buckets = BUCKET_OF_DEPTH[:max_drafts]
        if len(request_ids) <= _FEW:
            few = [self._few(owner, request_id) for request_id in request_ids]
            return np.array(few, np.float64).reshape(-1, BUCKETS)[:, buckets]
        tracks = owner.tracks
        rows, parents = [], []
        for request_id in request_ids:
            track = tracks.get(request_id)
            if track is None:
                rows.append(self._nothing)
                parents.append(self._refreshed(self._class(owner, request_id)))
            else:
                rows.append(track.row)
                own = track.own_class
                parents.append(own.row if own.new == 0.0 else self._refreshed(own))
        own_rows = self._rows.read(rows)
        prior = self._rows.read(parents)[:, :BUCKETS]
        accepted, trials = own_rows[:, :BUCKETS], own_rows[:, BUCKETS : 2 * BUCKETS]
        weight = own_rows[:, 2 * BUCKETS : 2 * BUCKETS + 1]
        return chances_of_rows(accepted, trials, prior, weight)[:, buckets]

    def doubt(self, request_ids: Sequence[str], drafter: str) -> NDArray[np.float64]:
        """[N]: the part of its chance of a first draft that each request may well have instead: one
        standard deviation less. 1 where nothing is in doubt."""
        owner, chances = self._owner(drafter), self.chances(request_ids, drafter, 1)[:, 0]
        return likely_part(chances, [self._known(owner, one) for one in request_ids])

    def _known(self, owner: DrafterAcceptance, request_id: str) -> float:
        """Trials that a request's chance rests on, with those that its class counts for."""
        track, cells = owner.tracks.get(request_id), self._rows.cells
        if track is None:
            return self._class(owner, request_id).spread.weight
        return cells[track.row + BUCKETS] + cells[track.row + 2 * BUCKETS]

    def observe(self, request_id: str, drafter: str, num_drafted: int, num_accepted: int) -> None:
        """What became of a chain; nothing is learnt of requests that were not begun."""
        owner = self._drafters.get(drafter)
        track = owner.tracks.get(request_id) if owner is not None else None
        if track is None:
            track = self._begun(drafter, request_id)
            if track is None:
                return
        self._add(track, trials_of_draft(num_drafted, num_accepted))

    def observe_trial(
        self, request_id: str, drafter: str, num_drafted: int, num_accepted: int
    ) -> None:
        """The same of a draft that was made to find out, while the drafter is not used.

        Trials are few, and what a class showed before is much. So they are also held against it,
        by Page's test: if the class rose, it begins anew with the trials that say so.
        """
        track = self._begun(drafter, request_id)
        if track is None:
            return
        chances = self._few(self._owner(drafter), request_id)
        pieces, own = trials_of_draft(num_drafted, num_accepted), track.own_class
        for bucket, accepted, refused, *_ in pieces:
            usual = max(chances[bucket], _SURPRISE)
            own.rise += accepted * log((1.0 + usual) / (2.0 * usual)) - refused * _LOG_2
        own.rise = max(own.rise, 0.0)
        own.rise_trials = [*own.rise_trials, pieces] if own.rise else []
        self.observe(request_id, drafter, num_drafted, num_accepted)
        if own.rise > _RISE_LIMIT:
            self._begin_anew(drafter, own)

    def rises(self, class_keys: Sequence[str], drafter: str) -> list[float]:
        """How much the trials of each class speak for better chances than it had, in nats. Classes
        outlive their requests."""
        known = self._classes(drafter, class_keys)
        return [known[key].rise for key in class_keys]

    def seen(self, class_keys: Sequence[str], drafter: str) -> int:
        """Drafts that are known of that of these classes of which fewest are. Classes outlive their
        requests."""
        known = self._classes(drafter, class_keys)
        return min(one.num_seen for one in known.values())

    def fade(self, request_ids: Sequence[str], drafter: str, steps: int) -> None:
        """These requests had no draft of it for so many steps: what they showed grows old."""
        owner = self._drafters.get(drafter)
        kept, cells = _KEEPS_STEP**steps, self._rows.cells
        for track in map(owner.tracks.get, request_ids) if owner else ():
            if track is not None:
                for at in range(track.row, track.row + 2 * BUCKETS):
                    cells[at] *= kept

    def rest(self, drafter: str, steps: int) -> None:
        """Nobody had a draft of it: classes' numbers grow old, so that it is tried one day."""
        owner = self._drafters.get(drafter)
        kept = _KEEPS_REST**steps
        for one in () if owner is None else owner.classes.values():
            one.accepted = [kept * count for count in one.accepted]
            one.trials = [kept * count for count in one.trials]
            one.new = inf

    def describe(self) -> dict[str, dict[str, dict[str, Any]]]:
        """For each drafter and class: chances at depths 1, 2, 3-4, 5-8 and beyond, trials, running
        requests, and how many trials the class counts for beside a request's own."""
        return {
            name: {
                key: {
                    "chances": [round(chance, 3) for chance in self._class_chances(one)],
                    "trials": [round(count, 1) for count in one.trials],
                    "requests": one.members,
                    "weight": round(one.spread.weight, 1),
                }
                for key, one in list(owner.classes.items())
            }
            for name, owner in list(self._drafters.items())
        }

    def _owner(self, drafter: str) -> DrafterAcceptance:
        owner = self._drafters.get(drafter)
        if owner is None:
            usual = min(max(self._priors.get(drafter, 0.5), LEAST), 1.0 - LEAST)
            owner = self._drafters[drafter] = DrafterAcceptance(usual)
        return owner

    def _begun(self, drafter: str, request_id: str) -> RequestTrack | None:
        """The request's track, made when it is needed first."""
        owner = self._owner(drafter)
        track = owner.tracks.get(request_id)
        if track is None and request_id in self._class_keys:
            own_class = self._class(owner, request_id)
            track = owner.tracks[request_id] = RequestTrack(self._rows.take(), own_class)
            self._rows.cells[track.row + 2 * BUCKETS] = own_class.spread.weight
            own_class.members += 1
        return track

    def _class(self, owner: DrafterAcceptance, request_id: str) -> AcceptanceClass:
        return self._of_key(owner, self._class_keys.get(request_id, ""))

    def _of_key(self, owner: DrafterAcceptance, key: str) -> AcceptanceClass:
        found = owner.classes.pop(key, None)
        if found is None:
            if len(owner.classes) >= MOST_CLASSES:
                self._forget_class(owner)
            found = AcceptanceClass(self._rows.take(), owner.prior())
        owner.classes[key] = found  # the classes used last stand last
        return found

    def _classes(self, drafter: str, class_keys: Sequence[str]) -> dict[str, AcceptanceClass]:
        """The classes of these keys; one that several name is looked up once."""
        owner = self._owner(drafter)
        return {key: self._of_key(owner, key) for key in dict.fromkeys(class_keys)}

    def _forget_class(self, owner: DrafterAcceptance) -> None:
        for key, one in owner.classes.items():
            if not one.members:
                self._rows.give_back(owner.classes.pop(key).row)
                return

    def _few(self, owner: DrafterAcceptance, request_id: str) -> list[float]:
        track = owner.tracks.get(request_id)
        one = self._class(owner, request_id) if track is None else track.own_class
        parent, cells = self._refreshed(one), self._rows.cells
        prior = cells[parent : parent + BUCKETS]
        if track is None:
            return prior.tolist()
        row = track.row
        accepted = cells[row : row + BUCKETS]
        trials = cells[row + BUCKETS : row + 2 * BUCKETS]
        return chances_by_bucket(accepted, trials, prior, cells[row + 2 * BUCKETS])

    def _refreshed(self, one: AcceptanceClass) -> int:
        """The class's row, its chances up to date."""
        if one.new and one.new * _STALE >= sum(one.trials):
            chances = array("d", self._class_chances(one))
            self._rows.cells[one.row : one.row + BUCKETS] = chances
            one.new = 0.0
        return one.row

    def _class_chances(self, one: AcceptanceClass) -> list[float]:
        chances = chances_by_bucket(one.accepted, one.trials, one.prior, CLASS_WEIGHT)
        return [min(max(chance, LEAST), 1.0 - LEAST) for chance in chances]

    def _add(self, track: RequestTrack, pieces: tuple[BucketTrials, ...]) -> None:
        """One draft's trials, for the request and its class."""
        cells, row, own = self._rows.cells, track.row, track.own_class
        class_accepted, class_trials = own.accepted, own.trials
        for bucket, accepted, refused, fade, new_accepted, new_trials, class_fade in pieces:
            at = row + bucket
            cells[at] = fade * cells[at] + new_accepted
            cells[at + BUCKETS] = fade * cells[at + BUCKETS] + new_trials
            class_accepted[bucket] = class_fade * class_accepted[bucket] + accepted
            class_trials[bucket] = class_fade * class_trials[bucket] + accepted + refused
            own.new += accepted + refused
        own.num_seen += 1

    def _begin_anew(self, drafter: str, own: AcceptanceClass) -> None:
        """The class rose: it is what its latest trials say, and so are its requests."""
        own.accepted, own.trials = [0.0] * BUCKETS, [0.0] * BUCKETS
        for pieces in own.rise_trials:
            for bucket, accepted, refused, *_ in pieces:
                own.accepted[bucket] += accepted
                own.trials[bucket] += accepted + refused
        cells = self._rows.cells
        for track in self._drafters[drafter].tracks.values():
            if track.own_class is own:
                row = track.row
                cells[row : row + 2 * BUCKETS] = array("d", [0.0] * (2 * BUCKETS))
                cells[row + 2 * BUCKETS] = own.spread.weight
        own.rise, own.rise_trials, own.new = 0.0, [], inf
        own.num_seen = 0
