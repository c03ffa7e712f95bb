"""Block heads against the equations in float64: every published layout, over scattered pages."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from foretoken.errors import CheckpointError, ConfigError, NotYetError, UnsupportedModelError
from foretoken.kernels.library import find_library
from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.layers.embedding import Embedding
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.heads.dflash.network import BlockHead, DFlash
from foretoken.proposers.heads.dflash.runner import BlockRunner
from foretoken.proposers.heads.dflash.shape import BlockPass, BlockView
from foretoken.proposers.heads.dspark import DSpark
from foretoken.proposers.heads.paged_head import PagedContext
from foretoken.proposers.heads.parts import HeadShape
from tests.golden import blocks as ref
from tests.golden.blocks import BODY, MASK, RANK, REDUCED, TAPS, View
from tests.golden.heads import HIDDEN, LAYER, VOCAB, Array, Weights, load_head

TARGET = HeadShape(**{**LAYER, "num_hidden_layers": 8})  # type: ignore[arg-type]
TOLERANCE = 2e-5
PAGE, TABLE = 8, [4, 1, 5, 0, 2, 3]
WINDOW = 6
SLIDING = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": WINDOW}
FULL, SLIDES = View(), View(WINDOW, causal=True)
DFLASH = {"mask_token_id": MASK, "target_layer_ids": [0, 3, 5]}
ORIGINAL: dict[str, Any] = {
    **BODY, "architectures": ["DFlashDraftModel"], "block_size": 5, "num_target_layers": 8,
}  # fmt: skip
VIEWS: dict[str, tuple[dict[str, Any], tuple[View, View]]] = {
    "full": ({"dflash_config": DFLASH}, (FULL, FULL)),
    "windows are causal": ({**SLIDING, "dflash_config": DFLASH}, (SLIDES, FULL)),
    "nothing is causal": (
        {**SLIDING, "is_causal": False, "dflash_config": {**DFLASH, "causal": True}},
        (View(WINDOW), FULL),
    ),
    "everything is causal": (
        {**SLIDING, "dflash_config": {**DFLASH, "causal": True}},
        (SLIDES, View(causal=True)),
    ),
    "every layer slides": (
        {"dflash_config": {**DFLASH, "use_swa": True, "swa_window_size": WINDOW}},
        (View(WINDOW), View(WINDOW)),
    ),
}


def features_of(count: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randn(count, TAPS * HIDDEN, generator=generator)


def table() -> torch.Tensor:
    return torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(9))


def make(net: BlockHead, features_TF: torch.Tensor, *, kernels: bool = True) -> BlockRunner:
    """A runner over a store that holds these features at positions 0, 1, ..., without kernels in
    any case if they are not wanted."""
    store = FeatureStore(
        [FINAL], features_TF.shape[1], PAGE * len(TABLE), dtype=torch.float32,
        device=torch.device("cpu"),
    )  # fmt: skip
    slots = [TABLE[i // PAGE] * PAGE + i % PAGE for i in range(features_TF.shape[0])]
    store.write(FINAL, torch.tensor(slots), features_TF)
    net.use_embedding(Embedding(table()))
    context = PagedContext(
        features=FeatureView(store, [FINAL]),
        target_logits=lambda x: x @ table().T,
        vocab_size=VOCAB,
        num_pages=len(TABLE),
        page_size=PAGE,
    )
    runner = BlockRunner(net, context)
    assert (runner.kernels is None) == (find_library() is None)
    runner.kernels = runner.kernels if kernels else None
    return runner


@torch.inference_mode()
def outputs_of(runner: BlockRunner, count: int, tokens: list[int]) -> torch.Tensor:
    """Outputs of a block behind `count` places, which are fed in pieces."""
    at, pieces = 0, [5, 1, 9, 2, 30]
    while at < count:
        size = min(pieces.pop(0), count - at)
        runner.feed_context([SpanLayout(start=at, num_tokens=size, page_table=TABLE)])
        at += size
    layout = SpanLayout(start=count, num_tokens=len(tokens), page_table=TABLE)
    return runner.run(BlockPass([], [layout], tokens)).clone()


def close(found: torch.Tensor, wanted: Array) -> None:
    assert found.shape == wanted.shape
    assert np.abs(found.double().numpy() - wanted).max() < TOLERANCE


def reference(weights: Weights, count: int, tokens: list[int], views: tuple[View, ...]) -> Array:
    embedded = table().double().numpy()[tokens]
    return ref.block_outputs(weights, features_of(count).double().numpy(), embedded, views)


@pytest.mark.parametrize("kernels", [True, False])
@pytest.mark.parametrize("count", [1, 4, 17, 40])
@pytest.mark.parametrize("name", VIEWS)
def test_dflash(tmp_path: Path, name: str, count: int, kernels: bool) -> None:
    """The authors' layout: shared tables, every rule of what rows see, short and long contexts."""
    changes, views = VIEWS[name]
    weights = ref.block_weights(3)
    net = load_head(weights.write(tmp_path, {**ORIGINAL, **changes}), TARGET)
    assert isinstance(net, DFlash) and net.points == (1, 4, 6)
    assert (net.shape.block_size, net.shape.first_row, net.shape.max_drafts) == (5, 1, 4)
    assert net.shape.views == tuple(BlockView(view.window, view.causal) for view in views)
    tokens, runner = [11, *[MASK] * 4], make(net, features_of(count), kernels=kernels)
    outputs = outputs_of(runner, count, tokens)
    wanted = reference(weights, count, tokens, views)
    close(outputs, wanted)
    close(runner.logits(outputs), wanted @ table().double().numpy().T)


