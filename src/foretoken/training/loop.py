"""The training loop that heads, drafts and language models share, and what it shows meanwhile.

Owns the order of a step, the schedule's use and when checkpoints are written. It knows neither the
data nor the loss: a `Task` gives both. Invariants: a run continued from a checkpoint does the same
steps as one that was never stopped (with a budget in steps; minutes depend on the machine); what
was measured last stays in sight, so that a head's accuracy by position is beside its loss.
"""

import math
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from tqdm import tqdm

from foretoken.errors import ConfigError, TrainingError
from foretoken.training import run_folder
from foretoken.training.llama import Llama
from foretoken.training.optimizer import Optimizer
from foretoken.training.ranks import Ranks
from foretoken.training.schedule import Stage, current_stage
from foretoken.training.settings import Settings

LINE_STEPS = 10


@dataclass(slots=True, kw_only=True)
class Progress:
    """What a run has done so far; `history` holds one record an evaluation."""

    step: int = 0
    seconds: float = 0.0
    tokens: int = 0
    history: list[dict[str, float]]


class Display:
    """A bar on `terminal`, or a line to `report` after the first step and every LINE_STEPS."""

    def __init__(
        self, report: Callable[[str], None], name: str, terminal: IO[str] | None = None
    ) -> None:
        self._report = report
        self._bar = None
        if terminal is not None:
            form = "{l_bar}{bar}| step {n_fmt} [{elapsed}<{remaining}{postfix}]"
            self._bar = tqdm(total=1, desc=name, file=terminal, bar_format=form, dynamic_ncols=True)
        self._measured = ""

    def step(self, done: Progress, share: float, loss: float, speed: float, scale: float) -> None:
        """Show where the run is.

        Args:
            done: so far.
            share: of the budget that is used up, 0..1.
            loss: a running mean, in nats.
            speed: tokens a second.
            scale: the schedule's factor on the peak rates.
        """
        if self._bar is None:
            if done.step % LINE_STEPS == 0 or done.step == 1:
                left = done.seconds * (1 - share) / max(share, 1e-9) / 60
                self._report(
                    f"step {done.step} loss {loss:.3f} tokens {done.tokens / 1e6:.2f}M "
                    f"{speed:.0f} tokens/s rate x{scale:.2f} left {left:.0f} min"
                )
            return
        if self._bar.n == 0:
            self._bar.initial = done.step - 1
        self._bar.total = max(done.step, round(done.step / max(share, 1e-9)))
        self._bar.n = done.step
        found = f"loss {loss:.3f}{self._measured}, {speed:.0f} tokens/s"
        self._bar.set_postfix_str(found, refresh=False)
        self._bar.refresh()

    def measured(self, found: Mapping[str, float]) -> None:
        """Show held-out measurements, and keep them beside the bar."""
        self._measured = f", {brief(found)}"
        self.note(f"  held out: {' '.join(f'{name} {value:.4f}' for name, value in found.items())}")

    def note(self, text: str) -> None:
        """A line of its own, above the bar if there is one."""
        if self._bar is None:
            self._report(text)
            return
        with tqdm.external_write_mode(file=sys.stdout):
            self._report(text)

    def close(self) -> None:
        """Leave the bar as it is."""
        if self._bar is not None:
            self._bar.close()


def terminal_of(stream: IO[str]) -> IO[str] | None:
    """`stream` if a person reads it: a terminal that knows its size, as a bar needs it."""
    if not stream.isatty():
        return None
    size = os.get_terminal_size(stream.fileno())
    return stream if size.columns > 0 and size.lines > 0 else None


def brief(found: Mapping[str, float]) -> str:
    """Measurements in a few words: for a head, accuracy by position and the length it gives."""
    depths = [value for name, value in found.items() if name.startswith("depth_")]
    if not depths:
        return ", ".join(f"{name} {value:.3f}" for name, value in found.items())
    shares = " ".join(f"{100 * value:.0f}" for value in depths)
    return f"right by position {shares}%, accepts {found['tokens_a_step']:.2f} a step"


MIXED = "Mismatch dtype between input and weight"
"""What PyTorch says of norms with float32 weights under autocast, which is meant here."""


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


