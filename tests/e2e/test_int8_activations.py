"""The promises hold with 8-bit activations, of the target, of the drafter, of both.

The guarded bugs: rounding that depends on the chunk or on the batch, a span whose rows are rounded
together, a setting that changes nothing, or one that is taken where nothing is multiplied so.
"""

from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM
from foretoken.errors import ConfigError
from foretoken.kernels.library import find_library
from foretoken.testing import JunkProposer
from tests.e2e.heads import HEADS
from tests.e2e.lossless import (
    METHODS,
    PARAMETERS,
    PRESSURES,
    VOCAB,
    Result,
    generate,
    make_prompts,
    with_model,
)
from tests.marks import slow_but

TOKENS, COUNT = 24, 8
TREE = [[0], [1], [0, 0], [0, 1], [1, 0], [0, 0, 0]]
ROUNDED = {"quantization": "int8", "activations": "int8"}
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": METHODS["ngram"],
    "draft": {**METHODS["draft auto"], **ROUNDED},
    "wide draft": METHODS["draft auto"],
    "tree": {"method": "draft_model", "choices": TREE, "quantization": "int4"},
    "eagle3": {**HEADS["eagle3"], **ROUNDED},
    "dflash": {**HEADS["dflash"], **ROUNDED},
    "dspark": {**HEADS["dspark"], "quantization": "int4"},
}

pytestmark = pytest.mark.skipif(find_library() is None, reason="only kernels multiply so")


def open_llm(model: Path, speculative: dict[str, Any] | None, **settings: Any) -> LLM:
    """An int4 target with 8-bit activations, unless `settings` say otherwise."""
    kept: Any = {"dtype": "float32", "batch_invariant": True, "adaptive_speculation": False}
    kept |= {"quantization": "int4", "activations": "int8", **settings}
    return LLM(str(model), speculative_config=speculative, **kept)


def run(llm: LLM, parameters: str) -> list[Result]:
    chosen = {"max_tokens": TOKENS, **PARAMETERS[parameters]}
    return generate(llm, make_prompts(COUNT, 3), chosen)


@pytest.fixture(scope="module", params=["int4", "int8"])
def kept(request: pytest.FixtureRequest) -> dict[str, Any]:
    return {"quantization": request.param}


@pytest.fixture(scope="module")
def plain(model: Path, kept: dict[str, Any]) -> Iterator[Callable[[str], list[Result]]]:
    with open_llm(model, None, **kept, **PRESSURES["one at a time"]) as llm:
        yield cache(partial(run, llm))


@pytest.fixture(scope="module")
def drafters(folders: dict[str, Path], draft: Path) -> dict[str, dict[str, Any]]:
    return {
        name: {**one, "model": str(folders[name])} if name in HEADS else with_model(one, draft)
        for name, one in DRAFTERS.items()
    }


@pytest.mark.parametrize("pressure", slow_but(["calm", "chunks"], "chunks"))
@pytest.mark.parametrize("name", slow_but(DRAFTERS, "tree"))
def test_drafters_change_no_token(
    name: str, pressure: str, model: Path, drafters: dict[str, Any], kept: Any, plain: Any
) -> None:
    """Greedy, seeded with filters, with penalties, with logprobs: identical."""
    with open_llm(model, drafters[name], **kept, **PRESSURES[pressure]) as llm:
        for parameters in ("greedy", "filters", "greedy penalties", "logprobs"):
            assert run(llm, parameters) == plain(parameters)


@pytest.mark.slow
def test_batches_and_junk_change_no_token(model: Path, kept: Any, plain: Any) -> None:
    for proposer in (None, JunkProposer(VOCAB, seed=1)):
        with open_llm(model, None, proposer=proposer, **kept, **PRESSURES["chunks"]) as llm:
            for parameters in ("logprobs", "several"):
                assert run(llm, parameters) == plain(parameters)


@pytest.mark.parametrize("activations", ["auto", "int16", "int8"])
def test_a_drafters_activations_leave_the_target_alone(
    activations: str, model: Path, drafters: dict[str, Any]
) -> None:
    found = []
    for speculative in (None, {**drafters["draft"], "activations": activations}):
        with open_llm(model, speculative, activations="auto", max_num_seqs=16) as llm:
            found.append([run(llm, parameters) for parameters in ("greedy", "logprobs")])
    assert found[0] == found[1]


def test_8_bits_are_another_model_and_16_the_usual_one(
    model: Path, kept: dict[str, Any], plain: Any
) -> None:
    found = {}
    for activations in ("auto", "int16"):
        with open_llm(model, None, **kept, activations=activations, max_num_seqs=16) as llm:
            found[activations] = run(llm, "logprobs")
    assert found["auto"] == found["int16"] != plain("logprobs")


def test_floats_are_not_multiplied_so(model: Path, draft: Path) -> None:
    refused: list[tuple[str, dict[str, Any]]] = [
        ("activations", {"quantization": None}),
        ("activations", {"dtype": "float16", "batch_invariant": False}),
        (
            "speculative_config.activations",
            {"speculative": {"model": str(draft), "activations": "int8"}},
        ),
    ]
    for field, settings in refused:
        speculative = settings.pop("speculative", None)
        with pytest.raises(ConfigError, match=f"^{field}: got 'int8'; allowed: auto"):
            open_llm(model, speculative, **settings)
