"""Masks of a grammar leave every rule exact, also where drafts break the grammar.

The drafter knows no grammar, so many drafts are forbidden; what is emitted must have the target's
masked distribution all the same. See `tests/property/exact.py` for the false-alarm probability.
"""

import itertools
import math
from typing import Any, cast

import pytest
from torch import Tensor

from foretoken.ops.logits import NEVER
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rows import Rows
from foretoken.types import SamplingParams
from tests.property.exact import LENGTH, VOCAB, assert_fits, simulate
from tests.property.verifying import TableModel


class NoRepeats:
    """A grammar of the same shape as `Grammars`: no token may follow itself."""

    def forbid(self, logits_RV: Tensor, rows: Rows) -> None:
        tokens = [*rows.sequence.token_ids, *rows.drafts]
        end = rows.sequence.num_tokens + rows.first
        for row in range(rows.num_rows):
            history = tokens[: end + row]
            if len(history) > 2 and any(a == b for a, b in itertools.pairwise(history[1:])):
                return  # behind a forbidden draft: never reached
            logits_RV[row, history[-1]] = NEVER

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def masked_probs(model: TableModel, temperature: float) -> dict[tuple[int, ...], float]:
    result = {}
    for outcome in itertools.product(range(VOCAB), repeat=LENGTH):
        weight, history = 1.0, [0, 1]
        for token in outcome:
            logits = model.row(history).tolist()
            logits[history[-1]] = -math.inf
            weights = [math.exp(value / temperature) for value in logits]
            weight *= weights[token] / sum(weights)
            history.append(token)
        result[outcome] = weight
    return result


@pytest.mark.parametrize(
    ("rule", "method", "k"),
    [
        ("auto", "auto", 0), ("standard", "probabilistic", 2), ("standard", "greedy", 2),
        ("matching", "auto", 2), ("block", "probabilistic", 2), ("block", "greedy", 3),
    ],
)  # fmt: skip
def test_tokens_have_the_masked_distribution(rule: str, method: str, k: int) -> None:
    params = SamplingParams(temperature=1.3, structured_outputs={"regex": "stands for any"})
    grammars = cast(Grammars, cast(Any, NoRepeats()))
    counts, model, _ = simulate(params, rule, method, k, 1500, grammars)
    assert_fits(counts, masked_probs(model, 1.3))
