"""Make models of about one billion parameters whose drafts are accepted at a known rate.

    python benchmarks/make_models.py FOLDER [--shape tiny]
    python benchmarks/make_models.py FOLDER --shape 8b

Llama checkpoints in bfloat16, a tokenizer, and prompts.json with token ids: cycle-target,
cycle-draft-100, -80, -60. The vocabulary is cut into cycles of 50 tokens. The residual stream stays
close to the embedding of the newest token, and the head maps that embedding to the next token of
its cycle by a margin that no rounding can bridge. So every engine in every precision writes the
same text, and a draft whose head is right for 80 % of each cycle is accepted at that rate.

Prompts: `fresh` is source code that ends at the entry of a cycle it has not shown; `echo` runs
through a cycle two and a half times, so that prompt look-up always hits.

`8b` has the sizes of an 8 B Llama with its vocabulary of 128,256. Its draft, right at 80 %, has two
layers of the 1 B model. Every fourth layer of the target has the same weights, which are on disk
once: 4 GB. In memory each layer has its own.
"""

import json
import math
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from common import make_parser
from safetensors.torch import save_file
from tokenizers import Tokenizer
from torch import Tensor

from tools.demo_models.tokenizer import BEGIN_ID, END_ID, save_tokenizer, train_tokenizer
from tools.python_text.stdlib import load_corpus

CONTEXT = 8704
"""More than the long contexts of `never_slower.py`; the models do not depend on positions."""
VOCAB = 32000
NUM_SPECIAL = 2
PERIOD = 50
PROMPT_TOKENS = 128
NUM_STARTS = 6
HEAD_SCALE = 0.02
CYCLE_RESIDUAL_STD = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama-architecture model."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    distinct: int = 0
    """Layers with weights of their own, which the others repeat in turns; 0: all of them."""

    def config(self) -> dict[str, object]:
        sizes = {"hidden_size": self.hidden, "intermediate_size": self.ffn,
                 "num_hidden_layers": self.layers, "num_attention_heads": self.heads,
                 "num_key_value_heads": self.kv_heads, "head_dim": self.hidden // self.heads,
                 "vocab_size": self.vocab, "max_position_embeddings": CONTEXT}  # fmt: skip
        usual = {"rms_norm_eps": 1e-5, "rope_theta": 500000.0, "hidden_act": "silu",
                 "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
                 "initializer_range": 0.02, "tie_word_embeddings": False, "use_cache": True,
                 "torch_dtype": "bfloat16"}  # fmt: skip
        names = {"architectures": ["LlamaForCausalLM"], "model_type": "llama"}
        return {**names, **sizes, **usual, "bos_token_id": BEGIN_ID, "eos_token_id": END_ID}


def gaussian(rows: int, columns: int, std: float, generator: torch.Generator) -> Tensor:
    values = torch.randn(rows, columns, generator=generator)
    return values.mul_(std).to(torch.bfloat16)


def layer_tensors(
    shape: LlamaShape, layer: int, residual_std: float, generator: torch.Generator
) -> Iterator[tuple[str, Tensor]]:
    """Names and random tensors of one layer.

    Matrices that read the residual stream keep its scale. The two that write to it have standard
    deviation residual_std / sqrt(inputs), so each adds about residual_std to a unit stream; at 0
    the layer costs its time and changes nothing.
    """
    wide, narrow = shape.hidden, shape.hidden // shape.heads * shape.kv_heads
    reads = {
        "self_attn.q_proj": (wide, shape.hidden),
        "self_attn.k_proj": (narrow, shape.hidden),
        "self_attn.v_proj": (narrow, shape.hidden),
        "mlp.gate_proj": (shape.ffn, shape.hidden),
        "mlp.up_proj": (shape.ffn, shape.hidden),
    }
    writes = {"self_attn.o_proj": (shape.hidden, wide), "mlp.down_proj": (shape.hidden, shape.ffn)}
    for name, (rows, columns) in (reads | writes).items():
        scale = residual_std if name in writes else 1.0
        matrix = gaussian(rows, columns, scale / math.sqrt(columns), generator)
        yield f"model.layers.{layer}.{name}.weight", matrix
    for norm in ("input_layernorm", "post_attention_layernorm"):
        name = f"model.layers.{layer}.{norm}.weight"
        yield name, torch.ones(shape.hidden, dtype=torch.bfloat16)


def repeated_layers(
    shape: LlamaShape, tensors: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Names of the layers after the distinct ones, and the tensors that they share with these."""
    for layer in range(shape.distinct, shape.layers):
        own, shared = (f"model.layers.{n}." for n in (layer, layer % shape.distinct))
        for name, tensor in tensors.items():
            if name.startswith(shared):
                yield own + name.removeprefix(shared), tensor


def write_model(
    folder: Path, shape: LlamaShape, tensors: dict[str, Tensor], tokenizer: Tokenizer
) -> None:
    """Write weights, configuration and tokenizer as one Hugging Face folder."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors["model.norm.weight"] = torch.ones(shape.hidden, dtype=torch.bfloat16)
    if shape.distinct:
        torch.save(tensors, folder / "pytorch_model.bin")  # safetensors keep no shared tensors
    else:
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(shape.config(), indent=2) + "\n")
    generation = {"bos_token_id": BEGIN_ID, "eos_token_id": END_ID, "pad_token_id": END_ID}
    (folder / "generation_config.json").write_text(json.dumps(generation, indent=2) + "\n")
    save_tokenizer(tokenizer, folder, CONTEXT)
    parameters = sum(tensor.numel() for tensor in tensors.values())
    print(f"{folder.name}: {parameters / 1e6:.1f} M parameters", flush=True)


