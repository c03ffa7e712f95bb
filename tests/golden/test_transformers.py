"""Logits agree with Hugging Face's own model classes, however the sequence is cut and paged, those
of checkpoints that see and of narrow types too."""

import inspect
import json
import json.decoder
import math
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import DynamicCache

from foretoken import LLM, SamplingParams
from foretoken.checkpoint import packaged_model
from foretoken.errors import CheckpointError, PromptError
from foretoken.runtime.runner import Runner
from foretoken.shape import ModelShape
from foretoken.text.tokenizer import Tokenizer
from tests.golden.families import (
    BASE,
    BY_TRANSFORMERS,
    GEMMA4,
    LONGROPE,
    MINISTRAL3,
    OWN,
    VOCAB,
    expected_greedy,
    expected_logits,
    transformers_cases,
    write_checkpoint,
)
from tests.golden.scenario import cut, forward, in_pieces, open_runner, tables
from tests.marks import slow, slow_but

LENGTH, TOLERANCE = 75, 1e-4
PHI3 = {"hidden_size": 32, "rope_parameters": LONGROPE, "original_max_position_embeddings": 40}


def assert_close(found: Tensor, expected: Tensor) -> None:
    assert found.dtype == torch.float32
    assert found.shape == expected.shape
    assert expected.std() > 0.3, "logits too small to tell right from wrong"
    assert (found - expected).abs().max().item() < TOLERANCE


def assert_all_cuts_agree(runner: Runner, model: Any, seed: str, lengths: tuple[int, ...]) -> None:
    """Whole, in pieces, and in batches; pages in order and scattered, full of old numbers."""
    draw = random.Random(seed)
    sequences = [[draw.randrange(VOCAB) for _ in range(n)] for n in lengths]
    wanted = [expected_logits(model, ids) for ids in sequences]
    for together in (True, False):
        ids, want = sequences[0], wanted[0]
        pages = tables(draw, [len(ids)], together=together)[0]
        assert_close(forward(runner, [(ids, 0, len(ids), pages)]), want)
        pieces = cut(draw, len(ids), [1, 1, 2, 5, 9, 30])
        assert_close(in_pieces(runner, ids, pages, pieces), want)
        all_pages = tables(draw, [len(s) for s in sequences], together=together)
        whole = [(s, 0, len(s), p) for s, p in zip(sequences, all_pages, strict=True)]
        assert_close(forward(runner, whole), torch.cat(wanted))


def assert_greedy_agrees(folder: Path, model: Any, **settings: Any) -> None:
    """`LLM` writes what transformers' generate writes, prompts in one batch."""
    draw = random.Random(1)
    prompts = [[draw.randrange(VOCAB) for _ in range(n)] for n in (30, 7)]
    with LLM(str(folder), dtype="float32", max_model_len=60, **settings) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=24, detokenize=False)
        batch = [{"prompt_token_ids": ids} for ids in prompts]
        outputs = llm.generate(batch, params, use_tqdm=False)
    found = [list(output.outputs[0].token_ids) for output in outputs]
    assert found == [expected_greedy(model, ids, 24) for ids in prompts]
    assert len({*found[0], *found[1]}) > 2, "a model that says one thing"


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", OWN)
def test_logits_agree(case: str, batch_invariant: bool, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *OWN[case])
    runner = open_runner(tmp_path, batch_invariant=batch_invariant)
    assert_all_cuts_agree(runner, model, case, (LENGTH, 9, 40, 23))


@pytest.mark.parametrize("case", slow_but(OWN))
def test_greedy_tokens_agree(case: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *OWN[case])
    assert_greedy_agrees(tmp_path, model)


