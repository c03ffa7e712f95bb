"""The target's own answers to the prompts, kept in the run's folder as they come.

Owns `answers.jsonl`: one JSON line per prompt, in the order of the prompts, the held-out ones
first and greedy. A line that a killed run left half written is dropped and written anew.
"""

import json
from collections.abc import Callable, Sequence
from pathlib import Path

from foretoken.engine.engine import Engine
from foretoken.engine.outputs import GrowingOutput
from foretoken.errors import ConfigError
from foretoken.training.data.prompts import PromptSet
from foretoken.training.run_folder import append_lines, make, read_lines
from foretoken.training.settings import DataSettings
from foretoken.types import CompletionOutput, SamplingParams

FILE = "answers.jsonl"


def read_answers(folder: Path) -> list[list[int]]:
    """Prompt and answer of every whole line, as token ids; a cut-off last line is removed. Raises
    ConfigError: a line is broken."""
    path = folder / FILE
    return [_ids(path, *numbered) for numbered in enumerate(read_lines(path), start=1)]


def _ids(path: Path, number: int, line: bytes) -> list[int]:
    try:
        ids = json.loads(line)["ids"]
    except (ValueError, KeyError, TypeError):
        ids = None
    if not isinstance(ids, list):
        given, allowed = line[:120], '{"ids": [ID, ...]}; delete the file to have it written anew'
        raise ConfigError(f"{path} line {number}", given, allowed)
    return ids


def write_answers(
    engine: Engine,
    prompts: PromptSet,
    settings: DataSettings,
    folder: Path,
    report: Callable[[str], None],
) -> None:
    """Let the target answer every prompt that has no answer in `folder` yet. Raises ConfigError:
    `folder` holds answers to other prompts, or a broken line; TrainingError: the disk is full."""
    make(folder)
    done = _count_done(folder, prompts)
    while done < len(prompts.ids):
        end = min(done + settings.batch, len(prompts.ids))
        if done < settings.held_out:
            end, temperature = min(end, settings.held_out), 0.0
        else:
            turn = (done - settings.held_out) // settings.batch
            temperature = settings.temperatures[turn % len(settings.temperatures)]
        params = SamplingParams(
            temperature=temperature, seed=done, max_tokens=settings.answer_tokens, detokenize=False
        )
        asked = prompts.ids[done:end]
        found = answer_all(engine, asked, params)
        lines = [
            json.dumps({"ids": [*ids, *answer.token_ids]})
            for ids, answer in zip(asked, found, strict=True)
        ]
        append_lines(folder / FILE, lines, "start again to go on with the answers")
        done = end
        report(f"answered {done} prompts of {len(prompts.ids)}")


def answer_all(
    engine: Engine, prompts: Sequence[Sequence[int]], params: SamplingParams
) -> list[CompletionOutput]:
    """One continuation per prompt (token ids), in the order of the prompts; `params.n` is 1. Raises
    RequestError: a prompt or a parameter is wrong; nothing has been started then."""
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


def _count_done(folder: Path, prompts: PromptSet) -> int:
    """How many prompts have an answer; each answer must begin with its prompt."""
    found = read_answers(folder)
    for number, (ids, prompt) in enumerate(zip(found, prompts.ids, strict=False), start=1):
        if ids[: len(prompt)] != list(prompt):
            allowed = "answers to data.prompts; name another --out, or delete the file"
            raise ConfigError(f"{folder / FILE} line {number}", "another prompt's answer", allowed)
    return len(found)
