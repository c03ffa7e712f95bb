"""Runs on a tiny target of one's own: its prompts and its config."""

import json
import random
from pathlib import Path

CONFIG = """
max_steps = {steps}
batch_tokens = 64
micro_tokens = 32
warmup_steps = 2
evaluate_steps = 4
compile = false
precision = "float32"
checkpoint_minutes = 0.0
{more}

[head]
kind = "{kind}"
depth = 3
inner_size = 24

[data]
prompts = "{prompts}"
answer_tokens = 16
held_out = 3
batch = 5
{tables}

[[stages]]
until = 1.0
length = 32
"""


def silent(_: str) -> None:
    """Reports go nowhere."""


def write_prompts(folder: Path, count: int = 12) -> Path:
    rng = random.Random(1)
    lines = [
        json.dumps({"prompt_token_ids": [rng.randrange(2, 97) for _ in range(8)]})
        for _ in range(count)
    ]
    path = folder / "prompts.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return path


def write_config(
    folder: Path, kind: str = "mlp", steps: int = 6, more: str = "", tables: str = ""
) -> Path:
    """A config of a run of `steps` steps; `more` keys, and `tables` after `[data]`'s keys."""
    path = folder / "own.toml"
    prompts = write_prompts(folder)
    path.write_text(
        CONFIG.format(kind=kind, steps=steps, prompts=prompts, more=more, tables=tables)
    )
    return path