@pytest.mark.parametrize("batch_invariant", [False, True])
@pytest.mark.parametrize("case", transformers_cases())
def test_logits_agree_through_transformers(
    case: str, batch_invariant: bool, tmp_path: Path
) -> None:
    model = write_checkpoint(tmp_path, *BY_TRANSFORMERS[case])
    assert not ModelShape.from_config(tmp_path).is_own
    runner = open_runner(tmp_path, batch_invariant=batch_invariant)
    assert_all_cuts_agree(runner, model, case, (LENGTH, 9, 40, 23))


@pytest.mark.parametrize("case", transformers_cases())
def test_greedy_tokens_agree_through_transformers(case: str, tmp_path: Path) -> None:
    model = write_checkpoint(tmp_path, *BY_TRANSFORMERS[case])
    assert_greedy_agrees(tmp_path, model)


def test_longrope_long(tmp_path: Path) -> None:
    """Sequences longer than the original context: transformers takes the long factors for all."""
    model = write_checkpoint(tmp_path, "Phi3", PHI3)
    runner = open_runner(tmp_path)
    assert_all_cuts_agree(runner, model, "long", (LENGTH, 41, 52))


def test_longrope_short(tmp_path: Path) -> None:
    """An engine that stays within the original context takes the short factors."""
    model = write_checkpoint(tmp_path, "Phi3", PHI3)
    runner = open_runner(tmp_path, max_model_len=40)
    assert_all_cuts_agree(runner, model, "short", (40, 9, 23))


def test_dynamic_rope(tmp_path: Path) -> None:
    """Each position as in transformers' decoding, token by token, past the original context."""
    rope = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0}
    changes = {"rope_parameters": rope, "max_position_embeddings": 40}
    model = write_checkpoint(tmp_path, "Llama", changes)
    assert ModelShape.from_config(tmp_path).max_position_embeddings == 80
    draw = random.Random(2)
    ids = [draw.randrange(VOCAB) for _ in range(LENGTH)]
    rows, cache = [], DynamicCache()
    with torch.no_grad():
        for at in range(LENGTH):
            # The cache by its place: its name is another one since transformers 5.24.
            out = model(torch.tensor([ids[at : at + 1]]), None, None, cache, use_cache=True)
            rows.append(out.logits[0])
    want, runner = torch.cat(rows), open_runner(tmp_path)
    pages = tables(draw, [LENGTH], together=False)[0]
    assert_close(forward(runner, [(ids, 0, LENGTH, pages)]), want)
    assert_close(in_pieces(runner, ids, pages, cut(draw, LENGTH, [1, 2, 9])), want)
    assert_greedy_agrees(tmp_path, model)


def test_old_names_of_rope_fields(tmp_path: Path) -> None:
    """rope_scaling beside rope_theta, `type` for `rope_type`, as in most files on the hub."""
    rope = {**OWN["llama llama3 rope"][1]["rope_parameters"]}
    model = write_checkpoint(tmp_path, "Llama", {"rope_parameters": rope})
    path = tmp_path / "config.json"
    config = json.loads(path.read_text())
    scaling = config.pop("rope_parameters")
    config["rope_theta"] = scaling.pop("rope_theta")
    scaling["type"] = scaling.pop("rope_type")
    path.write_text(json.dumps({**config, "rope_scaling": scaling}))
    assert_all_cuts_agree(open_runner(tmp_path), model, "old", (LENGTH, 9))


