"""One step as the planner sees it: what each sequence may draft, what that would cost and bring.

Made of the models' answers for the sequences of one step; asked once for the best plan, or for the
plan of a trial. Knows neither how the models learn nor what comes of the plan.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Seq
from dataclasses import dataclass, replace
from typing import NamedTuple, final

import numpy as np
from numpy.typing import NDArray

from foretoken.control.adaptive.allocation import (
    MARGIN,
    Allocation,
    Counts,
    DraftOption,
    Search,
    StepOptions,
    accepted_drafts,
    allocate,
)
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.drafter_cost import DrafterCost
from foretoken.control.learned.regression import Floats
from foretoken.control.report.explain import Outlook

RETURNS = 1.25
"""Times what catching up takes that it has to bring."""
_AT_ONCE = 1.0 / 8.0
"""Share of what is left to lose that one step may take."""
_KNOWN = 0.75
"""A sequence whose drafts may well have this part of their chance, but hardly less, is known: what
it still loses is bad luck."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterView:
    """One drafter and the sequences of one step. N sequences."""

    name: str
    max_drafts: int
    cost: DrafterCost
    max_drafts_N: Counts
    """Most drafts of each sequence."""
    missing_N: Counts
    """Tokens of each that the drafter has to read, beyond those of the last step."""
    windowed_N: NDArray[np.bool_]
    """Whether those are only the latest of all that it has not read."""