def pick_device() -> torch.device:
    """CUDA where there is one, else the CPU."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def prepare(model: Llama, settings: Settings) -> None:
    """Compile the layers of `model` where the settings ask for it.

    All layers share one piece of code, so each length, mode and kind of model is a recompilation
    of it; the compiler's usual limit of eight would leave the last ones uncompiled.
    """
    if settings.compile:
        torch._dynamo.config.recompile_limit = 64
        torch._dynamo.config.optimize_ddp = False  # layers are small enough as they are
        for layer in model.layers:
            layer.compile(dynamic=False)


def tell_compiling(settings: Settings, report: Callable[[str], None]) -> None:
    """Say why nothing moves before the first step, which takes minutes on a small machine."""
    if settings.compile:
        report(
            "compiling: minutes without a step now, and again before the first measurement "
            "(`compile = false` in the config goes without, and steps take longer)"
        )


class _Losses(nn.Module):
    """A task's loss as the forward pass of a module: what PyTorch runs on every rank."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self._task = job

    def forward(self, index: int, tokens: int, stage: Stage) -> Tensor:
        return self._task.loss(index, tokens, stage)


class Trainer:
    """Runs a task's steps on a model, from the newest checkpoint in `folder` if there is one.

    Each of several ranks does parts of its own and steps by the mean gradient of all; rank 0 alone
    reads and writes files, measures and reports.
    """

    def __init__(
        self,
        job: Job,
        settings: Settings,
        folder: Path,
        ranks: Ranks | None = None,
        length: Callable[[int, float], float] | None = None,
    ) -> None:
        """Go on from `folder`; `length` stands in for `settings.progress`: how far the run is."""
        self.ranks = ranks or Ranks()
        self._run_length = length or settings.progress
        self.model, self.task, self.settings, self.folder = *job, settings, folder
        self.optimizer = Optimizer(job.model, settings)
        self.progress = Progress(history=[])
        folder.mkdir(parents=True, exist_ok=True)
        state = self.ranks.lead(lambda: run_folder.load_newest(folder))
        if state is not None:
            self._restore(state)
        self._losses: Any = _Losses(job)
        if self.ranks.size > 1:
            # Gives every rank the weights and buffers of rank 0, and sums gradients as they become
            # known. Not every kind of head has a gradient for every parameter in every stage.
            parallel = DistributedDataParallel(self._losses, find_unused_parameters=True)
            parallel.broadcast_buffers = False  # none changes after the start
            self._losses = parallel

    def _restore(self, state: dict[str, Any]) -> None:
        made = {"kind": self.settings.kind, "shape": asdict(self.model.shape)}  # type: ignore[call-overload]
        for name, wanted in made.items():
            if state.get(name) != wanted:
                allowed = f"{wanted}, as this config says; or another --out, for a new run"
                raise ConfigError(f"{name} in {self.folder}", state.get(name), allowed)
        try:
            self.model.load_state_dict(state["model"])
        except RuntimeError as error:
            allowed = "the sizes of this config; or another --out, for a new run"
            raise ConfigError(f"model in {self.folder}", str(error), allowed) from error
        self.optimizer.load_state_dict(state["optimizer"])
        self.progress = Progress(**state["progress"])

    def save(self) -> None:
        """Write a checkpoint of everything the run needs to go on; rank 0 does."""
        done = self.progress
        if not self.ranks.leads:
            return
        state = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "kind": self.settings.kind,
            "head": None if self.settings.head is None else asdict(self.settings.head),
            "shape": asdict(self.model.shape),  # type: ignore[call-overload]
            "progress": {
                "step": done.step,
                "seconds": done.seconds,
                "tokens": done.tokens,
                "history": done.history,
            },
        }
        run_folder.save(self.folder, done.step, state)

    def share(self) -> float:
        """How much of the budget is used up, 0..1."""
        return self._run_length(self.progress.step, self.progress.seconds)

    def step(self) -> float:
        """One optimizer step; returns its loss in nats."""
        share, done = self.share(), self.progress
        stage = current_stage(self.settings.stages, share)
        started = time.monotonic()
        tokens = max(stage.length, self.settings.micro_tokens)
        parts = max(1, self.settings.batch_tokens // tokens)
        first = (done.step * self.ranks.size + self.ranks.rank) * parts
        value = self._gradients(range(first, first + parts), tokens, stage)
        with self._no_memory():
            self.optimizer.step(self.settings.rate_scale(done.step, share))
        done.step += 1
        done.tokens += parts * tokens * self.ranks.size
        done.seconds += self.ranks.mean(time.monotonic() - started)[0]
        return value

    def _gradients(self, parts: range, tokens: int, stage: Stage) -> float:
        """Leave the mean gradient in the model; the mean loss. No weight has changed yet."""
        value = 0.0
        with self._no_memory():
            for part in parts:
                # Ranks exchange gradients once a step: with the last part, which sums all.
                losses, last = self._losses, part == parts[-1]
                is_shared = isinstance(losses, DistributedDataParallel)
                with losses.no_sync() if is_shared and not last else nullcontext():
                    loss = losses(part, tokens, stage) / len(parts)
                    loss.backward()
                value += loss.item()
            (value,) = self.ranks.mean(value)
            slopes = [p.grad for p in self.model.parameters() if p.grad is not None]
            norm = nn.utils.get_total_norm(slopes).item()
        for what, found in (("loss", value), ("gradient norm", norm)):
            if not math.isfinite(found):
                remedy = "lower matrix_rate and other_rate, other data"
                raise self._failed(f"a {what} of {found}", remedy)
        return value

    @contextmanager
    def _no_memory(self) -> Iterator[None]:
        """Say what can be done where memory runs out."""
        remedy = "fewer micro_tokens, shorter stages"
        try:
            yield
        except (MemoryError, torch.OutOfMemoryError) as error:
            raise self._failed("out of memory", remedy) from error
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            raise self._failed("out of memory", remedy) from error

    def _failed(self, what: str, remedy: str) -> TrainingError:
        kept = next(iter(run_folder.newest(self.folder)), None)
        last = "there is no checkpoint yet" if kept is None else f"{kept.name} is intact"
        return TrainingError(f"step {self.progress.step}: {what}; {last}. Try {remedy}.")

    def evaluate(self, loss: float) -> dict[str, float]:
        """Measure, and append to the history."""
        done = self.progress
        self.model.eval()
        with torch.inference_mode(), self._no_memory():
            found = self.task.evaluate()
        self.model.train()
        record = {"step": done.step, "tokens": done.tokens, "minutes": done.seconds / 60}
        done.history.append({**record, "loss": loss, **found})
        return found

    def run(
        self,
        report: Callable[[str], None],
        pauses: Callable[[Progress], bool] = lambda progress: False,
    ) -> Progress:
        """Step until the budget is used up, with checkpoints and progress on the way.

        Where it `pauses`, asked before each step, it is measured and saved as at the end.
        """
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", MIXED)
            self._run(report, pauses)
        return self.progress

    def _run(self, report: Callable[[str], None], pauses: Callable[[Progress], bool]) -> None:
        terminal = terminal_of(sys.stderr) if self.ranks.leads else None
        display = Display(report, self.settings.name, terminal)
        saved, mean, length = time.monotonic(), 0.0, self._length()
        while self.share() < 1.0 and not pauses(self.progress):
            before = self.progress.seconds
            if length != (length := self._length()):
                again = ", compiled once more" if self.settings.compile else ""
                display.note(f"rows of {length} tokens from now on{again}")
            last = self.step()
            done, share = self.progress, self.share()
            mean = last if mean == 0.0 else 0.95 * mean + 0.05 * last
            speed = self.ranks.size * self.settings.batch_tokens / (done.seconds - before)
            display.step(done, share, mean, speed, self.settings.rate_scale(done.step, share))
            if done.step % self.settings.evaluate_steps == 0 and self.ranks.leads:
                self._measure(display, mean)
            if time.monotonic() - saved > 60 * self.settings.checkpoint_minutes:
                self.save()
                saved = time.monotonic()
        measured = self.progress.history and self.progress.history[-1]["step"] == self.progress.step
        if self.ranks.leads and not measured:
            self._measure(display, mean)
        display.close()
        self.save()

    def _measure(self, display: Display, loss: float) -> None:
        if not self.progress.history:
            display.note("measuring on held-out text, which takes longest the first time")
        display.measured(self.evaluate(loss))

    def _length(self) -> int:
        return current_stage(self.settings.stages, self.share()).length
