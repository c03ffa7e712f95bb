"""Mixtures of experts: transformers' logits and tokens, a row's own bits, and files that lie.

The guarded bugs: a term of a family's router or experts left out, another order of additions for
another company of rows, a tie decided by luck, an expert read in another's place.
"""

import errno
import json
import logging
import os
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from typer.testing import CliRunner

from foretoken import LLM
from foretoken.cli.app import app
from foretoken.config.engine import EngineConfig
from foretoken.config.memory import ModelMemory
from foretoken.errors import CheckpointError, ConfigError, UnsupportedModelError
from foretoken.hardware import Hardware
from foretoken.kernels.library import find_library
from foretoken.layers.mixture import Mixture, MixtureBeside, Router
from foretoken.models import LoadOptions, checkpoint, weight_cache
from foretoken.models.checkpoint import Checkpoint
from foretoken.models.decoder import Decoder
from foretoken.models.load import load_model
from foretoken.models.packed_file import PackedWriter
from foretoken.models.tensors import SpanLayout
from foretoken.ops.linear import PlainLinear
from foretoken.runtime.runner import Runner
from foretoken.shape import ModelShape
from foretoken.shape.families import StoredView
from foretoken.shape.mixtures.experts import Experts, Routing
from foretoken.shape.mixtures.families import REFUSED
from foretoken.training.evaluation import watch_steps
from tests.e2e.heads import HEADS, HIDDEN, write_head
from tests.e2e.lossless import VOCAB as WORDS
from tests.e2e.lossless import generate, make_prompts, open_llm
from tests.golden import quantized
from tests.golden.families import MIXTURES, VOCAB, expected_logits, write_checkpoint
from tests.golden.gguf_files import More, write_gguf
from tests.golden.scenario import cut, forward, in_pieces, open_runner, tables
from tests.golden.shared_forwards import without_kernels
from tests.golden.test_transformers import (
    LENGTH,
    assert_all_cuts_agree,
    assert_close,
    assert_greedy_agrees,
    write_multimodal,
)

BAR = (
    "qwen3_moe", "gpt_oss", "olmoe", "mixtral", "glm4_moe", "granitemoe",
    "gemma4 experts, keys as values", "gemma4 layers that share",
)  # fmt: skip
"""Families whose tokens are compared in the short suite too."""


def slow_of(*cases: str) -> list[Any]:
    return [pytest.param(case, marks=pytest.mark.slow) for case in cases]


def slow_unless(fast: Sequence[str]) -> list[Any]:
    return [pytest.param(one, marks=[] if one in fast else pytest.mark.slow) for one in MIXTURES]


@pytest.mark.parametrize(
    "case", slow_unless([one for one in MIXTURES if " " not in one or one in BAR])
)
def test_logits_agree(case: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *MIXTURES[case])
    shape = ModelShape.from_config(tmp_path)
    assert shape.is_own
    stored = sum(one.numel() for one in model.state_dict().values())
    assert shape.parameter_count() == stored - tied(model)
    runner = open_runner(tmp_path)
    assert find_library() is None or decoder(runner).compiled is not None, "one call"
    assert_all_cuts_agree(runner, model, case, (LENGTH if case in BAR else 40, 9))


def tied(model: Any) -> int:
    """Numbers that its state_dict has twice."""
    head = model.lm_head.weight
    return head.numel() if head is model.model.embed_tokens.weight else 0


@pytest.mark.parametrize("case", slow_unless(BAR))
def test_greedy_tokens_agree(case: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *MIXTURES[case])
    assert_greedy_agrees(tmp_path, model)


def decoder(runner: Runner) -> Decoder:
    assert isinstance(runner.model, Decoder)
    return runner.model


def mixtures(runner: Runner) -> Iterator[Mixture]:
    for layer in decoder(runner).layers:
        found = layer.mlp.mixture if isinstance(layer.mlp, MixtureBeside) else layer.mlp
        if isinstance(found, Mixture):
            yield found


def changing(
    parts: Callable[[Runner], Iterable[object]], **changes: Any
) -> Callable[[Runner], None]:
    """Parts of a model that are something else."""

    def change(runner: Runner) -> None:
        for part in parts(runner):
            for name, value in changes.items():
                object.__setattr__(part, name, value)

    return change


def routing_of(runner: Runner, change: Callable[[Routing], Routing]) -> None:
    """Change what the routers of a model do."""
    for one in mixtures(runner):
        routing = change(one.router.routing)
        object.__setattr__(one, "router", replace(one.router, routing=routing))


on_mixtures = partial(changing, mixtures)
on_routers = partial(changing, lambda runner: (one.router for one in mixtures(runner)))
on_layers = partial(changing, lambda runner: decoder(runner).layers)
on_attention = partial(
    changing, lambda runner: (layer.attention for layer in decoder(runner).layers)
)


MUTATIONS: dict[str, tuple[str, Callable[[Runner], None]]] = {
    "weights": ("qwen3_moe", lambda r: routing_of(r, lambda one: replace(one, weights="kept"))),
    "groups": ("glm4_moe", lambda r: routing_of(r, lambda one: replace(one, groups=1))),
    "scale": ("glm4_moe", lambda r: routing_of(r, lambda one: replace(one, scale=1.0))),
    "score": ("dots1", lambda r: routing_of(r, lambda one: replace(one, score="softmax"))),
    "choice bias": ("minimax_m2", on_routers(choice_bias_E=None)),
    "shared expert": ("granitemoeshared", on_mixtures(shared=None)),
    "its gate": ("qwen2_moe", on_mixtures(shared_gate=None)),
    "sinks": ("gpt_oss", on_attention(sinks_H=torch.full((4,), -1e30))),
    "output gate": ("afmoe", on_attention(gate=None)),
    "scales of experts": ("gemma4 experts, keys as values", on_routers(scale_E=None)),
    "scales of layers": ("gemma4 layers that share", on_layers(scale=None)),
    "inputs of layers": ("gemma4 layers that share", on_layers(input=None)),
}


