"""What plans believe of a drafter's time is what was learnt of it."""

import numpy as np
import pytest

from foretoken.control.adaptive.scene import DrafterView, OutputTokens, Scene
from foretoken.control.learned.acceptance import LearnedAcceptance
from foretoken.control.learned.drafter_cost import DrafterCost, DraftShape

SHAPES = [DraftShape(n, p, n * p, 0.0) for n in (1, 2, 4, 8, 16) for p in (1, 2, 4)]


def planted(shape: DraftShape) -> float:
    """Seconds of drafting; a sequence takes some once, whatever its drafts."""
    return 0.2 + 0.15 * shape.sequences + 0.1 * shape.passes + 0.02 * shape.rows


@pytest.mark.parametrize("length", [1, 2, 4])
@pytest.mark.parametrize("count", [1, 4, 8])
def test_every_length_is_priced_as_it_was_learnt(count: int, length: int) -> None:
    cost = DrafterCost([(shape, planted(shape)) for shape in SHAPES], sd=0.05)
    none = np.zeros(count, dtype=np.int64)
    view = DrafterView(
        name="draft", cost=cost, most=4, most_N=np.full(count, 4), missing_N=none,
        windowed_N=none.astype(bool),
    )  # fmt: skip
    tokens_N = np.full(count, 100.0)
    acceptance = LearnedAcceptance({"draft": 0.6})
    ids = [str(place) for place in range(count)]
    for request_id in ids:
        acceptance.begin(request_id, "")
    scene = Scene(
        ids=ids, classes=[""] * count, context=0.0, outputs=OutputTokens(tokens_N, tokens_N),
        left_s=np.zeros(count), plain_s=1.0, prompt_s=0.0,
        rows_s=np.full(4 * count + 1, 1.0), acceptance=acceptance,
    )  # fmt: skip
    [option] = scene.options([view])
    priced = option.depth_s[length] + option.slot_s * count * length + option.start_s.sum()
    shape = DraftShape(count, length, count * length, 0.0)
    assert priced == pytest.approx(planted(shape), rel=0.02)
