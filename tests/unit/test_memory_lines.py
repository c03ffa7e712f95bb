"""The budget as it is printed at start, and the lines that docs/running.md shows of it.

The guarded bugs: a part that is not printed, lines that do not add up, a cost of speculation that
is not the one that is planned with, a document that shows the lines of an older version.
"""

import logging
import re

import pytest

from foretoken import LLM
from foretoken.checkpoint import packaged_model
from foretoken.config import EngineConfig, resolve
from foretoken.config.memory import Drafting, ModelMemory
from foretoken.config.resolve import ResolvedConfig
from foretoken.errors import ConfigError
from foretoken.hardware import Gpus, Hardware
from foretoken.shape import ModelShape
from tests.guards.sources import ROOT

DEMO, DRAFT = (ModelShape.from_config(packaged_model(n)) for n in ("demo", "demo-draft"))
GPU = Gpus(count=1, free_memory=2**33, has_nccl=True)
UNITS = {"MiB": 1.0, "GiB": 1024.0}


def amounts(lines: list[str]) -> dict[str, float]:
    """Name -> MiB of the lines that have an amount."""
    found = (re.match(r"memory: (.+?)\s+([\d.]+) (MiB|GiB)", line) for line in lines)
    return {m[1]: float(m[2]) * UNITS[m[3]] for m in found if m is not None}


@pytest.mark.parametrize("method", [None, "ngram", "draft_model"])
def test_the_engine_says_where_memory_goes(
    method: str | None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(logging.getLogger("foretoken"), "propagate", True)
    config = None if method is None else {"method": method, "num_speculative_tokens": 4}
    if method == "draft_model":
        config = {**(config or {}), "model": "demo-draft", "kv_cache_dtype": "int8"}
    with (
        caplog.at_level(logging.INFO, logger="foretoken"),
        LLM("demo", speculative_config=config, max_num_seqs=4, max_model_len=512) as llm,
    ):
        budget = llm._engine.parts.config.budget
    lines = [line for line in caplog.messages if line.startswith("memory: ")]
    found = amounts(lines)
    drafts = {"draft weights", "draft KV cache"} if method == "draft_model" else set()
    assert (
        set(found) == {"weights", "KV cache", "activations", "workspace", "all together"} | drafts
    )
    total = found.pop("all together")
    assert sum(found.values()) == pytest.approx(total, abs=0.3)
    assert total == pytest.approx(budget.total / 2**20, abs=0.06)
    said = re.search(r"costs (\d+) tokens of KV \(([\d.]+)% of the (\d+) without it", lines[-1])
    if method is None:
        assert said is None
        return
    assert said is not None
    assert int(said[1]) == budget.lost_tokens == int(said[3]) - budget.num_tokens
    assert float(said[2]) == pytest.approx(100 * budget.lost_tokens / int(said[3]), abs=0.06)
    assert lines[-1].endswith("hold up to 16")


def resolved(free_gib: float, *, drafts: int = 0, **settings: object) -> ResolvedConfig:
    hardware = Hardware(
        cpu_name="any",
        num_cores=2,
        free_memory=int(free_gib * 2**30),
        cpu_flags=frozenset({"avx512_bf16"}),
    )
    drafting = Drafting(models=(ModelMemory(shape=DRAFT),), lookahead=drafts) if drafts else None
    config = EngineConfig.from_kwargs(model="demo", **settings)
    return resolve(config, hardware, DEMO, drafting=drafting)


@pytest.mark.parametrize("kv_bytes", [3 << 20, 8 << 20, 1 << 30, None])
def test_drafters_take_no_token_where_memory_is_given_back(kv_bytes: int | None) -> None:
    settings = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": kv_bytes}
    plain, both = (resolved(4, drafts=drafts, **settings) for drafts in (0, 5))
    assert both.num_kv_tokens == plain.num_kv_tokens and both.budget.lost_tokens == 0
    budget = both.budget
    assert budget.is_shared and not plain.budget.is_shared
    assert budget.page_bytes <= (kv_bytes or budget.page_bytes)
    found = amounts(both.describe_memory())
    assert found["draft KV cache"] == pytest.approx(budget.draft_bytes / 2**20, abs=0.06)
    total = found.pop("all together")
    assert sum(found.values()) == pytest.approx(total, abs=0.3)
    tight = kv_bytes is not None and kv_bytes < 1 << 30
    assert ("beside a full KV cache" in "".join(both.describe_memory())) == tight


def test_a_device_that_gives_nothing_back_says_so() -> None:
    hardware = Hardware(cpu_name="any", num_cores=2, free_memory=2**33, cpu_flags=frozenset())
    drafting = Drafting(models=(ModelMemory(shape=DRAFT),), lookahead=4)
    config = EngineConfig(model="demo", device="cuda", kv_cache_memory_bytes=64 << 20)
    found = resolve(config, hardware, DEMO, drafting=drafting, gpus=GPU)
    assert not found.budget.is_shared and found.budget.lost_tokens > 0
    assert found.describe_memory()[-1].endswith("cuda gives no memory back")


def shown(first: str) -> str:
    """The block of docs/running.md that begins so."""
    blocks = re.findall(r"```\n(.*?)```", (ROOT / "docs/running.md").read_text("utf-8"), re.DOTALL)
    [found] = [str(block) for block in blocks if block.startswith(first)]
    return found


def test_the_document_shows_these_lines() -> None:
    block = shown("memory: ")
    free = re.search(r"of ([\d.]+) GiB free", block)
    assert free is not None
    assert block.splitlines() == resolved(float(free[1]), drafts=5).describe_memory()


def test_the_document_shows_this_refusal() -> None:
    block = " ".join(shown("max_model_len: ").split())
    free = re.search(r"([\d.]+) GiB are free", block)
    assert free is not None
    with pytest.raises(ConfigError) as caught:
        resolved(float(free[1]), max_model_len=500, kv_cache_memory_bytes=1_000_000)
    assert str(caught.value) == block


@pytest.mark.parametrize("quantization", [None, "int8", "int4"])
def test_on_a_gpu_only_integers_are_packed(quantization: str | None) -> None:
    """The head is the embedding's floats, packed or not, and a copy only where it is rounded."""
    hardware = Hardware(
        cpu_name="any", num_cores=2, free_memory=2**33, cpu_flags=frozenset({"avx512_bf16"})
    )

    def weights(device: str, packs: tuple[str, ...]) -> int:
        config = EngineConfig(model="demo", device=device, quantization=quantization)
        found = resolve(config, hardware, DEMO, packs=packs, gpus=GPU)
        assert found.device == device
        return found.budget.need.weights

    assert DEMO.tie_word_embeddings
    packed, plain = weights("cpu", ("cpu", "cuda")), weights("cuda", ("cpu",))
    assert plain == weights("cpu", ("cuda",)) == weights("cpu", ())
    if quantization is None:
        assert weights("cuda", ("cpu", "cuda")) == plain == packed
    else:
        assert weights("cuda", ("cpu", "cuda")) == packed < plain