@pytest.mark.parametrize("what", MUTATIONS)
def test_a_term_that_is_dropped_is_seen(what: str, tmp_path: Path) -> None:
    case, drop = MUTATIONS[what]
    model = write_checkpoint(tmp_path, *MIXTURES[case])
    runner, ids = open_runner(tmp_path), [7 * i % VOCAB for i in range(30)]
    want = expected_logits(model, ids)
    assert_close(forward(runner, [(ids, 0, 30, list(range(8)))]), want)
    on_mixtures(kernel=None)(runner)
    object.__setattr__(decoder(runner), "compiled", None)
    drop(runner)
    found = forward(runner, [(ids, 0, 30, list(range(8)))])
    assert (found - want).abs().max() > 1e-2


@pytest.mark.parametrize(
    ("case", "terms"),
    [
        ("afmoe", {"gate": None}),
        ("hunyuan_v1_moe", {"turns_first": 0}),
        (
            "gemma4 experts, keys as values",
            {"value_norm": None, "scale": 1.0, "experts": None, "gate_up": None},
        ),
    ],
)
def test_so_is_one_that_c_drops(case: str, terms: dict[str, Any], tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *MIXTURES[case])
    runner, ids = open_runner(tmp_path), [7 * i % VOCAB for i in range(30)]
    want = expected_logits(model, ids)
    for name, none in terms.items():
        compiled = decoder(open_runner(tmp_path)).compiled
        if compiled is None:
            pytest.skip("no compiled kernels")
        for layer in compiled._bound:
            setattr(layer, name, none)
        runner.model = replace(decoder(runner), compiled=compiled)
        found = forward(runner, [(ids, 0, 30, list(range(8)))])
        assert (found - want).abs().max() > 1e-2, name


FIELDS: list[tuple[str, str, Any]] = [
    ("granitemoe", "embedding_scale", 1.0),
    ("granitemoe", "attention_scale", None),
    ("granitemoe", "branch_scale", 1.0),
    ("granitemoe", "logit_scale", 1.0),
    ("gpt_oss", "windows", ()),
    ("gpt_oss", "limit", 100.0),
    ("hunyuan_v1_moe", "norms_after_turning", False),
    ("hunyuan_v1_moe stretched", "theta", 300.0),
    ("glm4_moe", "rotary_dim", 16),
    ("minimax_m2", "rotary_dim", 16),
    ("afmoe", "turned", ()),
    ("afmoe", "embedding_scale", 1.0),
    ("qwen2_moe window", "windows", ()),
    ("gemma4 experts, keys as values", "logit_softcap", None),
    ("gemma4 experts, keys as values", "local_rope", None),
    ("gemma4 experts, keys as values", "value_norms", False),
]


