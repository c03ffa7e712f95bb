"""Where the time of plain decoding steps goes: attention, the rest of the model, sampling, Python.

Two passes over the same steps. Clocks around the engine's parts give exact shares of the wall
time; PyTorch's profiler, which slows everything down a little, tells operators from Python.
"""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from runs import greedy
from torch.profiler import ProfilerActivity, profile

from foretoken import LLM


@dataclass(frozen=True, slots=True, kw_only=True)
class StepShares:
    """Shares of a step's wall time; the first four add up to 1."""

    step_ms: float
    attention: float
    rest_of_model: float
    """Linears, norms, rotations, embedding, head, and the Python between them."""
    sampling: float
    """From logits to accepted tokens."""
    scheduling: float
    """Schedule, commit, text, metrics: Python around the model."""
    operators: float
    """Time inside PyTorch's operators, under the profiler."""
    python: float
    """The rest of the time under the profiler; an upper bound."""

    def __str__(self) -> str:
        """As printed."""
        return (
            f"{self.step_ms:.1f} ms: attention {self.attention:.1%}, rest of the model "
            f"{self.rest_of_model:.1%}, sampling {self.sampling:.1%}, scheduling "
            f"{self.scheduling:.1%}; profiled: operators {self.operators:.1%}, "
            f"Python at most {self.python:.1%}"
        )


class Clock:
    """Adds up the time spent in the functions it wraps."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def wrap(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The same function, timed."""

        def timed(*args: Any, **keywords: Any) -> Any:
            began = time.perf_counter()
            result = function(*args, **keywords)
            self.seconds += time.perf_counter() - began
            return result

        return timed


def measure_shares(llm: LLM, batch: int, context: int, steps: int) -> StepShares:
    """Decode `batch` sequences around `context` for `steps` steps, twice."""
    forward, sampling, attention = Clock(), Clock(), Clock()
    parts = llm._engine.parts
    ids = start(llm, batch, context, steps)
    with_clocks = [
        (parts.runner, "run", forward.wrap(parts.runner.run)),
        (parts.verifier, "verify", sampling.wrap(parts.verifier.verify)),
        (parts.runner.model.attention, "plan", timed_plan(parts.runner.model.attention, attention)),
    ]
    for owner, name, function in with_clocks:
        setattr(owner, name, function)
    total = run_steps(llm, steps)
    for owner, name, _ in with_clocks:
        delattr(owner, name)
    stop(llm, ids)
    operators, profiled = profile_steps(llm, batch, context, steps)
    scheduling = total - forward.seconds - sampling.seconds
    return StepShares(
        step_ms=total / steps * 1e3,
        attention=attention.seconds / total,
        rest_of_model=(forward.seconds - attention.seconds) / total,
        sampling=sampling.seconds / total,
        scheduling=scheduling / total,
        operators=operators / profiled,
        python=1 - operators / profiled,
    )


def timed_plan(attention: Any, clock: Clock) -> Callable[[Sequence[Any]], Any]:
    """Attention's plan whose planning and whose calls, one a layer, are on the clock."""
    plan = clock.wrap(attention.plan)
    return lambda spans: clock.wrap(plan(spans))


def profile_steps(llm: LLM, batch: int, context: int, steps: int) -> tuple[float, float]:
    """Seconds inside operators, and of all steps, under the profiler."""
    ids = start(llm, batch, context, steps)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        total = run_steps(llm, steps)
    stop(llm, ids)
    return sum(e.self_cpu_time_total for e in profiler.key_averages()) * 1e-6, total


def start(llm: LLM, batch: int, context: int, steps: int) -> list[str]:
    """Add random prompts and step until every sequence decodes."""
    engine = llm._engine
    rng = random.Random(batch)
    waiting = set()
    for index in range(batch):
        ids = rng.choices(range(2, engine.parts.vocab_size), k=context - steps // 2)
        name = f"share-{batch}-{index}"
        [request] = engine.make_requests(name, ids, greedy(4 * steps + batch + 64))
        engine.add_request(request)
        waiting.add(request.request_id)
    names = sorted(waiting)
    while waiting:
        waiting -= {out.request_id for out in engine.step() if out.new_token_ids}
    engine.step()
    return names


def run_steps(llm: LLM, steps: int) -> float:
    """Seconds of that many steps."""
    engine = llm._engine
    began = time.perf_counter()
    for _ in range(steps):
        engine.step()
    return time.perf_counter() - began


def stop(llm: LLM, names: Sequence[str]) -> None:
    """End the requests of `start`."""
    for name in names:
        llm._engine.abort(name)
