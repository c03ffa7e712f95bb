"""`quantization="auto"` of a draft: when int8 is taken. The guarded bugs: a coin toss decides, or
the choice leaks into the output."""

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.errors import ForetokenError
from foretoken.kernels.library import find_library
from foretoken.proposers.models import language
from foretoken.proposers.models.language import load_cheaper, pays
from foretoken.testing import write_tiny_llama


def test_faster_beyond_the_noise_pays() -> None:
    plain = [1.0, 1.3, 0.9, 1.0, 1.0, 0.9, 1.0, 1.1, 1.0]
    assert pays(plain, [0.6, 1.1, 0.7, 0.6, 0.6, 0.7, 0.8, 1.5, 0.6])
    assert not pays(plain, [0.6, 1.1, 0.7, 0.6, 1.2, 0.7, 0.8, 1.5, 0.6])
    assert not pays(plain, [0.99 * seconds for seconds in plain])
    assert not pays([0.6] * 9, plain)


def test_only_draft_models_are_rounded_if_that_pays() -> None:
    given = {"model": "demo-draft", "quantization": "auto"}
    assert SpeculativeConfig.from_dict(given).drafters[0].quantization == "auto"
    with pytest.raises(ForetokenError, match="quantization"):
        SpeculativeConfig.from_dict({"method": "ngram", "quantization": "auto"})


@pytest.mark.parametrize("method", ["eagle3", "mlp", "medusa"])
def test_heads_are_rounded_at_load_or_not_at_all(method: str) -> None:
    given = {"method": method, "model": f"demo-{method}", "num_speculative_tokens": 2}
    config = SpeculativeConfig.from_dict({**given, "quantization": "int8"})
    assert config.drafters[0].quantization == "int8"
    for other in ("auto", "gptq"):
        with pytest.raises(ForetokenError, match="quantization"):
            SpeculativeConfig.from_dict({**given, "quantization": other})


@pytest.mark.parametrize("method", ["eagle3", "mlp", "medusa"])
def test_a_rounded_head_says_the_same(method: str) -> None:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1, 2, 3, 4]}]
    tokens = []
    for config in (None, {"method": method, "num_speculative_tokens": 3, "quantization": "int8"}):
        with LLM("demo", speculative_config=config) as llm:
            [output] = llm.generate(prompts, params, use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]


@pytest.mark.skipif(find_library() is None, reason="without kernels nothing is timed")
@pytest.mark.parametrize("wins", [True, False])
def test_the_choice_is_logged_and_leaves_the_output_alone(
    wins: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    folder = write_tiny_llama(tmp_path / "model")
    params = SamplingParams(temperature=0.0, max_tokens=16, ignore_eos=True)
    prompts = [{"prompt_token_ids": [1, 2, 3, 4]}]
    monkeypatch.setattr(language, "pays", lambda before, after: wins)
    monkeypatch.setattr(logging.getLogger("foretoken"), "propagate", True)
    tokens = []
    for config in (None, {"model": str(folder), "quantization": "auto"}):
        with (
            caplog.at_level(logging.INFO, logger="foretoken"),
            LLM(str(folder), dtype="float32", speculative_config=config) as llm,
        ):
            [output] = llm.generate(prompts, params, use_tqdm=False)
        tokens.append(output.outputs[0].token_ids)
    assert tokens[0] == tokens[1]
    assert ("int8 weights (auto)" in caplog.text) == wins
    assert torch.is_inference_mode_enabled() is False


class _Draft:
    """A runner whose steps take what its weights take, on a clock of its own."""

    page_size = 16

    def __init__(self, clock: "_Clock", seconds: float) -> None:
        self.model = SimpleNamespace(embedding=torch.zeros(1))
        self._clock, self._seconds, self.steps = clock, seconds, 0

    def roll_out(self, *_: object) -> None:
        return None

    def forward_last(self, *_: object) -> None:
        self.steps += 1
        self._clock.now += self._seconds

    def drop(self) -> None:
        """Nobody else has a part of it."""


class _Clock:
    """Moves only when a draft runs."""

    now = 0.0

    def perf_counter(self) -> float:
        return self.now


@pytest.mark.parametrize(
    ("why", "int8_s", "wins"),
    [(None, 0.6, True), (None, 0.99, False), (None, 1.4, False), ("no kernels", 0.1, False)],
)
def test_auto_measures_and_says_so(
    why: str | None,
    int8_s: float,
    wins: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    clock = _Clock()
    made: dict[str | None, Any] = {None: _Draft(clock, 1.0), "int8": _Draft(clock, int8_s)}
    monkeypatch.setattr(language, "time", clock)
    backend = SimpleNamespace(why_not_int8=why)
    monkeypatch.setattr(language, "backend_for", lambda device: backend)
    monkeypatch.setattr(logging.getLogger("foretoken"), "propagate", True)
    with caplog.at_level(logging.INFO, logger="foretoken"):
        kept = load_cheaper(lambda folder, bits: made[bits], Path("some/draft"))
    assert kept is made["int8" if wins else None]
    [line] = [message for message in caplog.messages if "(auto)" in message]
    assert line.startswith(f"draft draft: {'int8' if wins else 'unrounded'} weights")
    assert (f"{int8_s:.2f}" in line) == (why is None)
    assert made["int8"].steps == made[None].steps == (80 if why is None else 0)