@torch.inference_mode()
def test_blocks_leave_nothing_behind(tmp_path: Path) -> None:
    """What another block wrote behind the context does not count, nor what other spans hold."""
    weights = ref.block_weights(3)
    net = load_head(weights.write(tmp_path, {**ORIGINAL, "dflash_config": DFLASH}), TARGET)
    assert isinstance(net, DFlash)
    runner = make(net, features_of(20))
    first = outputs_of(runner, 9, [11, *[MASK] * 4])
    outputs_of(runner, 9, [12, MASK, 5, 6, 7])
    again = outputs_of(runner, 9, [11, *[MASK] * 4])
    assert torch.equal(first, again)
    runner.feed_context([SpanLayout(start=9, num_tokens=3, page_table=TABLE)])
    close(
        outputs_of(runner, 12, [13, MASK, MASK]),
        reference(weights, 12, [13, MASK, MASK], (FULL, FULL)),
    )
    layouts = [
        SpanLayout(start=12, num_tokens=3, page_table=TABLE),
        SpanLayout(start=0, num_tokens=2, page_table=[3]),
    ]
    both = runner.run(BlockPass([], layouts, [13, MASK, MASK, 14, MASK]))
    close(both[:3], reference(weights, 12, [13, MASK, MASK], (FULL, FULL)))


def test_scales_and_biases(tmp_path: Path) -> None:
    """Biases of all four maps, scaled embeddings and outputs, a cap of its own head's logits."""
    weights = ref.block_weights(4, bias=True)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    weights.matrix("embed_tokens.weight", VOCAB, HIDDEN)
    config = {
        **ORIGINAL, "attention_bias": True, "final_logit_softcapping": 2.0,
        "dflash_config": {**DFLASH, "input_embedding_scale": 3.0, "output_multiplier": 0.5},
    }  # fmt: skip
    net = load_head(weights.write(tmp_path, config), TARGET)
    assert isinstance(net, DFlash)
    runner, tokens = make(net, features_of(9)), [11, MASK, MASK]
    found = runner.logits(outputs_of(runner, 9, tokens))
    embedded = 3.0 * weights["embed_tokens.weight"][tokens]
    features = features_of(9).double().numpy()
    outputs = 0.5 * ref.block_outputs(weights, features, embedded, (FULL, FULL))
    close(found, 2.0 * np.tanh(outputs @ weights["lm_head.weight"].T / 2.0))


def speculators(method: str, **changes: Any) -> dict[str, Any]:
    return {
        "speculators_model_type": method,
        "transformer_layer_config": {**BODY, **SLIDING},
        "aux_hidden_state_layer_ids": [1, 4, 6],
        "mask_token_id": MASK,
        "block_size": 5,
        "draft_vocab_size": REDUCED,
        **changes,
    }


def reduced(weights: Weights) -> Weights:
    """A head over every second token."""
    weights.matrix("lm_head.weight", REDUCED, HIDDEN)
    ids = torch.arange(REDUCED) * 2 + 1
    weights.tensors["d2t"] = ids - torch.arange(REDUCED)
    weights.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill(0, ids, True)
    return weights


