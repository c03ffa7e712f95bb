"""What the packaged models can do, measured on held-out modules: the numbers of the model cards.

Owns the teacher-forced simulation: a draft's token counts only while all before it agree, so its
context is the target's text and one forward pass gives every guess. Reads exported folders, so what
is measured is what ships.
"""

import time
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from tokenizers import Tokenizer
from torch import Tensor

from foretoken.cli.timed_runs import repeated_ngrams
from foretoken.training.llama import Llama, read_exported
from tools.demo_models.batches import bytes_per_token, held_out_rows
from tools.demo_models.lm import NATS_PER_BIT, held_out_loss
from tools.demo_models.sampling import Sampling, generate
from tools.python_text.heldout import edit_prompts, heldout_prompts
from tools.python_text.stdlib import Prompt, load_corpus

PROMPTS, PROMPT_TOKENS, EDIT_TOKENS, NEW_TOKENS, DRAFT_TOKENS = 24, 128, 288, 128, 5
TEMPERATURE = 0.8
LENGTHS = {512: 48, 2048: 12}
STEP_REPEATS, TEXT_ROWS = 30, 96
TEMPERATURES = (0.7, 0.8)


@dataclass(frozen=True, slots=True, kw_only=True)
class GreedyRun:
    """Prompts and greedy continuations [B, T] of equal lengths, with the target's hidden rows."""

    tokens: Tensor
    prompt_tokens: int
    logits: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class Acceptance:
    """`agreement` of greedy tokens, tokens a verification (`length`), and 1 - TV (`overlap`)."""

    agreement: float
    length: float
    overlap: float


def cut_prompts(tokenizer: Tokenizer, prompts: tuple[Prompt, ...], length: int) -> Tensor:
    """The last `length` tokens of each prompt, with <s> as the first, [B, length]."""
    rows = []
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text, add_special_tokens=False).ids
        if len(ids) >= length - 1:
            rows.append([0, *ids[-(length - 1) :]])
    return torch.tensor(rows)


def cut_edits(tokenizer: Tokenizer, prompts: tuple[Prompt, ...], length: int) -> Tensor:
    """Edit prompts of `length` tokens whose copy has begun and goes on, [B <= PROMPTS, length].

    Each is the prompt and as much of its reference as it takes to reach the length.
    """
    rows = []
    for prompt in prompts:
        shown = len(tokenizer.encode(prompt.text, add_special_tokens=False).ids)
        ids = tokenizer.encode(prompt.text + prompt.reference, add_special_tokens=False).ids
        if shown < length <= len(ids) - NEW_TOKENS // 2:
            rows.append([0, *ids[: length - 1]])
    return torch.tensor(rows[:PROMPTS])


def greedy_run(target: Llama, prompts_BT: Tensor, new_tokens: int = NEW_TOKENS) -> GreedyRun:
    """The target's greedy continuations and its logits at every continued position."""
    device = target.embed_tokens.weight.device
    tokens = generate(target, prompts_BT.to(device), Sampling(new_tokens=new_tokens))
    length = prompts_BT.shape[1]
    with torch.inference_mode():
        hidden = target.hidden(tokens[:, :-1])[:, length - 1 :]
        logits = target.logits(hidden).float()
    return GreedyRun(tokens=tokens, prompt_tokens=length, logits=logits)


def greedy_runs(target: Llama, tokenizer: Tokenizer) -> list[GreedyRun]:
    """Two runs: held-out functions to complete, and held-out code to edit."""
    plain = heldout_prompts(2 * PROMPTS, tokens=PROMPT_TOKENS + 40)
    edits = edit_prompts(4 * PROMPTS, tokens=220)
    return [
        greedy_run(target, cut_prompts(tokenizer, plain, PROMPT_TOKENS)[:PROMPTS]),
        greedy_run(target, cut_edits(tokenizer, edits, EDIT_TOKENS)),
    ]


def tokens_per_step(agree_BT: Tensor, draft_tokens: int) -> float:
    """Tokens a verification step gives when each step drafts `draft_tokens` tokens."""
    steps = 0
    for row in agree_BT.tolist():
        at = 0
        while at < len(row):
            taken = 0
            while taken < draft_tokens and at + taken < len(row) and row[at + taken]:
                taken += 1
            at += taken + 1
            steps += 1
    return agree_BT.numel() / steps


def measure(draft: Llama, run: GreedyRun, draft_tokens: int = DRAFT_TOKENS) -> Acceptance:
    """Compare `draft` with one run of the target."""
    with torch.inference_mode():
        hidden = draft.hidden(run.tokens[:, :-1])[:, run.prompt_tokens - 1 :]
        logits = draft.logits(hidden).float()
        agree = logits.argmax(dim=-1) == run.tokens[:, run.prompt_tokens :]
        mine = torch.softmax(logits / TEMPERATURE, dim=-1)
        theirs = torch.softmax(run.logits / TEMPERATURE, dim=-1)
        overlap = torch.minimum(mine, theirs).sum(dim=-1).mean()
    return Acceptance(
        agreement=float(agree.float().mean()),
        length=tokens_per_step(agree, draft_tokens),
        overlap=float(overlap),
    )


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
        "repeated_4grams_greedy": fmean(map(repeated_ngrams, new.tolist())),
        "repeated_4grams_of_text": fmean(map(repeated_ngrams, text.tolist())),
    }
    for temperature in TEMPERATURES:
        how = Sampling(new_tokens=new.shape[1], temperature=temperature)
        rows = generate(model, prompts, how, torch.Generator().manual_seed(0))
        written = rows[:, run.prompt_tokens :].tolist()
        found[f"repeated_4grams_at_{temperature}"] = fmean(map(repeated_ngrams, written))
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
