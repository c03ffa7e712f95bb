"""Requests that come while drafts are made are in that step, and nobody's tokens change."""

import random
from pathlib import Path
from typing import Any

import pytest

from foretoken import LLM, SamplingParams
from tests.e2e.heads import HEADS
from tests.e2e.lossless import PARAMETERS, PRESSURES, make_prompts, open_llm
from tests.marks import slow_but

DRAFT: dict[str, Any] = {"method": "draft_model", "num_speculative_tokens": 4}
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "draft": DRAFT,
    "draft trees": {"method": "draft_model", "choices": [[0], [0, 0], [0, 1], [1]]},
    "rejection": {**DRAFT, "rejection_sample_method": "standard"},
    "eagle3": HEADS["eagle3"],
    "dflash": HEADS["dflash"],
    "medusa": HEADS["medusa"],
    "several": {"drafters": [{"method": "suffix"}, DRAFT]},
}
TOKENS, COUNT = 24, 10


@pytest.fixture(scope="module")
def folders(folders: dict[str, Path], draft: Path) -> dict[str, Path]:
    return dict.fromkeys(METHODS, draft) | folders


def run(llm: LLM, parameters: dict[str, Any], late: random.Random | None) -> tuple[list[Any], int]:
    """Ids of all requests, and how many had their first token in a step that they came to late."""
    engine = llm._engine
    params = SamplingParams(detokenize=False, max_tokens=TOKENS, **parameters)
    coming = [
        request
        for i, prompt in enumerate(make_prompts(COUNT, 3))
        for request in engine.make_requests(str(i), prompt["prompt_token_ids"], params)
    ]
    ids: dict[str, list[int]] = {request.request_id: [] for request in coming}
    arrived: list[str] = []
    joined = 0

    def add() -> None:
        request = coming.pop(0)
        arrived.append(request.request_id)
        engine.add_request(request)

    def arrive() -> None:
        arrived.clear()
        while late is not None and coming and late.random() < 0.6:
            add()

    while coming or engine.has_unfinished:
        if coming and (late is None or not engine.has_unfinished):
            add()
        arrived.clear()
        for output in engine.step(arrive):
            joined += output.request_id in arrived and not ids[output.request_id]
            ids[output.request_id] += output.new_token_ids
    return list(ids.values()), joined


@pytest.mark.parametrize("pressure", slow_but(["calm", "chunks", "shortage"], "shortage"))
@pytest.mark.parametrize("method", slow_but(METHODS, *list(METHODS)[::3]))
def test_whoever_joins_changes_nothing(
    method: str, pressure: str, model: Path, folders: dict[str, Path]
) -> None:
    config = dict(METHODS[method])
    if "drafters" in config:
        config["drafters"] = [
            {**one, "model": str(folders[method])} if one["method"] == "draft_model" else one
            for one in config["drafters"]
        ]
    elif config["method"] != "ngram":
        config["model"] = str(folders[method])
    kinds = ("greedy",) if method == "rejection" else ("greedy", "seeded")
    with (
        open_llm(model, None, "plain", **PRESSURES["one at a time"]) as plain,
        open_llm(model, None, "given", speculative_config=config, **PRESSURES[pressure]) as llm,
    ):
        for kind in kinds:
            expected, _ = run(plain, PARAMETERS[kind], None)
            found, joined = run(llm, PARAMETERS[kind], random.Random(7))
            assert found == expected
            assert joined or pressure != "calm", "nobody came while drafts were made"
