"""Tiny models, and a server of the packaged ones, that the end-to-end tests share."""

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import openai
import pytest

from foretoken import LLM
from foretoken.config import EngineConfig
from foretoken.engine.wiring import build_engine
from foretoken.server.settings import ServerConfig
from foretoken.testing import write_tiny_llama
from tests.e2e.heads import HEADS, write_head
from tests.e2e.lossless import PRESSURES, drawn, open_exact
from tests.e2e.serving import Serving, serving


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_llama(tmp_path_factory.mktemp("target"), seed=1)


@pytest.fixture(scope="session")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The target's own weights with one layer less: agrees sometimes."""
    return write_tiny_llama(tmp_path_factory.mktemp("draft"), seed=1, num_hidden_layers=1)


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory, draft: Path) -> dict[str, Path]:
    """A random head of each of HEADS, to be read only, and the draft model."""
    root = tmp_path_factory.mktemp("heads")
    heads = {name: write_head(root / name, name, draft) for name in HEADS}
    return {"draft_model": draft, **heads}


@pytest.fixture(scope="session")
def alone(model: Path) -> Iterator[LLM]:
    """The target without drafts, one request at a time."""
    with open_exact(model, None, **PRESSURES["one at a time"]) as llm:
        yield llm


@pytest.fixture(scope="session")
def drawn_plain(model: Path) -> Callable[..., Counter[tuple[int, ...]]]:
    """`drawn` of the target without drafts, once for all."""

    @cache
    def found(*asked: int) -> Counter[tuple[int, ...]]:
        with open_exact(model, None, seed=3) as llm:
            return drawn(llm, *asked)

    return found


@pytest.fixture(scope="session")
def server() -> Iterator[Serving]:
    config = EngineConfig.from_kwargs(
        model="demo",
        max_num_seqs=8,
        kv_cache_memory_bytes=64 << 20,
        adaptive_speculation=False,
        speculative_config={
            "method": "draft_model",
            "model": "demo-draft",
            "num_speculative_tokens": 5,
        },
    )
    settings = ServerConfig(per_request_metrics="detailed", admin_key="boss")
    with serving(build_engine(config), settings) as running:
        yield running


@pytest.fixture(scope="session")
def client(server: Serving) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as made:
        yield made
