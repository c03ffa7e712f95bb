"""Promise 1: the same tokens with and without speculation, whatever the method, the parameters,
the batch, the chunking, the preemption and the prefix hits.

The guarded bug is any dependence of a token on how many rows were computed with it, or on
randomness consumed in another order. There is no tolerance: ids and logprobs must be equal.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.lossless import (
    COMPOSED,
    METHODS,
    PARAMETERS,
    PRESSURES,
    SOME_PARAMETERS,
    Result,
    counted,
    generate,
    make_prompts,
    open_llm,
    replay,
)
from tests.marks import slow_but

TOKENS = 48
QUICK, FULL = 21, 210


class Reference:
    def __init__(self, model: Path) -> None:
        self._llm = open_llm(model, None, "plain", **PRESSURES["one at a time"])
        self._known: dict[tuple[str, int], list[Result]] = {}

    def results(self, parameters: str, count: int) -> list[Result]:
        key = (parameters, count)
        if key not in self._known:
            chosen = {"max_tokens": TOKENS, **PARAMETERS[parameters]}
            self._known[key] = generate(self._llm, make_prompts(count, 3), chosen)
        return self._known[key]


@pytest.fixture(scope="module")
def reference(model: Path) -> Iterator[Reference]:
    yield Reference(model)


def _compare(reference: Reference, llm: object, parameters: str, count: int) -> int:
    from foretoken import LLM

    assert isinstance(llm, LLM)
    expected = reference.results(parameters, count)
    chosen = {"max_tokens": TOKENS, **PARAMETERS[parameters]}
    found = generate(llm, make_prompts(count, 3), chosen)
    assert found == expected
    return sum(len(result.token_ids) for result in found)


EVERY = (
    "junk", "ngram", "suffix", "draft auto", "draft probabilistic", "first",
)  # fmt: skip


@pytest.mark.parametrize("method", slow_but(["plain", "junk", *METHODS], *EVERY))
def test_every_parameter_set(method: str, model: Path, draft: Path, reference: Reference) -> None:
    """Each method under each parameter set, all requests in one batch: identical."""
    with open_llm(model, draft, method, **PRESSURES["calm"]) as llm:
        for parameters in SOME_PARAMETERS if method in COMPOSED else PARAMETERS:
            count = _compare(reference, llm, parameters, QUICK)
            assert count >= 250, (parameters, count)


@pytest.mark.parametrize("pressure", [name for name in PRESSURES if name != "calm"])
@pytest.mark.parametrize(
    "method", slow_but(["plain", "junk", "ngram", "suffix", "draft auto"], "junk", "draft auto")
)
def test_every_pressure(
    method: str, pressure: str, model: Path, draft: Path, reference: Reference
) -> None:
    """Chunked prefill, page shortage with preemption, prefix hits on a second run: identical. Calm
    runs are those of every parameter set, whose prompts are the same."""
    with open_llm(model, draft, method, **PRESSURES[pressure]) as llm:
        for parameters in ("seeded", "logprobs"):
            for _ in range(1 if pressure == "one at a time" else 2):
                _compare(reference, llm, parameters, QUICK)


def test_shortage_preempts(model: Path) -> None:
    """The page shortage of this suite is real: some request was preempted."""
    with open_llm(model, None, "plain", **PRESSURES["shortage"]) as llm:
        from foretoken import SamplingParams

        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, detokenize=False)
        outputs = llm.generate(make_prompts(QUICK, 3), params, use_tqdm=False)
        metrics = [out.metrics for request in outputs for out in request.outputs]
        assert sum(m.num_preemptions for m in metrics if m is not None) > 0


@pytest.mark.parametrize("wrong", [0.0, 0.3, 1.0])
def test_agreement_changes_nothing(wrong: float, model: Path, reference: Reference) -> None:
    """Drafts that are always, mostly and never right give the same tokens."""
    expected = reference.results("seeded", QUICK)
    known = {str(i): list(result.token_ids) for i, result in enumerate(expected)}
    with replay(model, known, wrong) as llm:
        _compare(reference, llm, "seeded", QUICK)
        accepted = counted(llm, "num_accepted_tokens")
        drafted = counted(llm, "num_draft_tokens")
        assert drafted > 0
        if wrong == 0.0:
            assert accepted == drafted
        if wrong == 1.0:
            assert accepted < 0.1 * drafted


@pytest.mark.slow
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("method", ["junk", *METHODS])
def test_ten_thousand_tokens(
    method: str, parameters: str, model: Path, draft: Path, reference: Reference
) -> None:
    """At least 10,000 tokens per method and parameter set: identical."""
    with open_llm(model, draft, method, **PRESSURES["calm"]) as llm:
        total = _compare(reference, llm, parameters, FULL)
        if parameters != "stops":
            assert total >= 10_000
