"""Drafting methods that are all in this file: heads, and one row each of the table of methods.

One head drafts from one hidden state, the other keeps keys and values of its own.

The guarded bug: another file has to change for a new method. Nothing here reaches into the package
beyond what a plugin can import, and the row is registered by the public call.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, ClassVar, Self, cast, final

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import foretoken
from foretoken import SamplingParams
from foretoken.config import SpeculativeConfig, method_registry
from foretoken.config.method_registry import DraftingMethod, Marks
from foretoken.config.reader import between
from foretoken.errors import ConfigError
from foretoken.lab.plan.method_plans import MethodPlan
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import PlanSettings
from foretoken.layers.embedding import Embedding
from foretoken.layers.rope import Rotation
from foretoken.proposers.base import Proposer
from foretoken.proposers.heads.base import HeadServingContext, TargetFacts, check_fits, find_head
from foretoken.proposers.heads.chain_head import ChainHead, serve_chains
from foretoken.proposers.heads.folder import HeadFolder, fill
from foretoken.proposers.heads.parts import Attend, HeadAttention, HeadShape, read_layer_shape
from foretoken.proposers.heads.stateless_head import StatelessHead, serve_stateless
from foretoken.proposers.method import DrafterSpec, Target
from foretoken.proposers.steps import DraftSteps, StateSteps
from foretoken.proposers.tree import SpanTree, newest_tokens
from foretoken.runtime.batch import Span
from foretoken.shape.fields import size
from foretoken.testing import TINY
from tests.e2e.lossless import PRESSURES, asking, counted, drawn, make_prompts, open_exact
from tests.marks import slow_but
from tests.property.exact import assert_alike

VOCAB, HIDDEN = int(TINY["vocab_size"]), int(TINY["hidden_size"])
DEPTH, TOKENS, COUNT = 3, 32, 12
run, plain = asking(COUNT, TOKENS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ToySettings:
    toy_scale: Annotated[float, between(0.0, 4.0)] = 1.0


TOY = DraftingMethod(
    name="toy",
    summary="guesses from one hidden state and the last token, over and over",
    source="this test",
    drafts_with="head",
    code=__name__,
    trees=True,
    quantizations=("int8",),
    settings=ToySettings,
    marks=Marks(keys=("toy_depth",)),
    extras=(
        MethodPlan(usual_drafts=DEPTH, needs="a toy", acceptance={"": (0.1, 0.2)}, features=1),
    ),
)


PAGED = DraftingMethod(
    name="paged_toy",
    summary="attends to hidden states and the tokens after them",
    source="this test",
    drafts_with="head",
    code=__name__,
    own_kv=True,
    trees=True,
    quantizations=("int8",),
    marks=Marks(keys=("paged_toy",)),
)


def load_spec(config: Any, target: Target) -> DrafterSpec:
    if config.method == "toy":
        return find_head(Toy, serve_toy, config, target)
    return find_head(PagedToy, serve_chains, config, target)


def serve_toy(net: "Toy", site: HeadServingContext) -> Proposer:
    net.scale = site.config.own.toy_scale
    return serve_stateless(net, site)


@final
class Toy(StatelessHead):
    """Logits of tanh(state + embedding of the last token), which is the next state."""

    method: ClassVar[str] = "toy"
    points = (1,)

    def __init__(self, hidden_size: int, vocab_size: int, depth: int) -> None:
        super().__init__()
        self.depth, self.scale = depth, 1.0
        self.words = nn.Embedding(vocab_size, hidden_size)
        self.top = nn.Linear(hidden_size, vocab_size, bias=False)

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        vocab_size, hidden_size = folder.tensors["top.weight"].shape
        check_fits("hidden_size", hidden_size, target.hidden_size)
        with torch.device("meta"):
            net = cls(hidden_size, vocab_size, size(folder.config, "toy_depth"))
        fill(net, folder.tensors)
        return net

    @property
    def max_drafts(self) -> int:
        return self.depth

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        return (self.top,)

    def steps(self, hidden_BD: Tensor, spans: Sequence[Span]) -> DraftSteps:
        return ToySteps(self, hidden_BD, spans)

    def advance(self, state_BD: Tensor, tokens: list[int]) -> Tensor:
        """The next states."""
        return torch.tanh(self.scale * state_BD + self.words(torch.tensor(tokens)))


@final
class ToySteps(StateSteps):
    def __init__(self, net: Toy, hidden_BD: Tensor, spans: Sequence[Span]) -> None:
        super().__init__(spans)
        self.net, self.hidden_BD = net, hidden_BD

    def begin(self) -> Tensor:
        newest = [sequence.token_ids[-1] for sequence in self.sequences]
        return self.net.advance(self.hidden_BD, newest)

    def advance(self, states_BD: Tensor, active: list[int], drafted: list[list[int]]) -> Tensor:
        return self.net.advance(states_BD, [tokens[-1] for tokens in drafted])

    def grow(self, states_FD: Tensor, trees: Sequence[SpanTree]) -> Tensor:
        return self.net.advance(states_FD, newest_tokens(trees))

    def logits(self, states_BD: Tensor) -> Tensor:
        logits: Tensor = self.net.top(states_BD).float()
        return logits


@final
class PagedToy(ChainHead):
    """One layer of attention; its output is recycled where the target's states are not known."""

    method: ClassVar[str] = "paged_toy"

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.shape = shape
        self.words = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.attention = HeadAttention(shape, shape.hidden_size)
        self.top = nn.Linear(shape.hidden_size, shape.vocab_size, bias=False)

    @classmethod
    def read(cls, folder: HeadFolder, target: TargetFacts) -> Self:
        with torch.device("meta"):
            net = cls(read_layer_shape(folder.config, target, 1))
        fill(net, folder.tensors)
        return net

    @property
    def layer_shape(self) -> HeadShape:
        return self.shape

    @property
    def tops(self) -> tuple[nn.Module, ...]:
        return (self.top,)

    def use_embedding(self, embedding: Embedding) -> None:
        """It has its own."""

    def mix(self, features: Tensor) -> Tensor:
        return features

    def forward(
        self, tokens: Tensor, hidden: Tensor, rotation: Rotation, attends: Sequence[Attend]
    ) -> Tensor:
        x = torch.tanh(hidden + self.words(tokens))
        out: Tensor = x + self.attention(x, rotation, attends[0])
        return out

    def logits(self, outputs: Tensor) -> Tensor:
        logits: Tensor = self.top(outputs)
        return logits


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    """The row is in the table during a test of this file, and forgotten after it."""
    monkeypatch.setattr(method_registry, "_table", dict(method_registry._table))
    foretoken.register_method(TOY)
    foretoken.register_method(PAGED)


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("toy")
    torch.manual_seed(5)
    net = Toy(HIDDEN, VOCAB, DEPTH)
    save_file(net.state_dict(), folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"toy_depth": DEPTH}))
    return folder


