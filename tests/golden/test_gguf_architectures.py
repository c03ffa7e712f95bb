"""Each architecture of GGUF files: a file of a tiny checkpoint gives transformers' logits.

The guarded bugs: heads in another order, 1 added to a norm twice, fused matrices cut elsewhere,
positions that are not those of the metadata, what no file says and every reader has to know.
"""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

from tests.golden.families import LONGROPE, OWN, VOCAB, YARN, expected_logits, write_checkpoint
from tests.golden.gguf_files import More, write_gguf
from tests.golden.scenario import cut, forward, in_pieces, open_runner, tables
from tests.golden.test_multimodal import write_multimodal
from tests.golden.test_transformers import LENGTH, assert_close

Write = Callable[[Path], Any]
Kinds = gguf.RopeScalingType


def own(case: str, **changes: Any) -> Write:
    kind, fields = OWN[case]
    return lambda folder: write_checkpoint(folder, kind, {**fields, **changes})


def text(kind: str, **changes: Any) -> Write:
    return lambda folder: write_checkpoint(folder, kind, changes)


def theta(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    ropes = config["rope_parameters"]
    writer.add_rope_freq_base(ropes.get("full_attention", ropes)["rope_theta"])


def yarn(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    rope = config["rope_parameters"]
    rope = rope.get("full_attention", rope)
    theta(writer, config)
    writer.add_rope_scaling_type(Kinds.YARN)
    writer.add_rope_scaling_factor(rope["factor"])
    writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if "beta_fast" in rope:
        writer.add_rope_scaling_yarn_beta_fast(rope["beta_fast"])
        writer.add_rope_scaling_yarn_beta_slow(rope["beta_slow"])
    if "attention_factor" in rope:
        writer.add_rope_scaling_yarn_attn_factor(rope["attention_factor"])


def linear(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    theta(writer, config)
    writer.add_rope_scaling_type(Kinds.LINEAR)
    writer.add_rope_scaling_factor(config["rope_parameters"]["factor"])


def window(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    theta(writer, config)
    writer.add_sliding_window(config["sliding_window"] or 0)


def ministral3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    yarn(writer, config)
    rope = config["rope_parameters"]
    writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
    writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def olmo3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    yarn(writer, config)
    writer.add_sliding_window(config["sliding_window"])
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(pattern)


def gemma2(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As converted: no base, no period."""
    writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
    writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    writer.add_sliding_window(config["sliding_window"])


def gemma3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    """As older files have it: neither the pattern nor the base of layers with a window."""
    window(writer, config)
    scaling = config["rope_parameters"]["full_attention"]
    if scaling["rope_type"] == "linear":
        writer.add_rope_scaling_type(Kinds.LINEAR)
        writer.add_rope_scaling_factor(scaling["factor"])


def newer_gemma3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    gemma3(writer, config)
    pattern = [kind == "sliding_attention" for kind in config["layer_types"]]
    writer.add_sliding_window_pattern(pattern)
    base = config["rope_parameters"]["sliding_attention"]["rope_theta"]
    writer.add_float32("gemma3.rope.freq_base_swa", base)


def phi3(writer: gguf.GGUFWriter, config: dict[str, Any]) -> None:
    window(writer, config)
    rope = config["rope_parameters"]
    original = config.get("original_max_position_embeddings")
    writer.add_rope_scaling_orig_ctx_len(original or config["max_position_embeddings"])
    size = config["hidden_size"] // config["num_attention_heads"]
    writer.add_rope_dimension_count(int(size * rope.get("partial_rotary_factor", 1.0)))
    for name in ("long", "short"):
        if f"{name}_factor" in rope:
            factors = np.array(rope[f"{name}_factor"], np.float32)
            writer.add_tensor(f"rope_factors_{name}.weight", factors)


GEMMA = {"query_pre_attn_scalar": 16}
PHI = {"hidden_size": 32, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 500.0},
}
CASES: dict[str, tuple[str, Write, More]] = {
    "llama": ("llama", own("llama other theta"), theta),
    "llama biases": ("llama", own("llama biases"), theta),
    "llama linear": ("llama", own("llama linear rope"), linear),
    "llama yarn": ("llama", own("llama yarn rope"), yarn),
    "mistral": ("llama", own("mistral window"), window),
    "mistral3": ("mistral3", own("mistral no window"), theta),
    "ministral3": ("mistral3", own("ministral3"), ministral3),
    "smollm3": ("smollm3", own("smollm3"), theta),
    "olmo2": ("olmo2", own("olmo2"), theta),
    "olmo3": ("olmo2", own("olmo3"), olmo3),
    "qwen2": ("qwen2", own("qwen2"), theta),
    "qwen2 yarn": ("qwen2", text("Qwen2", rope_parameters=YARN), yarn),
    "qwen2vl": ("qwen2vl", lambda folder: write_multimodal(folder, "qwen2_vl"), theta),
    "qwen3": ("qwen3", own("qwen3 tied"), theta),
    "qwen3vl": ("qwen3vl", lambda folder: write_multimodal(folder, "qwen3_vl"), theta),
    "gemma": ("gemma", own("gemma"), lambda writer, config: None),
    "gemma2": ("gemma2", own("gemma2", **GEMMA), gemma2),
    "gemma3": ("gemma3", own("gemma3 usual layers", **GEMMA), gemma3),
    "gemma3 newer": (
        "gemma3",
        own("gemma3 two kinds of positions", **GEMMA, rope_parameters=LOCAL),
        newer_gemma3,
    ),
    "phi3 window": ("phi3", own("phi3 window"), phi3),
    "phi3 partial rotary": ("phi3", own("phi3 partial rotary"), phi3),
    "phi3 long": ("phi3", text("Phi3", **PHI), phi3),
}


@pytest.mark.parametrize("case", CASES)
def test_logits_agree(case: str, tmp_path: Path) -> None:
    arch, write, more = CASES[case]
    model = write(tmp_path)
    path = write_gguf(tmp_path, arch, more)
    draw = random.Random(case)
    ids = [draw.randrange(VOCAB) for _ in range(LENGTH)]
    pages = tables(draw, [LENGTH], together=False)[0]
    runner, wanted = open_runner(path, batch_invariant=True), expected_logits(model, ids)
    found = forward(runner, [(ids, 0, LENGTH, pages)])
    assert_close(found, wanted)
    assert torch.equal(in_pieces(runner, ids, pages, cut(draw, LENGTH, [1, 2, 9])), found)


def test_short_factors_are_chosen_by_the_longest_context(tmp_path: Path) -> None:
    model = text("Phi3", **PHI)(tmp_path)
    runner = open_runner(write_gguf(tmp_path, "phi3", phi3), max_model_len=40)
    ids = list(range(40))
    found = forward(runner, [(ids, 0, 40, list(range(10)))])
    assert_close(found, expected_logits(model, ids))


def test_a_model_in_parts(tmp_path: Path) -> None:
    model = own("llama other theta")(tmp_path)
    whole = gguf.GGUFReader(write_gguf(tmp_path, "llama", theta))
    stored = [(one.name, np.array(one.data)) for one in whole.tensors]
    paths = [tmp_path / f"parts-{i:05}-of-00002.gguf" for i in (1, 2)]
    for number, path in enumerate(paths):
        writer = gguf.GGUFWriter(path, "llama")
        for key, entry in whole.fields.items() if number == 0 else ():
            if key.startswith("llama."):
                writer.add_key_value(key, entry.contents(), entry.types[0])
        writer.add_uint16("split.no", number)
        writer.add_uint16("split.count", 2)
        for name, rows in stored[number::2]:
            writer.add_tensor(name, rows)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    ids = list(range(30))
    found = forward(open_runner(paths[0]), [(ids, 0, 30, list(range(8)))])
    assert_close(found, expected_logits(model, ids))