@pytest.mark.parametrize("non_causal", [None, False, True])
def test_the_format_of_speculators(tmp_path: Path, non_causal: bool | None) -> None:
    """A reduced vocabulary, layers counted by their inputs, windows that are causal or not."""
    weights = reduced(ref.block_weights(5))
    flag = {} if non_causal is None else {"sliding_window_non_causal": non_causal}
    net = load_head(weights.write(tmp_path, speculators("dflash", **flag)), TARGET)
    assert isinstance(net, DFlash) and net.points == (1, 4, 6) and net.shape.first_row == 1
    views = (View(WINDOW, causal=not non_causal), FULL)
    runner, tokens = make(net, features_of(17)), [11, *[MASK] * 4]
    outputs = outputs_of(runner, 17, tokens)
    logits = runner.logits(outputs)
    assert torch.isinf(logits[:, ::2]).all()
    wanted = reference(weights, 17, tokens, views) @ weights["lm_head.weight"].T
    close(logits[:, 1 : 2 * REDUCED : 2], wanted)


@pytest.mark.parametrize("by_token", [True, False])
@pytest.mark.parametrize("kind", ["vanilla", "gated"])
def test_dspark(tmp_path: Path, kind: str, by_token: bool) -> None:
    """DeepSpec's flat layout with tables of its own, the Markov part and the judgement."""
    weights = ref.with_markov(ref.block_weights(6), VOCAB, kind, by_token=by_token)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    weights.matrix("embed_tokens.weight", VOCAB, HIDDEN)
    config = {
        **BODY, "architectures": ["Qwen3DSparkModel"], "block_size": 4, "num_anchors": 512,
        "target_layer_ids": [-1, 3, 5], "mask_token_id": MASK, "markov_rank": RANK,
        "markov_head_type": kind, "enable_confidence_head": True,
        "confidence_head_with_markov": by_token,
    }  # fmt: skip
    net = load_head(weights.write(tmp_path, config), TARGET)
    assert isinstance(net, DSpark) and net.points == (0, 4, 6)
    assert (net.shape.first_row, net.shape.max_drafts) == (0, 4)
    runner, tokens, previous = make(net, features_of(17)), [11, *[MASK] * 3], [11, 5, 60, 2]
    outputs = outputs_of(runner, 17, tokens)
    embedded = weights["embed_tokens.weight"][tokens]
    features = features_of(17).double().numpy()
    wanted = ref.block_outputs(weights, features, embedded, (FULL, FULL))
    before = torch.tensor(previous)
    logits = wanted @ weights["lm_head.weight"].T + ref.markov_term(weights, wanted, previous)
    with torch.inference_mode():
        close(net.after(runner.own_logits(outputs), outputs, before), logits)
        sure = net.sure(outputs, before)
    assert sure is not None
    close(sure, ref.confidence(weights, wanted, previous))


def test_numbers_that_speculators_leaves_out(tmp_path: Path) -> None:
    """They are those that transformers takes for a Qwen3 config's."""
    config = speculators("dflash")
    del config["transformer_layer_config"]["head_dim"]
    folder = reduced(ref.block_weights(5)).write(tmp_path, config)
    with pytest.raises(CheckpointError, match=r"tensor shape.*\[512, 32\]"):
        load_head(folder, TARGET)


def test_dspark_in_the_format_of_speculators(tmp_path: Path) -> None:
    """Tokens of the target select what is added to logits of the reduced vocabulary."""
    weights = ref.with_markov(reduced(ref.block_weights(8)), REDUCED, "vanilla")
    config = speculators("dspark", markov_rank=RANK, markov_head_type="vanilla")
    net = load_head(weights.write(tmp_path, config), TARGET)
    assert isinstance(net, DSpark) and net.shape.first_row == 0
    runner, tokens, previous = make(net, features_of(9)), [11, MASK, MASK], [11, 40, 2]
    outputs = outputs_of(runner, 9, tokens)
    wanted = reference(weights, 9, tokens, (SLIDES, FULL))
    with torch.inference_mode():
        own = net.after(runner.own_logits(outputs), outputs, torch.tensor(previous))
    logits = wanted @ weights["lm_head.weight"].T + ref.markov_term(weights, wanted, previous)
    close(runner.spread(own)[:, 1 : 2 * REDUCED : 2], logits)