@pytest.fixture(scope="module")
def paged_head(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random head with two query heads over one key head."""
    folder = tmp_path_factory.mktemp("paged_toy")
    config = {"paged_toy": 1, "hidden_size": HIDDEN, "intermediate_size": 1,
              "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16}  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(6)
    target = SimpleNamespace(vocab_size=VOCAB, max_position_embeddings=256)
    net = PagedToy(read_layer_shape(config, cast("TargetFacts", target), 1))
    save_file(net.state_dict(), folder / "model.safetensors")
    return folder


@pytest.mark.parametrize("pressure", slow_but(["calm", "shortage"], "shortage"))
@pytest.mark.parametrize(
    "keys",
    [
        {"num_speculative_tokens": 5},
        {"num_speculative_tokens": 4, "toy_scale": 0.5},
        {"draft_confidence_threshold": 0.02, "num_speculative_tokens": 3},
        {"choices": [[0], [0, 0], [0, 1], [1], [1, 0]]},
        {"quantization": "int8", "num_speculative_tokens": 2},
    ],
    ids=["chains", "scaled", "unsure", "trees", "rounded"],
)
def test_it_changes_no_token(
    keys: dict[str, Any], pressure: str, model: Path, head: Path, plain: Any
) -> None:
    """Greedy, seeded with filters and with penalties, and it is measured."""
    config = {"method": "toy", "model": str(head), **keys}
    with open_exact(model, config, **PRESSURES[pressure]) as llm:
        for name in ("greedy", "filters", "greedy penalties"):
            assert run(llm, name) == plain(name), name
        assert counted(llm, "num_draft_tokens") > 100
        assert counted(llm, "num_accepted_tokens") > 0


@pytest.mark.parametrize("pressure", slow_but(["calm", "shortage"], "shortage"))
@pytest.mark.parametrize(
    "keys",
    [
        {"num_speculative_tokens": 5},
        {"choices": [[0], [0, 0], [0, 1], [1], [1, 0]]},
        {"quantization": "int8", "kv_cache_dtype": "int8", "num_speculative_tokens": 2},
    ],
    ids=["chains", "trees", "rounded"],
)
def test_keys_and_values_of_its_own_change_no_token(
    keys: dict[str, Any], pressure: str, model: Path, paged_head: Path, plain: Any
) -> None:
    config = {"model": str(paged_head), **keys}
    with open_exact(model, config, **PRESSURES[pressure]) as llm:
        for name in ("greedy", "filters"):
            assert run(llm, name) == plain(name), name
        # Short of pages the target's come first, and drafters have what is left.
        least = 5 if pressure == "shortage" else 100
        assert counted(llm, "num_draft_tokens") > least
        need = llm._engine.parts.config.budget.need
    kept = 2 * (16 + 4 if "kv_cache_dtype" in keys else 4 * 16)
    assert need.draft_kv_per_token == kept + 4 * HIDDEN


def test_among_other_drafters(model: Path, head: Path, plain: Any) -> None:
    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    toys = [{"method": "toy", "model": str(head), "name": name} for name in ("one", "other")]
    config = {"drafters": [lookup, *toys]}
    with open_exact(model, config, max_num_seqs=16) as llm:
        assert run(llm, "filters") == plain("filters")
        wish = SamplingParams(
            max_tokens=TOKENS, temperature=0.0, detokenize=False, speculation={"drafter": "other"}
        )
        found = llm.generate(make_prompts(COUNT, 3), wish, use_tqdm=False)
    assert [out.outputs[0].token_ids for out in found] == [r.token_ids for r in plain("greedy")]
    for out in found:
        metrics = out.outputs[0].metrics
        assert metrics is not None and set(metrics.drafter_per_step) <= {"other", ""}


@pytest.mark.slow
def test_drawn_tokens_have_the_plain_distribution(model: Path, head: Path) -> None:
    """Three tokens, with the head and without: a two-sample chi-square of what came out."""
    counts = []
    for config in (None, {"method": "toy", "model": str(head), "num_speculative_tokens": 3}):
        with open_exact(model, config, seed=3) as llm:
            counts.append(drawn(llm, 3, 1000))
    assert_alike(*counts, least_freedom=3)


def test_its_memory_is_budgeted(model: Path, head: Path) -> None:
    """Its weights, and the hidden states that the target keeps for it."""
    config = {"method": "toy", "model": str(head), "num_speculative_tokens": 3}
    with open_exact(model, config) as llm:
        need = llm._engine.parts.config.budget.need
    assert need.draft_weights == 4 * 2 * VOCAB * HIDDEN
    assert need.draft_kv_per_token == 4 * HIDDEN


def test_it_is_planned() -> None:
    """With what its row says, by a planner that has no list of methods."""
    plan = build_plan(PlanSettings(target="llama-3.1-8b", method="toy"))
    assert plan.setup.k == DEPTH and plan.setup.has_weights
    assert (plan.prediction.acceptance.low, plan.prediction.acceptance.high) == (0.1, 0.2)
    assert "toy" in [outlook.method for outlook in plan.outlooks]
    assert plan.verdict.word == "LEAVE IT OFF", "one of ten drafts does not pay"
    own = PlanSettings(
        target="llama-3.1-8b", method="toy", acceptance="0.7:0.9", engine="foretoken"
    )
    better = build_plan(own)
    assert '"method": "toy"' in better.commands["foretoken"]
    assert better.commands["vllm"].startswith("# vllm does not draft with toy")


def test_the_method_follows_from_the_folder(head: Path) -> None:
    assert SpeculativeConfig.from_dict({"model": str(head)}).drafters[0].method == "toy"


def test_mistakes_are_explained(model: Path, head: Path) -> None:
    deep = [[0] * n for n in range(1, DEPTH + 2)]
    with pytest.raises(ConfigError, match=f"choices.*at most {DEPTH}"):
        open_exact(model, {"method": "toy", "model": str(head), "choices": deep})
    with pytest.raises(ConfigError, match="method.*toy, which"):
        open_exact(model, {"method": "mlp", "model": str(head)})
    with pytest.raises(ConfigError, match="parallel_drafting"):
        open_exact(model, {"method": "toy", "model": str(head), "parallel_drafting": True})
    with pytest.raises(ConfigError, match=r"toy_scale: got 9; allowed: a number from 0 to 4"):
        open_exact(model, {"method": "toy", "model": str(head), "toy_scale": 9})
    with pytest.raises(ConfigError, match="toy_scal.*did you mean 'toy_scale'"):
        open_exact(model, {"method": "toy", "model": str(head), "toy_scal": 1})
    with pytest.raises(ConfigError, match="kv_cache_dtype"):
        open_exact(model, {"method": "toy", "model": str(head), "kv_cache_dtype": "int8"})