@pytest.mark.parametrize(("case", "field", "none"), FIELDS)
def test_so_is_what_config_json_says(
    case: str, field: str, none: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = write_checkpoint(tmp_path, *MIXTURES[case])
    shape, ids = ModelShape.from_config(tmp_path), [7 * i % VOCAB for i in range(30)]
    assert shape.experts is not None and shape.rope is not None
    within = {"limit": "experts", "theta": "rope", "rotary_dim": "rope"}.get(field)
    changes = {field: none}
    if within is not None:
        changes = {within: replace(getattr(shape, within), **changes)}
    dropped = replace(shape, **changes)
    assert dropped != shape
    monkeypatch.setattr(ModelShape, "from_config", lambda folder: dropped)
    found = forward(open_runner(tmp_path), [(ids, 0, 30, list(range(8)))])
    assert (found - expected_logits(model, ids)).abs().max() > 1e-2


@pytest.mark.parametrize(
    "kind", ["mlp.router.bias", "gate_up_proj_bias", "down_proj_bias", "self_attn.sinks"]
)
def test_so_is_a_bias(kind: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *MIXTURES["gpt_oss"])
    want, ids = expected_logits(model, list(range(30))), list(range(30))
    rewritten(tmp_path, lambda t: [one.zero_() for name, one in t.items() if name.endswith(kind)])
    found = forward(open_runner(tmp_path), [(ids, 0, 30, list(range(8)))])
    assert (found - want).abs().max() > 1e-2


# A row's bits.


@pytest.mark.parametrize(
    "case", slow_unless(["gpt_oss", "glm4_moe", "gemma4 experts, keys as values"])
)
@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("plain", [False, True])
def test_rows_keep_their_bits(case: str, dtype: torch.dtype, plain: bool, tmp_path: Path) -> None:
    """One token at a time, in pieces, and among others whose experts are all, some or none of its
    own; by the kernels and by PyTorch's operations."""
    write_checkpoint(tmp_path, *MIXTURES[case])
    draw = random.Random(case)
    with without_kernels(plain):
        runner = open_runner(tmp_path, dtype=dtype, batch_invariant=True)
        sequences = [[draw.randrange(VOCAB) for _ in range(n)] for n in (40, 40, 17)]
        sequences.append(sequences[0][:30])
        pages = tables(draw, [len(ids) for ids in sequences], together=False)
        alone = [
            in_pieces(runner, ids, own, [1] * len(ids))
            for ids, own in zip(sequences, pages, strict=True)
        ]
        both = list(zip(sequences, pages, strict=True))
        together = forward(runner, [(ids, 0, len(ids), own) for ids, own in both])
        assert torch.equal(together, torch.cat(alone))
        pieces = cut(draw, 40, [2, 3, 9])
        assert torch.equal(in_pieces(runner, *both[0], pieces), alone[0])


@pytest.mark.parametrize("case", ["qwen3_moe", "glm4_moe", "gemma4 experts, keys as values"])
def test_experts_that_a_step_read_are_counted(case: str, tmp_path: Path) -> None:
    """By C in the one call of all layers, in a call of a layer, and by PyTorch's operations; of
    layers without experts nothing. The same row twice reads no more than once."""
    write_checkpoint(tmp_path, *MIXTURES[case])
    pages, found = [[0, 1], [2, 3]], []
    for plain, compiled in ((False, True), (False, False), (True, False)):
        with without_kernels(plain):
            model = open_runner(tmp_path)
        if not compiled:
            model.model = replace(decoder(model), compiled=None)
        layouts = [SpanLayout(start=0, num_tokens=3, page_table=table) for table in pages]
        ids = [[5, 11, 17], [5, 11, 17]]
        read = [model.forward(layouts[:num], ids[:num], [0]).experts_read for num in (1, 2, 1)]
        one = model.forward([replace(layouts[0], num_tokens=1)], [[5]], [0]).experts_read
        assert one == 3.0 < read[0] <= 8.0
        assert read == [read[0]] * 3
        found.append(read[0])
    assert found == [found[0]] * 3


def router(routing: Routing, used: int, **more: Any) -> Router:
    return Router(linear=PlainLinear(torch.eye(8)), used=used, routing=routing, **more)


def test_ties_go_to_the_lower_number() -> None:
    scores = torch.tensor([[1.0, 3, 3, 2, 2, 2, 0, 3], [0, 0, 0, 0, 0, 0, 0, 0]])
    weights, chosen = router(Routing(weights="normalized"), 4)(scores)
    assert chosen.tolist() == [[1, 2, 7, 3], [0, 1, 2, 3]]
    assert torch.equal(weights[0, 0], weights[0, 2]) and float(weights[1].sum()) == 1.0


def test_what_is_no_number_stays_in_its_row() -> None:
    scores = torch.randn(5, 8, generator=torch.Generator().manual_seed(1))
    broken = scores.clone()
    broken[2, 5] = torch.nan
    for routing in (
        Routing(weights="normalized"),
        Routing(score="none", weights="softmax"),
        Routing(score="sigmoid", groups=4, groups_used=2, weights="normalized"),
    ):
        want, found = router(routing, 3)(scores), router(routing, 3)(broken)
        assert found[0][2].isnan().any()
        for one in (0, 1, 3, 4):
            assert all(torch.equal(a[one], b[one]) for a, b in zip(want, found, strict=True))


@pytest.mark.parametrize(
    "routing",
    [
        Routing(score="none", weights="sigmoid", scale=2.0),
        Routing(score="softmax", softcap=0.7),
        Routing(score="sigmoid", choice_bias=True, weights="normalized", eps=0.1),
        Routing(weights="normalized", floor=0.9),
        Routing(score="sigmoid", groups=2, groups_used=1, weights="softmax"),
    ],
)
def test_routing_by_its_definition(routing: Routing) -> None:
    """Against a plain reading of the record, a row at a time."""
    generator = torch.Generator().manual_seed(3)
    product, bias = torch.randn(20, 8, generator=generator), torch.randn(8, generator=generator)
    weights, chosen = router(routing, 3, choice_bias_E=bias if routing.choice_bias else None)(
        product
    )
    for row in range(20):
        wanted = by_definition(product[row].double(), bias.double(), routing)
        found = dict(zip(chosen[row].tolist(), weights[row].tolist(), strict=True))
        assert found == pytest.approx(wanted, rel=1e-5)
        assert weights[row].tolist() == sorted(weights[row].tolist(), reverse=True)


def by_definition(x: Tensor, bias: Tensor, routing: Routing) -> dict[int, float]:
    if routing.softcap is not None:
        x = routing.softcap * (x / routing.softcap).tanh()
    score = {"softmax": x.softmax(0), "sigmoid": x.sigmoid(), "none": x}[routing.score]
    choosing = (score + bias if routing.choice_bias else score).tolist()
    size = 8 // routing.groups
    groups = [choosing[at : at + size] for at in range(0, 8, size)]
    worth = [sum(sorted(group)[-2:]) for group in groups]
    kept = sorted(range(len(groups)), key=lambda g: -worth[g])[: routing.groups_used]
    allowed = [e for e in range(8) if e // size in kept]
    best = sorted(allowed, key=lambda e: -choosing[e])[:3]
    chosen = score[best]
    if routing.weights == "softmax":
        chosen = chosen.softmax(0)
    elif routing.weights == "sigmoid":
        chosen = chosen.sigmoid()
    elif routing.weights == "normalized":
        chosen = chosen / (chosen.sum().clamp(min=routing.floor) + routing.eps)
    return dict(zip(best, (chosen * routing.scale).tolist(), strict=True))


# Through the engine whole.


@pytest.mark.parametrize("case", ["qwen3_moe", *slow_of("gpt_oss", "gemma4 layers that share")])
def test_speculation_changes_nothing(case: str, tmp_path: Path) -> None:
    """Look-up and a draft model that is a mixture too; chunks, and a prefix that is kept. Junk and
    trees: tests/e2e/test_families.py."""
    check_speculation(case, tmp_path, tokens=16)


def check_speculation(case: str, folder: Path, tokens: int) -> None:
    kind, changes = MIXTURES[case]
    target, draft = folder / "target", folder / "draft"
    small = {"vocab_size": WORDS, "num_hidden_layers": 1, "layer_types": None}
    small |= {"num_kv_shared_layers": 0} if "gemma4" in case else {}
    words = {"vocab_size_per_layer_input": WORDS} if "gemma4" in case else {}
    write_checkpoint(target, kind, {**changes, "vocab_size": WORDS, **words})
    write_checkpoint(draft, kind, {**changes, **small, **words})
    prompts = make_prompts(5, 3)
    prompts = [*prompts, prompts[0]]
    requests: list[dict[str, Any]] = [
        {"max_tokens": tokens, "temperature": 0.0},
        {"max_tokens": tokens, "temperature": 0.9, "seed": 5},
    ]
    with open_llm(target, None, "plain", max_num_seqs=1) as llm:
        expected = [generate(llm, prompts, one) for one in requests]
    with open_llm(target, None, "ngram", max_num_batched_tokens=16) as llm:
        assert [generate(llm, prompts, one) for one in requests] == expected, "ngram"
    speculation = {"method": "draft_model", "model": str(draft), "num_speculative_tokens": 3}
    with LLM(
        str(target), dtype="float32", batch_invariant=True, speculative_config=speculation
    ) as llm:
        assert [generate(llm, prompts, one) for one in requests] == expected, "draft model"


def test_control_is_told_what_steps_read(tmp_path: Path) -> None:
    """From the layers through the engine to the costs that plans are made by."""
    kind, changes = MIXTURES["qwen3_moe"]
    write_checkpoint(tmp_path, kind, {**changes, "vocab_size": WORDS})
    config = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(str(tmp_path), dtype="float32", speculative_config=config) as llm:
        steps = watch_steps(llm._engine)
        generate(llm, make_prompts(4, 3), {"max_tokens": 40, "temperature": 0.0})
        told = llm._engine.parts.controller.models()
    assert told is not None
    assert all(3.0 <= one.experts_read <= 8.0 for one in steps) and len(steps) > 30
    assert told["target"]["expert_s"] >= 0.0
    assert told["target"]["experts"]["apart"] != [1.0, 1.0, 1.0], "nothing was learnt"


@pytest.mark.skipif(find_library() is None, reason="only kernels pack weights")
@pytest.mark.parametrize("case", ["qwen3_moe", "gpt_oss"])
def test_experts_that_memory_has_no_room_for(
    case: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are packed into a file layer by layer, stay mapped, and write the same tokens; the next
    start finds the file."""
    monkeypatch.setattr(logging.getLogger("foretoken"), "propagate", True)
    caplog.set_level(logging.INFO, logger="foretoken")
    monkeypatch.setattr(weight_cache, "_LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    kind, changes = MIXTURES[case]
    write_checkpoint(tmp_path / "model", kind, {**changes, "vocab_size": WORDS})
    prompts, asked = make_prompts(3, 3), {"max_tokens": 16, "temperature": 0.0}
    settings: dict[str, Any] = {"dtype": "float32", "max_model_len": 96, "max_num_seqs": 2,
                                "max_num_batched_tokens": 96}  # fmt: skip

    def start() -> tuple[Any, Any]:
        with LLM(str(tmp_path / "model"), speculative_config=None, **settings) as llm:
            return generate(llm, prompts, asked), llm._engine.parts.config.budget

    monkeypatch.setenv("FORETOKEN_PACKED_WEIGHTS_GIB", "0")
    want, budget = start()
    assert not budget.mapped and "no room" not in caplog.text
    small = replace(Hardware.detect(), free_memory=budget.need.fixed - 1)
    monkeypatch.setattr(Hardware, "detect", lambda: small)
    with pytest.raises(ConfigError, match="FORETOKEN_PACKED_WEIGHTS_GIB"):
        start()
    monkeypatch.delenv("FORETOKEN_PACKED_WEIGHTS_GIB")
    forgotten = list[int]()
    monkeypatch.setattr(
        weight_cache, "_forget", lambda tensor: forgotten.append(tensor.fill_(0).nbytes)
    )
    for first in (True, False):
        forgotten.clear()
        found, mapped = start()
        assert found == want and mapped.mapped > 0 and mapped.total < mapped.free
        assert (sum(forgotten) > mapped.mapped / 2) == first == bool(forgotten)
    assert caplog.text.count("of experts have no room and stay on the disk") == 3
    assert caplog.text.count("mapped\n") == 2


@pytest.mark.skipif(find_library() is None, reason="only kernels pack weights")
def test_packing_that_another_does_or_that_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Who comes second waits, and packs if nothing came of it; a full disk is an error of ours."""
    monkeypatch.setattr(weight_cache, "_LEAST_BYTES", 0)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    kind, changes = MIXTURES["qwen3_moe"]
    write_checkpoint(tmp_path / "model", kind, changes)
    begin, begun = weight_cache.WeightCache.begin, list[bool]()

    def begin_second(cache: Any) -> Any:
        begun.append(True)
        (weight_cache._made(weight_cache.packed_folder()) / cache.name).with_suffix(".tmp").touch()
        return None if len(begun) == 1 else begin(cache)

    def full(self: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    options = LoadOptions(
        dtype=torch.float32, device=torch.device("cpu"), batch_invariant=True, page_size=16,
        maps_experts=True,
    )  # fmt: skip
    with monkeypatch.context() as patch:
        patch.setattr(PackedWriter, "flush", full)
        with pytest.raises(ConfigError, match="No space left"):
            load_model(tmp_path / "model", options)
    monkeypatch.setattr(weight_cache.WeightCache, "begin", begin_second)
    load_model(tmp_path / "model", options)
    assert len(begun) == 2


@pytest.mark.slow
@pytest.mark.parametrize("head", ["eagle3", "dflash", "medusa"])
@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_moe", "gemma4 experts, keys as values"])
def test_heads_change_nothing(case: str, head: str, tmp_path: Path) -> None:
    """Heads read hidden states that no compiled layers keep for them."""
    kind, changes = MIXTURES[case]
    target, sizes = tmp_path / "target", {"vocab_size": WORDS, "hidden_size": HIDDEN}
    write_checkpoint(target, kind, {**changes, **sizes})
    folder = write_head(tmp_path / "head", head, tmp_path / "none")
    prompts, request = make_prompts(4, 3), {"max_tokens": 16, "temperature": 0.9, "seed": 5}
    with open_llm(target, None, "plain", max_num_seqs=1) as llm:
        expected = generate(llm, prompts, request)
    speculation = {**HEADS[head], "model": str(folder)}
    with LLM(
        str(target), dtype="float32", batch_invariant=True, speculative_config=speculation
    ) as llm:
        assert generate(llm, prompts, request) == expected


# Files.


def with_experts_in_mxfp4(folder: Path) -> None:
    """Store the experts of a gpt-oss as OpenAI does; the floats become what they can be."""
    table = torch.tensor([0.0, 0.5, 1, 1.5, 2, 3, 4, 6])
    table = torch.cat([table, -table])
    file, generator = folder / "model.safetensors", torch.Generator().manual_seed(5)
    stored, floats = {}, {}
    for name, tensor in load_file(file).items():
        if not name.endswith(("gate_up_proj", "down_proj")) or "experts" not in name:
            stored[name] = floats[name] = tensor
            continue
        experts, inputs, outputs = tensor.shape
        shape = (experts, outputs, inputs // 32, 16)
        blocks = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        scales = torch.randint(122, 126, shape[:3], dtype=torch.uint8, generator=generator)
        values = table[torch.stack([blocks & 15, blocks >> 4], -1).long()].flatten(-2)
        values = values * torch.exp2(scales.float() - 127)[..., None]
        floats[name] = values.flatten(2).transpose(1, 2).contiguous()
        stored[f"{name}_blocks"], stored[f"{name}_scales"] = blocks, scales
    save_file(floats, file)
    save_file(stored, folder / "stored.safetensors")


def test_experts_in_mxfp4(tmp_path: Path) -> None:
    kind, changes = MIXTURES["gpt_oss"]
    sizes = {"hidden_size": 64, "intermediate_size": 96}
    model = write_checkpoint(tmp_path, kind, {**changes, **sizes})
    with_experts_in_mxfp4(tmp_path)
    model.load_state_dict(load_file(tmp_path / "model.safetensors"))
    (tmp_path / "stored.safetensors").replace(tmp_path / "model.safetensors")
    path = tmp_path / "config.json"
    config = {**json.loads(path.read_text()), "quantization_config": {"quant_method": "mxfp4"}}
    path.write_text(json.dumps(config))
    EngineConfig.from_kwargs(model=str(tmp_path), quantization="mxfp4")
    runner = open_runner(tmp_path, quantization="mxfp4")
    ids = [7 * i % VOCAB for i in range(40)]
    want = expected_logits(model, ids)
    found = forward(runner, [(ids, 0, 40, list(range(10)))])
    assert (found - want).abs().max() < 2e-3 * want.std()
    shape = ModelShape.from_config(tmp_path)
    assert shape.stored is not None and shape.stored.held[0].share > 0.5


def test_fused_experts_in_either_order(tmp_path: Path) -> None:
    """As Qwen publishes them beside a tower, and as transformers saves them."""
    model, ids = write_multimodal(tmp_path, "qwen3_vl_moe"), list(range(30))
    want = expected_logits(model, ids)

    def turn(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            if tensor.ndim == 3 and ".experts." in name:
                tensors[name] = tensor.transpose(1, 2).contiguous()

    for _ in range(2):
        found = forward(open_runner(tmp_path), [(ids, 0, 30, list(range(8)))])
        assert_close(found, want)
        rewritten(tmp_path, turn)


def test_fused_pieces_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gate and up of an expert lie together, and so do their biases."""
    write_checkpoint(tmp_path, *MIXTURES["gpt_oss"])
    read, take = list[tuple[str, int | None]](), Checkpoint._take_piece

    def taken(self: Checkpoint, file: Any, stored: str, view: StoredView) -> Tensor:
        read.append((stored, view.expert))
        return take(self, file, stored, view)

    monkeypatch.setattr(Checkpoint, "_take_piece", taken)
    open_runner(tmp_path)
    assert len(read) == len(set(read))
    stored = load_file(tmp_path / "model.safetensors")
    assert {name for name, _ in read} == {name for name in stored if ".experts." in name}


def gguf_experts(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    width = config.get("moe_intermediate_size") or config["intermediate_size"]
    counts = ("num_experts", "num_local_experts", "n_routed_experts")
    writer.add_expert_count(next(config[name] for name in counts if config.get(name)))
    writer.add_expert_used_count(config["num_experts_per_tok"])
    writer.add_expert_feed_forward_length(width)
    rope = config["rope_parameters"]
    writer.add_rope_freq_base(rope["rope_theta"])


def gguf_oss(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    gguf_experts(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    rope = config["rope_parameters"]
    writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])


def gguf_glm(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    gguf_experts(writer, config)
    writer.add_expert_shared_count(config["n_shared_experts"])
    writer.add_leading_dense_block_count(config["first_k_dense_replace"])
    writer.add_expert_weights_scale(config["routed_scaling_factor"])
    writer.add_expert_weights_norm(config["norm_topk_prob"])
    writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    writer.add_expert_group_count(config["n_group"])
    writer.add_expert_group_used_count(config["topk_group"])
    writer.add_rope_dimension_count(config["head_dim"] // 2)


def gguf_gemma4(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As llama.cpp's converter: sizes of full layers first, lists where layers differ."""
    kinds, full = config["layer_types"], next(iter(config["per_layer_config"].values()))
    windowed = [kind == "sliding_attention" for kind in kinds]
    sharing, usual = config["num_kv_shared_layers"], config["num_key_value_heads"]
    writer.add_shared_kv_layers(sharing)
    writer.add_embedding_length_per_layer_input(config["hidden_size_per_layer_input"])
    writer.add_sliding_window(config["sliding_window"])
    writer.add_sliding_window_pattern(windowed)
    writer.add_key_length(full["head_dim"])
    writer.add_value_length(full["head_dim"])
    writer.add_key_length_swa(config["head_dim"])
    writer.add_value_length_swa(config["head_dim"])
    wide = full.get("num_key_value_heads", usual)
    writer.add_head_count_kv([usual if one else wide for one in windowed])
    if config["use_double_wide_mlp"]:
        inner, plain = config["intermediate_size"], len(kinds) - sharing
        writer.add_feed_forward_length([inner * (1 + (i >= plain)) for i in range(len(kinds))])
    if config["enable_moe_block"]:
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["top_k_experts"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes["full_attention"]["rope_theta"])
    writer.add_rope_freq_base_swa(ropes["sliding_attention"]["rope_theta"])
    pairs = full["head_dim"] // 2
    turned = int(pairs * ropes["full_attention"]["partial_rotary_factor"])
    freqs = np.array([1.0] * turned + [1e30] * (pairs - turned), np.float32)
    writer.add_tensor("rope_freqs.weight", freqs)
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])


GGUF: dict[str, tuple[str, str, More]] = {
    "qwen3moe": ("qwen3_moe", "qwen3moe", gguf_experts),
    "mixtral": ("mixtral", "llama", gguf_experts),
    "olmoe": ("olmoe", "olmoe", gguf_experts),
    "gpt-oss": ("gpt_oss", "gpt-oss", gguf_oss),
    "glm4moe": ("glm4_moe", "glm4moe", gguf_glm),
    "gemma4": ("gemma4", "gemma4", gguf_gemma4),
    "gemma4 experts": ("gemma4 experts, keys as values", "gemma4", gguf_gemma4),
    "gemma4 sharing": ("gemma4 layers that share", "gemma4", gguf_gemma4),
    "glm4moe norms": ("glm4_moe norms, no groups", "glm4moe", gguf_glm),
}


@pytest.mark.parametrize("case", GGUF)
def test_gguf(case: str, tmp_path: Path) -> None:
    family, arch, more = GGUF[case]
    kind, changes = MIXTURES[family]
    extra = {"swiglu_limit": 7.0} if arch == "gpt-oss" else {}
    model = write_checkpoint(tmp_path, kind, {**changes, **extra})
    path, ids = write_gguf(tmp_path, arch, more), [7 * i % VOCAB for i in range(LENGTH)]
    found = forward(open_runner(path), [(ids, 0, LENGTH, list(range(20)))])
    assert_close(found, expected_logits(model, ids))


@pytest.mark.parametrize("blocks", ["Q8_0", "MXFP4", "Q4_0"])
def test_gguf_in_blocks(blocks: str, tmp_path: Path) -> None:
    """Experts in a file's blocks give what their floats give."""
    kind = gguf.GGMLQuantizationType[blocks]
    changes = {**MIXTURES["qwen3_moe"][1], "hidden_size": 64, "moe_intermediate_size": 32}
    write_checkpoint(tmp_path, "Qwen3Moe", {**changes, "intermediate_size": 64})
    path, ids = write_gguf(tmp_path, "qwen3moe", gguf_experts, kind=kind), list(range(30))
    found = forward(open_runner(path, batch_invariant=True), [(ids, 0, 30, list(range(8)))])
    with without_kernels(True):
        want = forward(open_runner(path), [(ids, 0, 30, list(range(8)))])
    assert (found - want).abs().max() < 5e-3 * want.std()


def changed(folder: Path, **fields: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


@pytest.mark.parametrize(
    ("case", "fields", "named"),
    [
        ("mixtral", {"num_experts_per_tok": 9}, r"num_experts_per_tok: got 9; allowed: 1 to 8"),
        ("mixtral", {"num_local_experts": 0}, r"num_local_experts: got 0"),
        ("glm4_moe", {"n_group": 3}, r"n_group: got 3; allowed: a divisor of 8"),
        ("glm4_moe", {"n_group": 8}, r"n_group: got 8; allowed: .* two in each"),
        ("glm4_moe", {"topk_group": 5}, r"topk_group: got 5; allowed: 1 to 4"),
        ("glm4_moe", {"topk_group": 1}, r"num_experts_per_tok: got 3; allowed: 1 to 2, the exp"),
        ("hunyuan_v1_moe", {"moe_topk": 9}, r"moe_topk: got 9"),
        ("hunyuan_v1_moe", {"moe_topk": [1, 2]}, r"moe_topk: got \[1, 2\]"),
        ("hy_v3", {"mlp_layer_types": ["sparse"]}, r"mlp_layer_types: .* for each of 3 layers"),
        ("qwen3_moe", {"mlp_only_layers": "x"}, r"mlp_only_layers: got 'x'; allowed: a list"),
        ("gpt_oss", {"swiglu_alpha": 2.0}, r"swiglu_alpha: got 2.0"),
        ("olmoe", {"clip_qkv": 8.0}, r"clip_qkv: got 8.0"),
        ("hunyuan_v1_moe", {"moe_topk": [[3], [3]]}, r"moe_topk: got \[3\]; allowed: a positive"),
        ("hunyuan_v1_moe", {"moe_topk": []}, r"moe_topk: got \[\]; allowed: a positive"),
        ("granitemoeshared", {"shared_intermediate_size": -4}, r"shared_inter.*: got -4; allowed"),
        ("ernie4_5_moe", {"moe_num_shared_experts": -1}, r"moe_num_shared_experts: got -1"),
        ("glm4_moe", {"num_nextn_predict_layers": "1"}, r"num_nextn.*: got '1'; allowed: a whole"),
    ],
)
def test_numbers_that_do_not_fit(
    case: str, fields: dict[str, Any], named: str, tmp_path: Path
) -> None:
    write_checkpoint(tmp_path, *MIXTURES[case])
    changed(tmp_path, **fields)
    with pytest.raises((CheckpointError, UnsupportedModelError), match=named):
        ModelShape.from_config(tmp_path)


def rewritten(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors")


def test_files_that_lie(tmp_path: Path) -> None:
    one = "model.layers.1.mlp.experts.3.up_proj.weight"
    ninth = one.replace("3", "8")
    lies: list[tuple[Callable[[dict[str, Tensor]], Any], str]] = [
        (lambda t: t.pop(one), rf"missing tensor: got '{one}'"),
        (lambda t: t.update({one: t[one][:-1].clone()}), rf"tensor shape: got '{one} \[23, 48\]'"),
        (
            lambda t: t.update({ninth: t[one].clone()}),
            r"unused tensors.*experts\.8",
        ),
        (lambda t: t[one].fill_(torch.nan), rf"{one}.*"),
        (
            lambda t: t.update({"model.layers.1.mlp.experts.gate_up_proj": torch.zeros(8, 48, 48)}),
            r"stored twice: got 'model\.layers\.1\.mlp\.experts\.0\.gate_proj",
        ),
    ]
    for number, (lie, named) in enumerate(lies):
        folder = tmp_path / str(number)
        write_checkpoint(folder, *MIXTURES["qwen3_moe"])
        rewritten(folder, lie)
        with pytest.raises(CheckpointError, match=named):
            open_runner(folder)
    folder = tmp_path / "fused"
    write_checkpoint(folder, *MIXTURES["gpt_oss"])
    fused = "model.layers.1.mlp.experts.down_proj"
    rewritten(folder, lambda t: t.update({fused: t[fused][:-1].clone()}))
    with pytest.raises(CheckpointError, match=rf"{fused} \[7, 40, 48\].*\[8, ...\]"):
        open_runner(folder)


def test_the_type_that_only_files_say(tmp_path: Path) -> None:
    """gpt-oss and Hy3 have none in config.json; their routers or biases may be float32."""
    write_checkpoint(tmp_path, *MIXTURES["gpt_oss"])
    changed(tmp_path, dtype=None, torch_dtype=None)
    assert ModelShape.from_config(tmp_path).dtype == "float32"

    def narrow(tensors: dict[str, Tensor]) -> None:
        for name, tensor in tensors.items():
            tensors[name] = tensor if "router" in name else tensor.bfloat16()

    rewritten(tmp_path, narrow)
    assert ModelShape.from_config(tmp_path).dtype == "bfloat16"
    for header in (b"[1, 2]", b'{"a": 3}', b'{"a": {"shape": ["b"], "dtype": "F32"}}'):
        start = len(header).to_bytes(8, "little")
        (tmp_path / "model.safetensors").write_bytes(start + header)
        with pytest.raises(CheckpointError, match="model.safetensors: got"):
            ModelShape.from_config(tmp_path)
    changed(tmp_path, dtype="float16")
    assert ModelShape.from_config(tmp_path).dtype == "float16"


@pytest.mark.parametrize("case", ["gpt_oss", "qwen3_moe"])
def test_a_file_that_pytorch_does_not_map(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is larger than the memory, which Linux does not set aside."""
    model, ids = write_checkpoint(tmp_path, *MIXTURES[case]), list(range(30))

    def refuses(path: str, framework: str) -> None:
        raise RuntimeError(f"unable to mmap 26790236280 bytes from file <{path}>")

    monkeypatch.setattr(checkpoint, "safe_open", refuses)
    found = forward(open_runner(tmp_path), [(ids, 0, 30, list(range(8)))])
    assert_close(found, expected_logits(model, ids))


READY_MADE: dict[str, tuple[str, dict[str, Any], quantized.Writer]] = {
    "qwen3_moe in fp8": (
        "qwen3_moe",
        {"quant_method": "fp8", "weight_block_size": [48, 64]},
        quantized.fp8(per="block", suffix="weight_scale_inv"),
    ),
    "minimax_m2 in fp8": (
        "minimax_m2",
        {"quant_method": "fp8", "fmt": "float8_e4m3fn", "weight_block_size": [48, 64]},
        quantized.fp8(per="block", suffix="weight_scale_inv"),
    ),
    "qwen3_moe in gptq": (
        "qwen3_moe",
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        quantized.gptq(),
    ),
    "mixtral in awq": ("mixtral", {"quant_method": "awq", "group_size": 32}, quantized.awq()),
    "glm4_moe, packed": (
        "glm4_moe",
        {
            "quant_method": "compressed-tensors", "format": "pack-quantized",
            "config_groups": {
                "group_0": {"weights": {"num_bits": 4, "strategy": "group", "group_size": 32}}
            },
        },
        quantized.packed(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", READY_MADE)
def test_experts_that_are_quantized_already(case: str, tmp_path: Path) -> None:
    """As published for GPUs: each expert's matrices alone, routers in floats."""
    family, config, writer = READY_MADE[case]
    kind, changes = MIXTURES[family]
    wide = {"hidden_size": 128, "intermediate_size": 256, "moe_intermediate_size": 128}

    def write(folder: Path) -> Path:
        write_checkpoint(folder, kind, {**changes, **wide, "head_dim": 32})
        return folder

    found, expected = (
        forward(open_runner(folder), [([7 * i % VOCAB for i in range(40)], 0, 40, list(range(10)))])
        for folder in quantized.write_both(tmp_path, config, writer, write=write)
    )
    assert (found - expected).abs().max() < 4e-3 * expected.std()


def test_layers_that_draft_are_left_alone(tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *MIXTURES["glm4_moe"])
    ids = list(range(30))
    names = ("model.layers.3.eh_proj.weight", "mtp.fc.weight", "model.mtp_emb_norm.0.weight")
    more = {name: torch.zeros(2) for name in names}
    rewritten(tmp_path, lambda t: t.update(more))
    changed(tmp_path, num_nextn_predict_layers=1)
    found = forward(open_runner(tmp_path), [(ids, 0, 30, list(range(8)))])
    assert_close(found, expected_logits(model, ids))
    changed(tmp_path, num_nextn_predict_layers=0, num_mtp_layers=0)
    with pytest.raises(CheckpointError, match=r"layers\.3\.eh_proj"):
        open_runner(tmp_path)


GGUF_LIES: dict[str, tuple[str, Callable[[gguf.GGUFWriter, dict[str, Any]], None], str]] = {
    "fewer experts": (
        "qwen3moe",
        lambda writer, config: gguf_experts(
            writer, {**config, "num_experts": 7, "num_local_experts": 7}
        ),
        r"exps.weight: .*24, 48, 8.*\[\.\.\., 7\]",
    ),
    "gate and up twice": (
        "qwen3moe",
        lambda writer, _: writer.add_tensor(
            "blk.1.ffn_gate_up_exps.weight", np.zeros((8, 48, 48), np.float32)
        ),
        r"stored twice: got 'model\.layers\.1\.mlp\.experts\.",
    ),
    "weights times a number": (
        "qwen3moe",
        lambda writer, _: writer.add_expert_weights_scale(2.5),
        r"qwen3moe\.expert_weights_scale: got 2\.5; allowed: 0\.0 or 1\.0",
    ),
    "another score": (
        "olmoe",
        lambda writer, _: writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID),
        r"olmoe\.expert_gating_func: got 2; allowed: 1, or none",
    ),
}


@pytest.mark.parametrize("lie", GGUF_LIES)
def test_a_gguf_file_that_lies(lie: str, tmp_path: Path) -> None:
    arch, change, said = GGUF_LIES[lie]
    write_checkpoint(tmp_path, *MIXTURES[GGUF[arch][0]])

    def more(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
        if lie != "fewer experts":
            gguf_experts(writer, config)
        change(writer, config)

    with pytest.raises((CheckpointError, UnsupportedModelError), match=said):
        open_runner(write_gguf(tmp_path, arch, more))


def test_a_gpt_oss_without_its_window(tmp_path: Path) -> None:
    kind, changes = MIXTURES["gpt_oss"]
    write_checkpoint(tmp_path, kind, {**changes, "swiglu_limit": 7.0})
    with pytest.raises(CheckpointError, match=r"gpt-oss\.attention\.sliding_window: got None"):
        open_runner(write_gguf(tmp_path, "gpt-oss", gguf_experts))


@pytest.mark.parametrize("kind", REFUSED)
def test_what_is_not_built_is_refused_with_its_reason(kind: str) -> None:
    with pytest.raises(UnsupportedModelError, match=REFUSED[kind]):
        ModelShape.from_fields({"model_type": kind, "hidden_size": 8})


def test_info_says_what_is_read_and_what_is_not(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *MIXTURES["glm4_moe"])
    drafting = dict.fromkeys(("mtp.fc.weight", "model.mtp_block.0.weight"), torch.zeros(2))
    rewritten(tmp_path, lambda t: t.update({n: one.clone() for n, one in drafting.items()}))
    changed(tmp_path, num_nextn_predict_layers=1)
    found = CliRunner().invoke(app, ["info", str(tmp_path), "--json", "--quantization", "int8"])
    facts = json.loads(found.output)
    assert (facts["experts"], facts["experts_a_token"], facts["layers_with_experts"]) == (8, 3, 2)
    assert facts["draft_layers"] == "1, not read" and facts["drafting_tensors"] == "2, not read"
    shape = ModelShape.from_config(tmp_path)
    each = 2 * 3 * 3 * 48 * 24
    assert shape.expert_parameters() == each * 8 // 3
    assert facts["active_parameters"] == shape.step_bytes(1, rows=0) + each
    first, read = facts["steps"][0], [step["bytes"] for step in facts["steps"]]
    assert (first["rows"], first["experts_read"], first["break_even_tokens"]) == (1, 3.0, 1.0)
    last = facts["steps"][-1]
    assert 1 < last["break_even_tokens_int8"] < last["break_even_tokens"], "bytes multiply faster"
    assert read == sorted(read) and read[0] < read[1]
    shown = CliRunner().invoke(app, ["info", str(tmp_path)]).output
    assert "tokens to break even" in shown and "2, not read" in shown
    assert "operations per byte read, 20 with int8" in " ".join(shown.split())
    assert "int8 activations " not in shown, "nothing of floats is multiplied so"


def test_bytes_of_a_step(tmp_path: Path) -> None:
    """With all experts touched it reads all but the table; with none, the dense part alone."""
    write_checkpoint(tmp_path, *MIXTURES["qwen3_moe"])
    kept = ModelMemory(shape=ModelShape.from_config(tmp_path), quantization="int8")
    counts = kept.shape.weight_counts()
    everything = kept.weight_bytes(2) - 2 * counts.table
    assert kept.step_bytes(2, 1e9) == pytest.approx(everything, abs=2)
    assert kept.step_bytes(2, 0) == pytest.approx(everything - kept.expert_bytes(2), abs=2)
    experts = kept.shape.expert_counts()
    assert kept.expert_bytes(2) == experts.matrices + 4 * experts.outputs


def test_the_plan_counts_experts() -> None:
    command = ["lab", "plan", "gpt-oss-20b", "--device", "h100-sxm", "--method", "ngram", "--json"]
    steps = json.loads(CliRunner().invoke(app, command).output)["experts_of_a_step"]
    assert [step["rows"] for step in steps] == [1, 2, 4, 6, 8, 16]
    assert [step["experts"] for step in steps][:3] == [4.0, 7.5, 13.2]
    assert steps[0]["break_even_tokens"] == 1.0 < steps[1]["break_even_tokens"] < 2.0


def test_experts_of_a_step() -> None:
    experts = Experts(count=128, used=8, width=768, layers=(True,) * 48)
    assert experts.touched(1) == pytest.approx(8)
    assert experts.touched(8) == pytest.approx(51.6, abs=0.1)
    assert experts.expert_parameters(2048) == 3 * 2048 * 768