def test_without_its_parts_dspark_is_dflash(tmp_path: Path) -> None:
    """Rank 0 and no judgement: the same rows, read one token earlier."""
    weights = ref.block_weights(3)
    config = {**ORIGINAL, "dflash_config": {**DFLASH, "projector_type": "dspark"}}
    config["architectures"] = ["DSparkDraftModel"]
    net = load_head(weights.write(tmp_path, config), TARGET)
    assert isinstance(net, DSpark) and net.shape.first_row == 0 and net.shape.max_drafts == 5
    runner, tokens = make(net, features_of(9)), [11, MASK, MASK]
    outputs = outputs_of(runner, 9, tokens)
    close(outputs, reference(weights, 9, tokens, (FULL, FULL)))
    previous = torch.tensor(tokens)
    assert torch.equal(
        net.after(runner.own_logits(outputs), outputs, previous), runner.own_logits(outputs)
    )
    assert net.sure(outputs, previous) is None


def proposing(count: int) -> dict[str, Any]:
    return {"speculators_config": {"proposal_methods": [{"speculative_tokens": count}]}}


@pytest.mark.parametrize(
    ("method", "changes", "first_row"),
    [
        ("dflash", {}, 1),
        ("dflash", {"sample_from_anchor": True}, 0),
        ("dflash", proposing(4), 1),
        ("dspark", {}, 0),
        ("dspark", {"sample_from_anchor": False}, 1),
        ("dspark", proposing(4), 1),
        ("dspark", {**proposing(4), "sample_from_anchor": True}, 0),
    ],
)
def test_which_row_drafts_first(
    tmp_path: Path, method: str, changes: dict[str, Any], first_row: int
) -> None:
    """As the file says; else by how many drafts it promises; else as usual for the method."""
    weights = reduced(ref.block_weights(5))
    net = load_head(weights.write(tmp_path, speculators(method, **changes)), TARGET)
    assert isinstance(net, BlockHead) and net.shape.first_row == first_row


def test_positions_and_layers_that_a_file_does_not_name(tmp_path: Path) -> None:
    """The published defaults; scaled positions; a last layer that only training reads."""
    weights = ref.block_weights(3)
    config: dict[str, Any] = {**ORIGINAL, "dflash_config": {"mask_token_id": MASK}}
    net = load_head(weights.write(tmp_path / "usual", config), TARGET)
    assert net.points == (2, 4, 6)
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    config = {**ORIGINAL, "dflash_config": DFLASH, "rope_scaling": yarn, "rope_theta": 5e5}
    net = load_head(weights.write(tmp_path / "yarn", config), TARGET)
    assert isinstance(net, DFlash)
    rope = net.shape.rope
    assert (rope.rope_type, rope.factor, rope.theta) == ("yarn", 4.0, 5e5)
    assert net.shape.layer.max_position_embeddings == 128
    own = {**ORIGINAL, "dflash_config": DFLASH, "max_position_embeddings": 64}
    net = load_head(weights.write(tmp_path / "short", own), TARGET)
    assert isinstance(net, DFlash)
    assert net.shape.layer.max_position_embeddings == 128, "plain positions go on"
    more = speculators("dflash", aux_hidden_state_layer_ids=[1, 4, 6, 8])
    net = load_head(reduced(weights).write(tmp_path / "more", more), TARGET)
    assert net.points == (1, 4, 6)


