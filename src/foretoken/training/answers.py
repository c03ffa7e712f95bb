"""Prompts through our own engine, outside of any server or `LLM`.

Owns the loop that runs an engine until a list of requests has ended, and what its decoding steps
cost. Knows neither where prompts come from nor what answers are for.
"""

from collections.abc import Sequence
from dataclasses import replace

from foretoken.engine import Engine
from foretoken.output_builder import GrowingOutput
from foretoken.runtime.batch import Batch
from foretoken.runtime.verifier import Verification
from foretoken.types import CompletionOutput, SamplingParams, StepStats


def answer_all(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[CompletionOutput]:
    """One continuation per prompt (token ids), in the order of the prompts; `params.n` is 1.

    Raises:
        RequestError: a prompt or a parameter is wrong; nothing has been started then.
    """
    assert params.n == 1, params.n
    requests = [
        engine.make_requests(str(index), list(ids), params)[0] for index, ids in enumerate(prompts)
    ]
    growing = {request.request_id: GrowingOutput(request) for request in requests}
    for request in requests:
        engine.add_request(request)
    while engine.has_unfinished:
        for output in engine.step():
            growing[output.request_id].add(output)
    return [growing[request.request_id].freeze() for request in requests]


def watch_steps(engine: Engine) -> list[StepStats]:
    """A list that grows by the statistics of every later step of `engine`."""
    seen: list[StepStats] = []

    def note(_: Batch, __: Verification, stats: StepStats) -> None:
        seen.append(stats)

    engine.parts = replace(engine.parts, observers=(*engine.parts.observers, note))
    return seen