class OutputTokens(NamedTuple):
    """Tokens of each sequence, [N]."""

    left_N: Floats
    """That it is still expected to write."""
    total_N: Floats
    """The same with those that it has written."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class AllocationInputs:
    """The sequences of one step. N of them."""

    ids: list[str]
    classes: list[str]
    """The class of each, [N]."""
    context: float
    """Tokens of a sequence, on average."""
    outputs: OutputTokens
    left_s: Floats
    """Seconds by which each may be slower than plain steps in all that is to come, [N]."""
    plain_s: float
    """Of the step without drafts and without prompts."""
    prompt_s: float
    """What prompts add to it."""
    rows_s: Floats
    """Seconds of the target's step with 0, 1, ... more rows, those of prompts aside."""
    acceptance: LearnedAcceptance
    margin: float = MARGIN
    """What drafting has to bring beyond not drafting, as a share."""
    search: Search = allocate

    @property
    def bound_s(self) -> Floats:
        """Seconds that the step may take if a sequence gets one token, [N]."""
        return self.plain_s + _AT_ONCE * self.left_s

    def options(self, views: Seq[DrafterView]) -> list[DraftOption]:
        """What these drafters could do; those that may draft for nobody are left out."""
        allowed = [view for view in views if view.max_drafts_N.any()]
        most = max((view.max_drafts for view in allowed), default=0)
        return [self._option(view, most) for view in allowed]

    def without(self, options: Seq[DraftOption], waiting: Mapping[int, str]) -> list[DraftOption]:
        """The options without drafts of the drafters for which sequences wait, by their place."""
        found = []
        for option in options:
            places = [place for place, name in waiting.items() if name == option.name]
            found.append(option.without(places) if places else option)
        return found

    def best(self, options: Seq[DraftOption]) -> Allocation:
        """The plan with most expected tokens per second. Nobody is read who ends too soon."""
        options = [
            option if option.late_N is None else option.without(option.late_N) for option in options
        ]
        step = StepOptions(
            rows_s=self.rows_s,
            plain_s=self.plain_s,
            bound_s=self.bound_s,
            token_s=np.full(len(self.ids), self.plain_s),
            margin=self.margin,
        )
        found = self.search(step, options)
        if len(self.ids) == 1 or not found.lengths_N.any():
            # Whoever is alone waits for its own drafts only.
            return found
        return self._without_bad_luck(step, options, found)

    def _without_bad_luck(
        self, step: StepOptions, options: Seq[DraftOption], found: Allocation
    ) -> Allocation:
        """A plan by a step of which nobody loses more than it may, though its drafts be as poor as
        they may well be: where requests of a class differ much, what is expected of a new one is
        true of none of them."""
        chosen = set(found.drafter_N.tolist())
        poor = [
            self._poor(option) if index in chosen else option
            for index, option in enumerate(options)
        ]
        accepted_N, poor_N = accepted_drafts(found, options), accepted_drafts(found, poor)
        risky_N = (poor_N < accepted_N) & (self.bound_s + self.plain_s * poor_N < found.seconds)
        if not risky_N.any():
            return found
        poor_s = self.plain_s * poor_N / np.maximum(accepted_N, 1e-9)
        token_s = np.where(risky_N, poor_s, self.plain_s)
        careful = self.search(replace(step, token_s=token_s), options)
        return replace(careful, unguarded=max(found.unguarded, careful.unguarded))

    def _poor(self, option: DraftOption) -> DraftOption:
        """The same where the drafts of all who are in doubt are as poor as they may well be."""
        doubt_N = self.acceptance.doubt(self.ids, option.name)
        doubt_N[doubt_N >= _KNOWN] = 1.0
        depths_K = np.arange(1, option.survival_NK.shape[1] + 1)
        survival_NK = option.survival_NK * doubt_N[:, None] ** depths_K
        return replace(option, survival_NK=survival_NK)

    def could_pay(self, option: DraftOption, chance: float) -> bool:
        """Whether the option would bring anything if each of its drafts had this chance: for one of
        the sequences or for all, each with as many drafts."""
        slots_K = (option.survival_NK > 0.0).sum(axis=0)
        passes_K = np.arange(1, 1 + len(slots_K))
        tokens_K = chance**passes_K
        for each_K in (slots_K > 0, slots_K):
            rows_K = np.cumsum(each_K)
            accepted_K = np.cumsum(tokens_K * each_K)
            seconds_K = self.rows_s[rows_K] + option.depth_s[passes_K] + option.slot_s * rows_K
            seconds_K = seconds_K + option.each_s * each_K[0]
            if ((1.0 + accepted_K / len(self.ids)) * self.plain_s > seconds_K).any():
                return True
        return False

    def pays_if_rows_are_free(self, option: DraftOption) -> bool:
        """Whether a draft for each sequence would bring anything if checking it took nothing: what
        drafts are believed to cost may be what keeps them from being made."""
        slots_s = (option.slot_s + option.each_s) * len(self.ids)
        seconds = self.plain_s + option.depth_s[1] + slots_s
        tokens = 1.0 + float(option.survival_NK[:, 0].mean())
        return bool(tokens * self.plain_s > seconds)

    def trial(self, option: DraftOption, indices: Counts, most: int) -> Allocation:
        """These sequences draft up to `most`, whatever is expected of it."""
        count = len(self.ids)
        allowed = (option.survival_NK[indices, :most] > 0.0).sum(axis=1)
        lengths_N, drafter_N = np.zeros(count, np.int64), np.full(count, -1)
        lengths_N[indices], drafter_N[indices] = allowed, 0
        rows, depth = int(allowed.sum()), int(allowed.max())
        seconds = self.rows_s[rows] + option.depth_s[depth] + option.slot_s * rows
        seconds += option.each_s * len(indices)
        tokens = count + float(option.survival_NK[indices, :most].sum())
        return Allocation(
            lengths_N=lengths_N, drafter_N=drafter_N, seconds=float(seconds),
            tokens=tokens, unguarded=0.0,
        )  # fmt: skip

    def outlook(self, option: DraftOption) -> Outlook:
        """What a drafter's best length would come to if all sequences had it."""
        count, slots_NK = len(self.ids), option.survival_NK > 0.0
        tokens_K = count + np.cumsum(option.survival_NK.sum(axis=0))
        rows_K = np.cumsum(slots_NK.sum(axis=0))
        seconds_K = self.rows_s[rows_K] + option.depth_s[1 : len(rows_K) + 1]
        seconds_K = seconds_K + option.slot_s * rows_K
        seconds_K = seconds_K + float(option.start_s.sum())
        best = int(np.argmax(tokens_K / seconds_K))
        return Outlook(
            drafts=float(rows_K[best]) / max(int(slots_NK[:, 0].sum()), 1),
            tokens=float(tokens_K[best]) / count,
            plain_steps=float(seconds_K[best]) / self.plain_s,
        )

    def row_s(self, rows: int) -> float:
        """Seconds that one more row adds beside `rows` more than there are sequences."""
        last = len(self.rows_s) - 1
        start = min(rows, max(last - 4, 0))
        end = min(start + 4, last)
        return float(self.rows_s[end] - self.rows_s[start]) / max(end - start, 1)

    def free_rows(self, found: Allocation) -> int:
        """Rows beside those of the plan that nobody is made slower by beyond what is allowed."""
        taken = int(found.lengths_N.sum())
        if len(self.ids) == 1:
            # It waits for nobody's drafts but its own, and those have to pay in any case.
            return len(self.rows_s) - 1 - taken
        slack = float(self.bound_s.min()) - found.seconds
        spare = self.rows_s[taken:] - self.rows_s[taken]
        return max(int(np.searchsorted(spare, max(slack, 0.0), side="right")) - 1, 0)

    def _option(self, view: DrafterView, most: int) -> DraftOption:
        """One drafter's option, as wide as that with the most drafts."""
        count = len(self.ids)
        survival: Floats = np.zeros((count, most))
        chances = self.acceptance.chances(self.ids, view.name, view.max_drafts)
        np.cumprod(chances, axis=1, out=survival[:, : chances.shape[1]])
        survival[np.arange(most) >= view.max_drafts_N[:, None]] = 0.0
        # What a slot adds, on average up to those of the whole batch.
        batch, each_s = max(count, 2), view.cost.sequence_s
        one = view.cost.drafting(1, most, self.context)
        more_s = view.cost.drafting(batch, most, self.context)[most] - one[most]
        slot_s = max(float(more_s) / (batch - 1) - each_s, 0.0) / most
        depth_s = one - each_s - slot_s * np.arange(most + 1)
        depth_s[0] = 0.0
        catching_s = RETURNS * view.cost.feeding_each(view.missing_N, self.context)
        steps_N = np.maximum(self.outputs.left_N / (1.0 + survival[:, 0]), 1.0)
        late_N = None
        if count > 1:
            # Whoever comes after these is read at the beginning and drafts to the end: that is what
            # going on costs, and beginning is paid once. But a sequence that ends before what is
            # read of it comes back stays plain.
            late_N = catching_s > survival[:, 0] * (self.plain_s / count) * steps_N
            steps_N = np.maximum(self.outputs.total_N / (1.0 + survival[:, 0]), 1.0)
            late_N = late_N if late_N.any() else None
        start_s = each_s + catching_s / steps_N
        return DraftOption(
            name=view.name,
            survival_NK=survival,
            depth_s=np.maximum(depth_s, 0.0),
            slot_s=slot_s,
            start_s=start_s,
            each_s=each_s,
            late_N=late_N,
        )
