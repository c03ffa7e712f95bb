"""Control that fails in planning or in learning: requests go on, and operators are told."""

from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from foretoken import LLM, SamplingParams
from foretoken.config import EngineConfig
from foretoken.control.adaptive.controller import AdaptiveControl
from foretoken.control.adaptive.planner import Planner
from foretoken.control.report.journal import ControlJournal
from foretoken.engine.engine import Engine
from foretoken.engine.wiring import build_engine
from foretoken.proposers.choose.drafters import Drafters
from foretoken.server.settings import ServerConfig
from tests.e2e.serving import post, serving
from tests.marks import slow_but

PROMPTS = ["def a(", "class B", "import c"]
PARAMS = SamplingParams(max_tokens=24, temperature=0, ignore_eos=True)
SETTINGS: dict[str, Any] = {"dtype": "float32", "max_model_len": 256}
DRAFTER = {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 3}
PLANTED = [
    (AdaptiveControl, "observe"), (AdaptiveControl, "release"), (Planner, "make"),
    (Planner, "put_away"), (ControlJournal, "observe"), (Drafters, "observe"),
]  # fmt: skip


def plant(patch: pytest.MonkeyPatch, owner: type, name: str, good: int) -> None:
    right, calls = getattr(owner, name), []

    def broken(*args: Any, **kwargs: Any) -> Any:
        calls.append(1)
        if len(calls) > good:
            raise ArithmeticError("planted")
        return right(*args, **kwargs)

    patch.setattr(owner, name, broken)


@pytest.fixture(scope="module")
def plain() -> Iterator[list[list[int]]]:
    with LLM("demo", **SETTINGS) as llm:
        yield texts(llm)


def texts(llm: LLM) -> list[list[int]]:
    found = llm.generate(PROMPTS, PARAMS, use_tqdm=False)
    return [list(one.outputs[0].token_ids) for one in found]


@pytest.mark.parametrize(("owner", "name"), PLANTED, ids=lambda one: getattr(one, "__name__", one))
@pytest.mark.parametrize("good", slow_but([0, 1], 1))
def test_requests_go_on(
    plain: list[list[int]], owner: type, name: str, good: int, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    plant(monkeypatch, owner, name, good)
    with LLM("demo", **SETTINGS, speculative_config=DRAFTER) as llm:
        assert [texts(llm) for _ in range(3)] == [plain] * 3
        journal = llm._engine.parts.controller.journal
    assert journal is not None
    found = journal.describe()
    assert "ArithmeticError: planted" in found["failed"]
    assert found["drafters"]["draft_model"]["state"] == "resting"
    errors = [one for one in caplog.records if one.exc_info]
    assert len(errors) == 1, "once, with its traceback"


def engine() -> Engine:
    return build_engine(
        EngineConfig.from_kwargs(model="demo", speculative_config=DRAFTER, **SETTINGS)
    )


@pytest.mark.slow
def test_the_server_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    plant(monkeypatch, Planner, "make", 1)
    admin = {"authorization": "Bearer boss"}
    body = {"prompt": PROMPTS[0], "max_tokens": 24, "temperature": 0}
    with serving(engine(), ServerConfig(admin_key="boss")) as server:
        answers = [post(server, "/v1/completions", body).json() for _ in range(3)]
        found = httpx.get(server.url + "/admin/speculation", headers=admin).json()
    assert len({answer["choices"][0]["text"] for answer in answers}) == 1
    assert found["control"]["failed"].startswith("control failed planning a step: ")
    assert found["models"]["target"]["step_s"] >= 0.0


@pytest.mark.slow
def test_operators_see_what_models_know() -> None:
    admin = {"authorization": "Bearer boss"}
    body = {"prompt": PROMPTS, "max_tokens": 40, "temperature": 0, "cache_salt": "secret"}
    with serving(engine(), ServerConfig(admin_key="boss")) as server:
        for _ in range(4):
            assert post(server, "/v1/completions", body).status_code == 200
        found = httpx.get(server.url + "/admin/speculation", headers=admin).json()["models"]
        shown = httpx.get(server.url + "/metrics").text
        page = httpx.get(server.url + "/control").text
    assert found["costs"] == "promised"
    assert {"step_s", "row_s", "sequence_s", "key_s", "level", "error_p50"} <= found[
        "target"
    ].keys()
    assert {"call_s", "pass_s", "feed_s", "level"} <= found["drafters"]["draft_model"].keys()
    [(key, one)] = found["acceptance"]["draft_model"].items()
    assert "secret" not in key and len(one["chances"]) == len(one["trials"])
    assert found["account"].keys() == {"balance_s", "spent_s"}
    assert found["ledger"]["requests"] == 0
    assert "secret" not in shown + page
    for name in ("cost_seconds", "cost_level", "acceptance", "ledger_seconds"):
        assert f"foretoken:control_{name}{{" in shown, name
