"""A/Bs of servers of whose steps a known share drafts, for the tests of break-even."""

from dataclasses import dataclass

import numpy as np

from foretoken.lab.analysis.summary import ArmData, compute_gains, summarize_arm
from foretoken.lab.measure.experiment import ServiceLevels
from foretoken.lab.records.results import AbSummary, RequestAcceptance, RequestRecord, ServerInfo

NAMES = ("off", "on")


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftingLaw:
    """What is true; costs in plain steps."""

    share: float
    """Of the steps that draft."""
    rate: float = 0.6
    k: int = 4
    verify_cost: float = 1.2
    draft_cost: float = 0.02
    plain_s: float = 0.01
    noise: float = 0.02
    """Of a step; and of a start of either server."""
    uneven: bool = False
    """Whether half the requests, which are three times as long, draft twice as often."""

    @property
    def break_even(self) -> float:
        """The acceptance at which drafting takes as long as not drafting."""
        return (self.verify_cost + self.k * self.draft_cost - 1) / self.k

    def speedup(self) -> float:
        """By whole time."""
        shares = 1 + self.share * self.k * self.rate
        return shares / (1 + self.share * self.k * self.break_even)


def draw(
    law: DraftingLaw, seed: int = 0, *, blocks: int = 8, requests: int = 20, tokens: int = 100
) -> list[RequestRecord]:
    """Both arms' answers to the same requests, one after the other."""
    rng = np.random.default_rng(seed)
    found = []
    for block in range(blocks):
        paces = np.exp(rng.normal(0.0, law.noise, 2))
        for index in range(requests):
            long = law.uneven and index % 2 == 1
            chance = min(1.0, law.share * (2 if long else 0.25)) if law.uneven else law.share
            size = tokens * (3 if long else 1)
            # Steps that give `size` tokens or a few more, as a server's last verification does.
            drafts_S = rng.random(size) < chance
            accepted_S = np.where(drafts_S, rng.binomial(law.k, law.rate, size), 0)
            last = int(np.searchsorted(np.cumsum(1 + accepted_S), size))
            drafts_S, accepted_S = drafts_S[: last + 1], accepted_S[: last + 1]
            whole = int((1 + accepted_S).sum())
            on_S = 1 + drafts_S * law.k * law.break_even
            for name, pace, steps_S in zip(NAMES, paces, (np.ones(whole), on_S), strict=True):
                noisy_S = steps_S * np.exp(rng.normal(0.0, law.noise, steps_S.size))
                own = (drafts_S, accepted_S) if name == "on" else None
                seconds_S = law.plain_s * pace * noisy_S
                found.append(_record(law, own, seconds_S, (name, block, index, whole)))
    return found


def _record(
    law: DraftingLaw,
    drafts: tuple[np.ndarray, np.ndarray] | None,
    seconds_S: np.ndarray,
    place: tuple[str, int, int, int],
) -> RequestRecord:
    name, block, index, whole = place
    start = 10.0 * index
    times = (start + 0.1 + np.concatenate([[0.0], np.cumsum(seconds_S)])).tolist()
    acceptance = None
    if drafts is not None:
        drafts_S, accepted_S = drafts
        steps = int(drafts_S.sum())
        acceptance = RequestAcceptance(
            source="body",
            num_drafted=law.k * steps,
            num_accepted=int(accepted_S.sum()),
            num_steps=steps,
            histogram=tuple(np.bincount(accepted_S[drafts_S], minlength=law.k + 1).tolist()),
        )
    return RequestRecord(
        index=index, arm=name, block=block, temperature=0.0, scheduled_s=start, sent_s=start,
        first_s=times[0], last_s=times[-1], end_s=times[-1], chunk_s=tuple(times),
        output_tokens=1 + whole, acceptance=acceptance,
    )  # fmt: skip


def ab_of(records: list[RequestRecord]) -> AbSummary:
    """The summary of such an A/B."""
    data = [
        ArmData(
            arm=name,
            server=ServerInfo(url="http://127.0.0.1:8000", engine="mock", command="mock"),
            seconds_of_block=dict.fromkeys({r.block for r in records}, 100.0),
            counters={},
            gauges={},
        )
        for name in NAMES
    ]
    return AbSummary(
        baseline="off",
        candidate="on",
        arms=tuple(summarize_arm(records, own, ServiceLevels()) for own in data),
        gains=compute_gains(records, (data[0], data[1]), ServiceLevels()),
    )
