"""A model, a task and settings small enough for a test."""

import torch
from torch import Tensor

from foretoken.training.llama import Llama
from foretoken.training.loop import Job
from foretoken.training.losses import head_loss
from foretoken.training.schedule import Stage
from foretoken.training.settings import LlamaShape, Settings

SHAPE = LlamaShape(
    vocab_size=64, hidden_size=32, layers=2, heads=4, kv_heads=2, ffn_size=48, max_positions=64
)


def tiny_settings(**changes: object) -> Settings:
    known: dict[str, object] = {
        "name": "tiny",
        "shape": SHAPE,
        "stages": (Stage(until=1.0, length=16),),
        "max_steps": 8,
        "batch_tokens": 64,
        "micro_tokens": 32,
        "warmup_steps": 2,
        "evaluate_steps": 4,
        "compile": False,
    }
    return Settings(**{**known, **changes})  # type: ignore[arg-type]


class CountingTask:
    """Predict the next number of a row that counts up."""

    def __init__(self, model: Llama) -> None:
        self.model = model

    def rows(self, index: int, tokens: int, length: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        starts = torch.randint(0, 64, (tokens // length, 1), generator=generator)
        return (starts + torch.arange(length + 1)) % 64

    def loss(self, index: int, tokens: int, stage: Stage) -> Tensor:
        rows = self.rows(index, tokens, stage.length)
        hidden = self.model.hidden(rows[:, :-1]).flatten(0, 1)
        return head_loss(hidden, self.model.embed_tokens.weight, rows[:, 1:].flatten())

    def evaluate(self) -> dict[str, float]:
        return {"nats": float(self.loss(999, 64, Stage(until=1.0, length=16)))}


def tiny_job() -> Job:
    """The same model and task in whichever process builds it."""
    torch.manual_seed(0)
    model = Llama(SHAPE)
    return Job(model, CountingTask(model))
