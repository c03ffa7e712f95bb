"""What the packaged models can do, measured on held-out modules.

Owns the numbers of the model cards. Reads exported folders, so what is measured is what ships.
"""

import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from foretoken.training.llama import Llama
from foretoken.training.llama_folder import read_exported
from tools.demo_models.acceptance import GreedyRun, greedy_runs, measure, repeated_ngrams
from tools.demo_models.batches import bytes_per_token, held_out_rows
from tools.demo_models.lm import NATS_PER_BIT, held_out_loss
from tools.demo_models.sampling import Sampling, generate
from tools.python_text.stdlib import load_corpus

LENGTHS = {512: 48, 2048: 12}
STEP_REPEATS, TEXT_ROWS = 30, 96
TEMPERATURES = (0.7, 0.8)


def bits_per_byte(model: Llama, tokenizer: Tokenizer) -> dict[str, float]:
    """Held-out bits per byte by row length."""
    found = {}
    for length, rows in LENGTHS.items():
        batch = held_out_rows(load_corpus(), tokenizer, rows, length)
        with torch.inference_mode():
            nats = held_out_loss(model, batch, rows=4)
        found[str(length)] = nats / NATS_PER_BIT / bytes_per_token(tokenizer, batch)
    return found


def step_seconds(model: Llama) -> float:
    """Seconds of one greedy decoding step of one row, after a 128-token prompt; the median."""
    model = model.to(torch.bfloat16)
    prompt = torch.randint(2, model.shape.vocab_size, (1, 128))
    times = []
    for count in (2, 2 + STEP_REPEATS) * 5:
        started = time.perf_counter()
        generate(model, prompt, Sampling(new_tokens=count))
        times.append(time.perf_counter() - started)
    gaps = sorted(long - short for short, long in zip(times[::2], times[1::2], strict=True))
    return gaps[len(gaps) // 2] / STEP_REPEATS


def repetition(model: Llama, tokenizer: Tokenizer, run: GreedyRun) -> dict[str, float]:
    """Shares of 4-grams that occurred before, in texts of as many tokens as `run` continues.

    Of its greedy text, of samples after the same prompts, and of held-out text.
    """
    prompts, new = run.tokens[:, : run.prompt_tokens], run.tokens[:, run.prompt_tokens :]
    text = held_out_rows(load_corpus(), tokenizer, TEXT_ROWS, new.shape[1]).targets
    found = {
        "repeated_4grams_greedy": repeated_ngrams(new),
        "repeated_4grams_of_text": repeated_ngrams(text),
    }
    for temperature in TEMPERATURES:
        how = Sampling(new_tokens=new.shape[1], temperature=temperature)
        rows = generate(model, prompts, how, torch.Generator().manual_seed(0))
        found[f"repeated_4grams_at_{temperature}"] = repeated_ngrams(rows[:, run.prompt_tokens :])
    return found


def evaluate_pair(target_folder: Path, draft_folder: Path | None) -> dict[str, Any]:
    """All the card's numbers of a target and, if given, of its draft."""
    target = read_exported(target_folder).eval()
    tokenizer = Tokenizer.from_file(str(target_folder / "tokenizer.json"))
    runs = greedy_runs(target, tokenizer)
    found: dict[str, Any] = {
        "target_bits_per_byte": bits_per_byte(target, tokenizer),
        **repetition(target, tokenizer, runs[0]),
    }
    if draft_folder is not None:
        draft = read_exported(draft_folder).eval()
        found["draft_bits_per_byte"] = bits_per_byte(draft, tokenizer)
        for name, run in zip(("functions", "edits"), runs, strict=True):
            found[name] = asdict(measure(draft, run))
        found["step_milliseconds"] = {
            "target": 1000 * step_seconds(target),
            "draft": 1000 * step_seconds(draft),
        }
    return found
