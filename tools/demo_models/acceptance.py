"""How often a draft guesses a target's greedy text, and how alike their distributions are.

Owns the teacher-forced simulation: a draft's token counts only while all before it agree, so its
context is the target's text and one forward pass gives every guess. Held-out prompts only.
"""

from dataclasses import dataclass

import torch
from tokenizers import Tokenizer
from torch import Tensor

from foretoken.training.llama import Llama
from tools.demo_models.sampling import Sampling, generate
from tools.python_text.heldout import edit_prompts, heldout_prompts
from tools.python_text.stdlib import Prompt

PROMPTS, PROMPT_TOKENS, EDIT_TOKENS, NEW_TOKENS, DRAFT_TOKENS = 24, 128, 288, 128, 5
TEMPERATURE = 0.8


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
    device = target.embed.weight.device
    tokens = generate(target, prompts_BT.to(device), Sampling(new_tokens=new_tokens))
    length = prompts_BT.shape[1]
    with torch.inference_mode():
        hidden = target(tokens[:, :-1]).hidden[:, length - 1 :]
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
        hidden = draft(run.tokens[:, :-1]).hidden[:, run.prompt_tokens - 1 :]
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


def repeated_ngrams(tokens_BT: Tensor, size: int = 4) -> float:
    """The share of n-grams that occurred before in the same row; 0 means no repetition."""
    repeated, total = 0, 0
    for row in tokens_BT.tolist():
        grams = [tuple(row[i : i + size]) for i in range(len(row) - size + 1)]
        repeated += len(grams) - len(set(grams))
        total += len(grams)
    return repeated / max(1, total)