def test_sharded_checkpoint(tmp_path: Path) -> None:
    kind, changes = OWN["llama plain heads untied"]
    model = write_checkpoint(tmp_path, kind, changes, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    ids = list(range(30))
    runner = open_runner(tmp_path)
    pages = tables(random.Random(0), [30], together=True)[0]
    assert_close(forward(runner, [(ids, 0, 30, pages)]), expected_logits(model, ids))


def test_parameter_count(tmp_path: Path) -> None:
    for name, (kind, changes) in OWN.items():
        folder = tmp_path / name.replace(" ", "-")
        model = write_checkpoint(folder, kind, changes)
        shape = ModelShape.from_config(folder)
        count = sum(p.numel() for p in model.parameters())
        assert shape.parameter_count() == count, name
        assert shape.weight_bytes(2) == 2 * count
        heads = json.loads((folder / "config.json").read_text())["num_key_value_heads"]
        per_token = shape.kv_bytes_per_token(4)
        assert per_token == shape.num_hidden_layers * 2 * heads * shape.head_dim * 4


# The text decoders of checkpoints that see, against transformers' own classes. The guarded bugs:
# a prefix that is not known, a part of the tower taken for the decoder, a misspelt tensor that
# passes, a field of the wrong part of config.json.
LLAVA_TOWER = {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2}
TOWER = {"num_hidden_layers": 1, "image_size": 28, "patch_size": 14, **LLAVA_TOWER}
MROPE = {"rope_type": "default", "mrope_section": [1, 2, 3], "rope_theta": 5000.0}
QWEN_TOWER = {"depth": 1, "num_heads": 2}
IDS = {"image_token_id": 60, "video_token_id": 61, "vision_start_token_id": 62}
GEMMA = {
    "head_dim": 16,
    "query_pre_attn_scalar": 20,
    "sliding_window": 9,
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "gemma3": (
        "Gemma3",
        {**GEMMA, "model_type": "gemma3_text"},
        TOWER,
        {"mm_tokens_per_image": 4, "image_token_index": 60},
    ),
    "mistral3": (
        "Mistral3",
        {"model_type": "mistral", "head_dim": 8, "sliding_window": None},
        {**TOWER, "head_dim": 8, "model_type": "pixtral"},
        {"image_token_index": 60, "tie_word_embeddings": False},
    ),
    "mistral3 ministral3": (
        "Mistral3",
        {"model_type": "ministral3", "head_dim": 16, "rope_parameters": MINISTRAL3},
        {**TOWER, "head_dim": 8, "model_type": "pixtral"},
        {"image_token_index": 60},
    ),
    "qwen2_vl": (
        "Qwen2VL",
        {"rope_parameters": MROPE},
        {**QWEN_TOWER, "embed_dim": 16, "hidden_size": 48},
        IDS,
    ),
    "qwen2_5_vl tied": (
        "Qwen2_5_VL",
        {"rope_parameters": MROPE},
        {**QWEN_TOWER, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 48},
        {**IDS, "tie_word_embeddings": True},
    ),
    "qwen3_vl": (
        "Qwen3VL",
        {"rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 12},
        {
            **QWEN_TOWER, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 48,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
        IDS,
    ),
    "gemma4": (
        "Gemma4",
        {
            **GEMMA4, "model_type": "gemma4_text", "hidden_size_per_layer_input": 0,
            "pad_token_id": 0,
        },
        {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "head_dim": 8,
            "num_attention_heads": 2, "num_key_value_heads": 2,
        },
        {"audio_config": None},
    ),
    "qwen3_vl_moe": (
        "Qwen3VLMoe",
        {
            "rope_parameters": {**MROPE, "mrope_interleaved": True}, "head_dim": 12,
            "num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 20,
        },
        {
            **QWEN_TOWER, "hidden_size": 16, "intermediate_size": 16, "out_hidden_size": 48,
            "deepstack_visual_indexes": [0], "num_position_embeddings": 16,
        },
        IDS,
    ),
}  # fmt: skip


def write_multimodal(folder: Path, case: str) -> Any:
    """Save a random model with its tower, and return it."""
    import transformers

    torch.manual_seed(3)
    name, text, tower, fields = CASES[case]
    config = getattr(transformers, f"{name}Config")(
        text_config={**BASE, **text}, vision_config=tower, **fields
    )
    made: Any = getattr(transformers, f"{name}ForConditionalGeneration")
    model = made._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 1:
                parameter.uniform_(0.5, 1.5)
            else:
                parameter.normal_(0, 0.2)
    model.save_pretrained(folder)
    return model


def renamed(folder: Path, new_name: Callable[[str], str]) -> None:
    path = folder / "model.safetensors"
    save_file({new_name(name): tensor for name, tensor in load_file(path).items()}, path)


def plain(name: str) -> str:
    """As a text model of its own has it."""
    for prefix in ("model.language_model.", "language_model.model."):
        if name.startswith(prefix):
            return "model." + name.removeprefix(prefix)
    return name.removeprefix("language_model.") if "lm_head" in name else name


def published(name: str) -> str:
    """As before transformers 5."""
    name = plain(name)
    if name.startswith(("model.layers", "model.embed_tokens", "model.norm", "lm_head")):
        return f"language_model.{name}"
    return name.removeprefix("model.")


def newer(name: str) -> str:
    """As transformers 5 names its modules."""
    name = plain(name)
    if name.startswith(("model.layers", "model.embed_tokens", "model.norm")):
        return "model.language_model." + name.removeprefix("model.")
    return name if name.startswith(("lm_head", "model.")) else f"model.{name}"


PREFIXES = {"published": published, "newer": newer, "plain": plain}


@pytest.mark.parametrize("case", CASES)
def test_logits_agree_seeing(case: str, tmp_path: Path) -> None:
    model = write_multimodal(tmp_path, case)
    shape = ModelShape.from_config(tmp_path)
    assert shape.is_own and shape.inside == case.split()[0]
    assert_all_cuts_agree(open_runner(tmp_path), model, case, (LENGTH, 9, 23))


@pytest.mark.parametrize("style", PREFIXES)
@pytest.mark.parametrize("case", CASES)
def test_every_prefix_is_read_and_a_misspelt_name_is_not(
    case: str, style: str, tmp_path: Path
) -> None:
    model = write_multimodal(tmp_path, case)
    renamed(tmp_path, PREFIXES[style])
    ids = list(range(30))
    found = forward(open_runner(tmp_path), [(ids, 0, 30, list(range(8)))])
    assert_close(found, expected_logits(model, ids))
    renamed(tmp_path, lambda name: name.replace("layers.1.self_attn.q_proj", "layers.1.attn.q"))
    with pytest.raises(CheckpointError, match=r"q_proj|attn\.q"):
        open_runner(tmp_path)


def test_tensors_of_no_known_network_are_an_error(tmp_path: Path) -> None:
    write_multimodal(tmp_path, "gemma3")
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    save_file({**tensors, "mtp.fc.weight": torch.zeros(2)}, path)
    open_runner(tmp_path)
    save_file({**tensors, "vision_towel.weight": torch.zeros(2)}, path)
    with pytest.raises(CheckpointError, match=r"vision_towel\.weight"):
        open_runner(tmp_path)


def test_sparse_and_flat_configs(tmp_path: Path) -> None:
    """Fields at the top, as Qwen published them; a text part that leaves out what is usual."""
    write_multimodal(tmp_path, "qwen2_5_vl tied")
    nested = ModelShape.from_config(tmp_path)
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    text = config.pop("text_config")
    positions = text.pop("rope_parameters")
    flat = {**text, **config, "rope_theta": positions.pop("rope_theta")}
    flat["rope_scaling"] = {"type": "mrope", "mrope_section": positions["mrope_section"]}
    file.write_text(json.dumps(flat))
    assert ModelShape.from_config(tmp_path) == nested


def test_contradictions_about_the_head(tmp_path: Path) -> None:
    """The files decide where one part says that head and table are one and the other does not."""
    write_multimodal(tmp_path, "mistral3")
    file = tmp_path / "config.json"
    config = {**json.loads(file.read_text()), "tie_word_embeddings": True}
    file.write_text(json.dumps(config))
    assert not ModelShape.from_config(tmp_path).tie_word_embeddings
    path = tmp_path / "model.safetensors"
    kept = {name: one for name, one in load_file(path).items() if "lm_head" not in name}
    save_file(kept, path)
    assert ModelShape.from_config(tmp_path).tie_word_embeddings
    open_runner(tmp_path)


def test_placeholders_in_a_prompt(tmp_path: Path) -> None:
    write_multimodal(tmp_path, "qwen3_vl")
    with LLM(str(tmp_path), dtype="float32", max_model_len=40) as llm:
        llm.generate([{"prompt_token_ids": [1, 2, VOCAB - 1]}], use_tqdm=False)
        for name, token in IDS.items():
            with pytest.raises(PromptError, match=f"{token}, the {name}"):
                llm.generate([{"prompt_token_ids": [1, token]}], use_tqdm=False)


NARROW_CASES = (
    "llama biases", "qwen3 wide heads", "gemma2", "gemma3 usual layers", slow("ministral3"),
    slow("olmo3"),
)  # fmt: skip


@pytest.mark.parametrize("case", NARROW_CASES)
def test_logits_are_those_of_float32(case: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *OWN[case])
    draw = random.Random(case)
    ids = [draw.randrange(VOCAB) for _ in range(40)]
    pages = list(range(20))
    expected = forward(open_runner(tmp_path), [(ids, 0, 40, pages)])
    runner = open_runner(tmp_path, dtype=torch.float16, batch_invariant=True)
    found = forward(runner, [(ids, 0, 40, pages)])
    assert found.dtype == torch.float32
    assert (found - expected).abs().max() < 0.06 * expected.std()
    assert torch.equal(in_pieces(runner, ids, pages, [1] * 20 + [7, 13]), found)


def test_speculation_changes_nothing(tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *OWN["qwen3 wide heads"])
    params = SamplingParams(temperature=0.8, seed=3, max_tokens=30, detokenize=False)
    prompts = [{"prompt_token_ids": [1, 2, 3, 1, 2]}, {"prompt_token_ids": [9, 8]}]
    written = []
    for speculative in (None, {"method": "ngram", "prompt_lookup_min": 1}):
        with LLM(str(tmp_path), dtype="float16", speculative_config=speculative) as llm:
            found = llm.generate(prompts, params, use_tqdm=False)
        written.append([one.outputs[0].token_ids for one in found])
    assert written[0] == written[1]


# What int8 keys and values cost the packaged model: hardly anything, but something. The guarded
# bugs: a scale of the wrong token or head, values read with the keys' scale, a setting that is
# accepted and does nothing.
NARROW_LENGTH = 480


def logits(ids: list[int], kv_store_dtype: torch.dtype | None) -> Tensor:
    """Of every token, read in two chunks and then one by one."""
    runner = open_runner(packaged_model("demo"), dtype=torch.float32, kv_store_dtype=kv_store_dtype)
    pages = list(range(len(ids)))
    cuts = [0, 200, 450, *range(451, len(ids) + 1)]
    spans = [(ids, start, stop, pages) for start, stop in zip(cuts, cuts[1:], strict=False)]
    return torch.cat([forward(runner, [span]) for span in spans])


def bits_per_token(logits_TV: Tensor, ids: list[int]) -> float:
    """Mean surprise at the next token."""
    next_T = torch.tensor(ids[1:])
    return torch.nn.functional.cross_entropy(logits_TV[:-1], next_T).item() / math.log(2)


def test_hardly_another_model() -> None:
    tokenizer = Tokenizer.of_folder(packaged_model("demo"))
    assert tokenizer is not None
    ids = list(tokenizer.encode(inspect.getsource(json.decoder)))[:NARROW_LENGTH]
    wide, rounded = (logits(ids, dtype) for dtype in (None, torch.int8))
    error = (wide - rounded).pow(2).mean().sqrt() / wide.std()
    assert 1e-5 < error < 0.02, error
    assert (wide.argmax(-1) == rounded.argmax(-1)).float().mean() > 0.98
    before, after = bits_per_token(wide, ids), bits_per_token(rounded, ids)
    assert before < 5 and abs(after / before - 1) < 0.001, (before, after)
