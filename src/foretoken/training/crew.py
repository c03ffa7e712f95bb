"""Several processes that share one step's work, each at its own pace.

Owns the helpers, the shared weights and the sum of the gradients. A step is cut into parts; whoever
is free takes the next, so a helper on a busy core slows nobody down. Invariant: every part is done
exactly once. With helpers the order of the sum depends on their pace, so runs repeat only closely.
"""

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from typing import Any, NamedTuple, Protocol

import torch
import torch.multiprocessing as mp
from torch import Tensor, nn

from foretoken.training.schedule import Stage

SLOWEST = 5.0
FORGET = 0.9


class Task(Protocol):
    """What a run optimizes."""

    def loss(self, index: int, tokens: int, stage: Stage) -> Tensor:
        """The mean loss in nats of part `index`: `tokens` tokens in rows as `stage` says."""
        ...

    def evaluate(self) -> dict[str, float]:
        """Held-out measurements by name."""
        ...


class Job(NamedTuple):
    """A model and its task."""

    model: nn.Module
    """Its `shape` is a dataclass that says how to build it again."""
    task: Task


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """One step: parts first..first+parts-1, each of `tokens` tokens in rows as `stage` says.

    Without parts it is a rehearsal: a helper compiles what it will need, and nobody waits.
    """

    first: int
    parts: int
    tokens: int
    stage: Stage


class Counter:
    """Hands out the parts of a step; knows how fast each process has been."""

    def __init__(self, context: Any, processes: int) -> None:
        self.lock = context.Lock()
        self.taken = context.Value("q", 0, lock=False)
        self.pace = context.Array("d", processes, lock=False)

    def take(self, me: int, work: Work) -> int | None:
        """The next part, or None when there is none or another process would be done sooner."""
        with self.lock:
            left = work.parts - self.taken.value
            if left <= 0:
                return None
            if me > 0 and self.pace[me] > left * self.pace[0]:
                self.pace[me] *= FORGET
                return None
            self.taken.value += 1
            index: int = work.first + self.taken.value - 1
            return index

    def note(self, me: int, seconds: float) -> None:
        """Remember how long `me` took for a part."""
        old = self.pace[me]
        seconds = min(seconds, SLOWEST * self.pace[0]) if me > 0 else seconds
        self.pace[me] = seconds if old == 0.0 else 0.7 * old + 0.3 * seconds


def do_parts(me: int, task: Task, work: Work, counter: Counter) -> float:
    """Take and differentiate parts until none is left; returns this process's share of the loss."""
    total = 0.0
    while (index := counter.take(me, work)) is not None:
        started = time.monotonic()
        loss = task.loss(index, work.tokens, work.stage) / work.parts
        loss.backward()
        total += loss.item()
        counter.note(me, time.monotonic() - started)
    return total


def _flat_gradients(model: nn.Module, into: Tensor) -> None:
    at = 0
    for parameter in model.parameters():
        end = at + parameter.numel()
        if parameter.grad is None:
            into[at:end] = 0.0
        else:
            into[at:end] = parameter.grad.flatten()
        parameter.grad = None
        at = end


def _helper(
    me: int, build: Callable[[], Job], shared: list[Tensor], counter: Counter, pipe: Connection
) -> None:
    os.setsid()
    torch.set_num_threads(1)
    job = build()
    for parameter, tensor in zip(job.model.parameters(), shared[1:], strict=True):
        parameter.data = tensor
    while (work := pipe.recv()) is not None:
        if work.parts == 0:
            job.task.loss(work.first, work.tokens, work.stage).backward()
            job.model.zero_grad()
            pipe.send(0.0)
            continue
        loss = do_parts(me, job.task, work, counter)
        _flat_gradients(job.model, shared[0])
        pipe.send(loss)
    pipe.close()


class Member:
    """A helper seen from outside; `stage` is what it has rehearsed, or is about to."""

    def __init__(self, pipe: Connection, gradients: Tensor) -> None:
        self.pipe, self.gradients = pipe, gradients
        self.stage: Stage | None = None
        self.busy = False

    def ready(self, work: Work) -> bool:
        """Whether it can take parts of `work` now; asks for a rehearsal of a new stage."""
        if self.busy and self.pipe.poll():
            self.pipe.recv()
            self.busy = False
        if not self.busy and self.stage != work.stage:
            self.stage, self.busy = work.stage, True
            self.pipe.send(replace(work, parts=0))
        return not self.busy


class Crew:
    """This process and `helpers` more, which build the same job with `build`."""

    def __init__(self, job: Job, helpers: int, build: Callable[[], Job]) -> None:
        context = mp.get_context("spawn")
        self._job = job
        self._counter = Counter(context, helpers + 1)
        self._members: list[Member] = []
        if helpers:
            job.model.share_memory()
        for index in range(helpers):
            mine, theirs = context.Pipe()
            gradients = torch.zeros(sum(p.numel() for p in job.model.parameters()))
            gradients.share_memory_()
            shared = [gradients, *(p.data for p in job.model.parameters())]
            arguments = (index + 1, build, shared, self._counter, theirs)
            context.Process(target=_helper, args=arguments, daemon=True).start()
            self._members.append(Member(mine, gradients))

    def run(self, work: Work) -> float:
        """Leave the mean gradient of `work` in the model; returns its mean loss in nats."""
        self._counter.taken.value = 0
        active = [member for member in self._members if member.ready(work)]
        for member in active:
            member.pipe.send(work)
        loss = do_parts(0, self._job.task, work, self._counter)
        for member in active:
            loss += member.pipe.recv()
            self._add(member.gradients)
        return loss

    def _add(self, gradients: Tensor) -> None:
        at = 0
        for parameter in self._job.model.parameters():
            end = at + parameter.numel()
            piece = gradients[at:end].view_as(parameter)
            if parameter.grad is None:
                parameter.grad = piece.clone()
            else:
                parameter.grad += piece
            at = end

    def close(self) -> None:
        """Send the helpers home."""
        for member in self._members:
            member.pipe.send(None)