BAD: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "sinks": ({"attention_sink_bias": True}, UnsupportedModelError, "attention_sink_bias"),
    "sinks of windows": (
        {"add_swa_attention_sink_bias": True},
        UnsupportedModelError,
        "add_swa_attention_sink_bias",
    ),
    "values": ({"attention_value_scale": 0.7}, UnsupportedModelError, "attention_value_scale"),
    "pairs": ({"is_neox_style": False}, UnsupportedModelError, "is_neox_style"),
    "selector": ({"selector_rank": 256}, UnsupportedModelError, "selector_rank.*DFlash2"),
    "convolutions": ({"conv_kernel_size": 2}, UnsupportedModelError, "conv_kernel_size"),
    "latent": ({"attention_mode": "mla"}, UnsupportedModelError, "attention_mode"),
    "projector": ({"projector_type": "domino"}, UnsupportedModelError, "projector_type"),
    "no mask": ({"mask_token_id": None}, CheckpointError, "mask_token_id"),
    "another mask": ({"mask_token_id": VOCAB}, CheckpointError, "mask_token_id.*below 61"),
    "last layer": ({"target_layer_ids": [1, 3, 7]}, ConfigError, "target's 8, the last one not"),
    "twice": ({"target_layer_ids": [1, 1, 5]}, ConfigError, "3 different layers"),
    "few layers": ({"target_layer_ids": [1, 5]}, ConfigError, "3 different layers"),
    "no window": ({"use_swa": True}, CheckpointError, "sliding_window"),
}
BAD_BODY: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "no size": ({"block_size": None}, CheckpointError, "block_size"),
    "one row": ({"block_size": 1}, CheckpointError, "block_size.*more than 1"),
    "another target": ({"num_target_layers": 36}, ConfigError, "num_target_layers 36"),
    "activation": ({"hidden_act": "gelu"}, UnsupportedModelError, "hidden_act"),
    "layers": ({"layer_types": ["full_attention"]}, CheckpointError, "layer_types"),
    "positions": (
        {"rope_scaling": {"rope_type": "default", "mrope_section": [1, 2, 1]}},
        UnsupportedModelError,
        "one kind of positions",
    ),
    "dflash2": ({"architectures": ["DFlash2DraftModel"]}, NotYetError, "dflash2"),
    "gemma": ({"architectures": ["Gemma4DSparkModel"]}, UnsupportedModelError, "Gemma4DSpark"),
    "muse": (
        {"architectures": ["MuseGlimmerAssistantModel"]},
        UnsupportedModelError,
        "MuseGlimmer",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_is_not_run_is_named(tmp_path: Path, name: str) -> None:
    changes, error, message = BAD[name]
    config = {**ORIGINAL, "dflash_config": {**DFLASH, **changes}}
    with pytest.raises(error, match=message):
        load_head(ref.block_weights(3).write(tmp_path, config), TARGET)


@pytest.mark.parametrize("name", BAD_BODY)
def test_what_does_not_fit_is_named(tmp_path: Path, name: str) -> None:
    changes, error, message = BAD_BODY[name]
    config = {**ORIGINAL, "dflash_config": DFLASH, **changes}
    with pytest.raises(error, match=message):
        load_head(ref.block_weights(3).write(tmp_path, config), TARGET)


def test_tensors_that_do_not_fit_are_named(tmp_path: Path) -> None:
    """Another width, a reduced head without ids, sinks, a kind of Markov head that is not run."""
    config = {**ORIGINAL, "dflash_config": DFLASH}
    with pytest.raises(ConfigError, match="fc over 100"):
        weights = ref.block_weights(3)
        weights.matrix("fc.weight", HIDDEN, 100)
        load_head(weights.write(tmp_path / "a", config), TARGET)
    with pytest.raises(CheckpointError, match="d2t"):
        weights = ref.block_weights(3)
        weights.matrix("lm_head.weight", REDUCED, HIDDEN)
        load_head(weights.write(tmp_path / "b", config), TARGET)
    with pytest.raises(CheckpointError, match="unused tensors.*sinks"):
        weights = ref.block_weights(3)
        weights.vector("layers.0.self_attn.sinks", 4)
        load_head(weights.write(tmp_path / "c", config), TARGET)
    with pytest.raises(CheckpointError, match="missing tensors.*q_norm"):
        weights = ref.block_weights(3)
        del weights.tensors["layers.0.self_attn.q_norm.weight"]
        load_head(weights.write(tmp_path / "d", config), TARGET)
    with pytest.raises(UnsupportedModelError, match="markov_head_type"):
        config = {**BODY, "architectures": ["Qwen3DSparkModel"], "block_size": 4, **DFLASH}
        more = {"markov_rank": RANK, "markov_head_type": "rnn"}
        load_head(ref.block_weights(3).write(tmp_path / "e", {**config, **more}), TARGET)


def test_copies_of_the_targets_head_are_given_up(tmp_path: Path) -> None:
    weights = ref.block_weights(4)
    weights.matrix("lm_head.weight", VOCAB, HIDDEN)
    folder = weights.write(tmp_path, {**ORIGINAL, "dflash_config": DFLASH})
    for differs in (True, False):
        net = load_head(folder, TARGET)
        assert isinstance(net, DFlash) and net.shape.own_head
        net.use_head(Embedding(weights.tensors["lm_head.weight"] + differs))
        assert net.shape.own_head == differs == bool(net.tops)
