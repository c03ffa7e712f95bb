"""Drafters that rest, catch up in pieces and enter sequences at their middle.

The output must not change, whatever a drafter has seen. What it drafts must be what it would draft
for the window as a text of its own: that shows a stale key, a wrong position or a page that two
requests filled from different places.
"""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.kv_progress import DraftProgress
from foretoken.proposers.kv_proposer import KVProposer
from tests.e2e.heads import HEADS
from tests.e2e.lossless import PRESSURES, asking, open_exact
from tests.marks import slow_but

PAGE = 8
run, plain = asking(12, 40)
DRAFT = {"method": "draft_model", "num_speculative_tokens": 4}
TREES: dict[str, Any] = {"choices": [[0], [0, 0], [0, 1], [1]]}
METHODS: dict[str, dict[str, Any]] = {
    "draft": DRAFT,
    "draft trees": {"method": "draft_model", **TREES},
    "pard": HEADS["pard"],
    "eagle": HEADS["eagle"],
    "eagle3": HEADS["eagle3"],
    "eagle3 trees": {"method": "eagle3", **TREES},
    "peagle": HEADS["peagle"],
    "dflash": HEADS["dflash"],
    "dspark": HEADS["dspark"],
    "dspark trees": {"method": "dspark", **TREES},
}


@pytest.fixture(scope="module")
def folders(folders: dict[str, Path], draft: Path) -> dict[str, Path]:
    trees = {f"{name} trees": folders[name] for name in ("eagle3", "dspark")}
    return folders | trees | dict.fromkeys(("draft", "draft trees"), draft)


class Entering(Proposer):
    """Rests and feeds at random, with windows of random length."""

    name = "entering"

    def __init__(self, kept: KVProposer, seed: int, *, audits: bool) -> None:
        self.kept, self._draw, self._audits = kept, random.Random(seed), audits
        self.num_fed = self.num_entered = self.num_compared = 0

    def propose(self, context: Context) -> Draft:
        draw, kept = self._draw, self.kept
        decoding = [span for span in context.spans if span.samples and span.draft_budget]
        fed = [span.sequence for span in decoding if draw.random() < 0.3]
        window = draw.choice((None, 5, 9, 17, 40))
        rows = draw.choice((1, 5, 16, 100))
        missing = [kept.num_missing(sequence) for sequence in fed]
        count = kept.feed(fed, rows, window)
        assert count <= sum(min(rows, n) for n in missing)
        self.num_fed += count
        spans = tuple(
            replace(span, draft_budget=0) if draw.random() < 0.6 else span for span in context.spans
        )
        found = kept.propose(Context(spans))
        self.num_entered += sum(kept.progress.seen(s.sequence) is not s.sequence for s in decoding)
        if self._audits:
            self.compare(Context(spans), found)
        return found

    def compare(self, context: Context, found: Draft) -> None:
        """With a drafter for which every window is a whole sequence that it sees for the first
        time."""
        kept, book = self.kept, self.kept.progress
        fresh = KVProposer(
            kept.name,
            kept.network,
            replace(kept.drafting, confidence=None),
            DraftProgress(book._generations, PAGE, book.limits, made_of=book.made_of),
        )
        spans = [
            replace(span, sequence=book.seen(span.sequence), draft_budget=span.draft_budget)
            for span in context.spans
        ]
        expected = fresh.propose(Context(tuple(spans)))
        assert found.ids == expected.ids
        assert found.parents == expected.parents
        self.num_compared += sum(bool(ids) for ids in found.ids)

    def release(self, request_id: str) -> None:
        self.kept.release(request_id)


def entering(llm: LLM, seed: int, *, audits: bool) -> Entering:
    parts = llm._engine.parts
    [member] = parts.proposer.members.values()  # type: ignore[attr-defined]
    assert isinstance(member.proposer, KVProposer)
    proposer = Entering(member.proposer, seed, audits=audits)
    object.__setattr__(parts, "proposer", proposer)
    return proposer


@pytest.mark.parametrize("pressure", slow_but(["calm", "chunks", "shortage"], "shortage"))
@pytest.mark.parametrize("name", slow_but(METHODS, *list(METHODS)[::2]))
def test_entering_anywhere_changes_no_token(
    name: str, pressure: str, model: Path, folders: dict[str, Path], plain: Any
) -> None:
    """Twice, so that the second time finds prefixes whose pages were entered. Short of pages, the
    target leaves little memory to drafters."""
    config = {**METHODS[name], "model": str(folders[name])}
    with open_exact(model, config, **{"block_size": PAGE, **PRESSURES[pressure]}) as llm:
        proposer = entering(llm, seed=4, audits=False)
        for parameters in ("greedy", "seeded", "filters", "greedy"):
            assert run(llm, parameters) == plain(parameters), parameters
    assert proposer.num_fed > (10 if pressure == "shortage" else 100)
    assert proposer.num_entered > 20 or pressure == "shortage"


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_a_window_is_drafted_for_as_a_text_of_its_own(
    name: str, model: Path, folders: dict[str, Path]
) -> None:
    """Of heads, the last slot of a page depends on the token after it, which need not be the same
    to all that share the page: they are compared without prefix hits."""
    settings = {"block_size": PAGE, **PRESSURES["calm"]}
    settings["enable_prefix_caching"] = METHODS[name]["method"] == "draft_model"
    config = {**METHODS[name], "model": str(folders[name])}
    with open_exact(model, config, **settings) as llm:
        proposer = entering(llm, seed=5, audits=True)
        for _ in range(3):
            run(llm, "greedy")
    assert proposer.num_compared > 100 and proposer.num_entered > 20