SHAPES = {
    "1b": LlamaShape(hidden=2048, layers=16, heads=32, kv_heads=8, ffn=8192, vocab=VOCAB),
    "8b": LlamaShape(
        hidden=4096, layers=32, heads=32, kv_heads=8, ffn=14336, vocab=128256, distinct=4
    ),
    "tiny": LlamaShape(hidden=256, layers=4, heads=4, kv_heads=2, ffn=512, vocab=VOCAB),
}
DRAFTS = {
    "1b": replace(SHAPES["1b"], layers=2),
    "8b": replace(SHAPES["1b"], layers=2, vocab=SHAPES["8b"].vocab),
    "tiny": replace(SHAPES["tiny"], layers=1),
}
AGREEMENTS = {"1b": (100, 80, 60), "8b": (80,), "tiny": (100, 80, 60)}


@dataclass(frozen=True, slots=True)
class Cycles:
    """`order` lists tokens cycle by cycle; `next_token` maps every token to its successor."""

    order: tuple[int, ...]
    next_token: tuple[int, ...]

    def walk(self, start: int, length: int) -> list[int]:
        """`length` tokens from `start` on, itself included."""
        tokens = [start]
        while len(tokens) < length:
            tokens.append(self.next_token[tokens[-1]])
        return tokens


def make_cycles(seed: int) -> Cycles:
    """A random division of the vocabulary; special tokens and the remainder map to themselves."""
    order = list(range(NUM_SPECIAL, VOCAB))
    random.Random(seed).shuffle(order)
    del order[len(order) // PERIOD * PERIOD :]
    following = list(range(VOCAB))
    for at, token in enumerate(order):
        begin = at // PERIOD * PERIOD
        following[token] = order[begin + (at - begin + 1) % PERIOD]
    return Cycles(tuple(order), tuple(following))


def draft_successors(cycles: Cycles, agreement: int, seed: int) -> list[int]:
    """Successors that are right at `agreement` percent of every cycle's places, chosen at random;
    at the others they name the right successor's counterpart in the next cycle."""
    rng = random.Random(seed)
    following = list(cycles.next_token)
    num_wrong = PERIOD * (100 - agreement) // 100
    for begin in range(0, len(cycles.order), PERIOD):
        for offset in rng.sample(range(PERIOD), num_wrong):
            twin = cycles.order[(begin + PERIOD + offset) % len(cycles.order)]
            following[cycles.order[begin + offset]] = cycles.next_token[twin]
    return following


def cycle_weights(shape: LlamaShape, following: list[int]) -> dict[str, Tensor]:
    """Tensors of a model that continues any token x of the tokenizer with following[x]."""
    table = torch.Generator().manual_seed(101)
    embedding_VD = gaussian(shape.vocab, shape.hidden, 1.0, table)
    generator = torch.Generator().manual_seed(shape.layers)
    tensors: dict[str, Tensor] = {"model.embed_tokens.weight": embedding_VD}
    for layer in range(shape.distinct or shape.layers):
        tensors.update(layer_tensors(shape, layer, CYCLE_RESIDUAL_STD, generator))
    if shape.distinct:
        tensors.update(dict(repeated_layers(shape, tensors)))
    head_VD = torch.zeros_like(embedding_VD)
    head_VD[torch.tensor(following)] = embedding_VD[: len(following)] * HEAD_SCALE
    tensors["lm_head.weight"] = head_VD
    return tensors


def write_cycle_family(folder: Path, size: str, cycles: Cycles, tokenizer: Tokenizer) -> None:
    shape, small = SHAPES[size], DRAFTS[size]
    target = cycle_weights(shape, list(cycles.next_token))
    write_model(folder / "cycle-target", shape, target, tokenizer)
    del target
    for agreement in AGREEMENTS[size]:
        successors = draft_successors(cycles, agreement, seed=agreement)
        weights = cycle_weights(small, successors)
        write_model(folder / f"cycle-draft-{agreement}", small, weights, tokenizer)


def write_prompts(folder: Path, cycles: Cycles, tokenizer: Tokenizer) -> None:
    """prompts.json: lists of token ids by kind, and what the cycle models must answer."""
    text = "".join(file.text for file in load_corpus().held_out[:4])
    ids = tokenizer.encode(text, add_special_tokens=False).ids
    starts = [cycles.order[(7 + 90 * i) * PERIOD] for i in range(NUM_STARTS)]
    body = PROMPT_TOKENS - 1
    cuts = [ids[1000 + body * i :][:body] for i in range(NUM_STARTS)]
    echoes = [cycles.walk(start, body) for start in starts]
    prompts = {
        "fresh": [[BEGIN_ID, *cut[:-1], s] for cut, s in zip(cuts, starts, strict=True)],
        "echo": [[BEGIN_ID, *echo] for echo in echoes],
        "fresh_answers": [cycles.walk(s, 512)[1:] for s in starts],
        "echo_answers": [cycles.walk(echo[-1], 512)[1:] for echo in echoes],
        "period": PERIOD,
    }
    (folder / "prompts.json").write_text(json.dumps(prompts))


def main() -> None:
    """Write what was asked for into the folder of the command line."""
    parser = make_parser(__doc__)
    parser.add_argument("folder", type=Path, help="where the models go")
    parser.add_argument("--shape", choices=SHAPES, default="1b", help="default: %(default)s")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    size = "tiny" if arguments.quick else arguments.shape
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    tokenizer = train_tokenizer((file.text for file in load_corpus().training), VOCAB)
    cycles = make_cycles(seed=7)
    write_prompts(arguments.folder, cycles, tokenizer)
    write_cycle_family(arguments.folder, size, cycles, tokenizer)
    print(json.dumps({"benchmark": "make_models", "shape": size, "folder": str(arguments.folder)}))


if __name__ == "__main__":
    main()
