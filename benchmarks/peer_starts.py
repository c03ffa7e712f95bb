"""Start-up of `peers.py`: from a process with its imports done to the first token of a pair.

A start is a fresh worker that loads a target and its draft and answers one short prompt. The first
of each engine is not counted: it fills the page cache, and whatever the engine keeps for the next.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from common import in_turn
from peer_asking import TAIL
from peer_cases import CASES, Setting, mode_of
from peer_load import Loader
from peer_setup import WorkerEnded
from peer_table import Measured
from prompts import load_prompts

PAIRS = {
    "16 bit": "16 bit, draft 80 %",
    "int8": "int8, draft 80 %",
    "int4": "int4, draft 80 %",
}
"""Cases whose target and draft are loaded, by precision of the target."""


def one_start(loader: Loader, engine: str, case: str, setting: Setting, models: Path
) -> tuple[float, float]:  # fmt: skip
    """Seconds from the end of the imports to the first token, and from the process's start.

    Raises:
        WorkerEnded: it did not start.
    """
    prompt = load_prompts(models, "fresh").ids[0][-TAIL:]
    began = time.perf_counter()
    with loader.load(engine, CASES[case], setting) as worker:
        answer = worker.ask([prompt], 1)
        return worker.load_s + answer.seconds, time.perf_counter() - began


def starts(
    loader: Loader, settings: Mapping[str, Setting], weights: str, models: Path, turns: int
) -> tuple[dict[str, Measured], dict[str, str]]:
    """Each engine's starts with a pair, and those that failed, with the reason."""
    case, missing = PAIRS[weights], dict[str, str]()
    found: dict[str, list[tuple[float, float]]] = {}
    for engine, setting in settings.items():
        try:
            one_start(loader, engine, case, setting, models)
            found[engine] = []
        except WorkerEnded as error:
            missing[engine] = str(error)
    for turn in range(turns):
        for engine in in_turn(list(found), turn):
            found[engine].append(one_start(loader, engine, case, settings[engine], models))
    return {
        engine: _measured(times, mode_of(engine, weights, settings[engine]), settings[engine])
        for engine, times in found.items()
    }, missing


def _measured(times: Sequence[tuple[float, float]], mode: str, setting: Setting) -> Measured:
    seconds = tuple(ready for ready, _ in times)
    process_s = statistics.median(whole for _, whole in times)
    draft = setting.get("draft", "16 bit")
    return Measured(
        seconds=seconds,
        shown=statistics.median(seconds),
        unit="s",
        read_gb_per_s=0.0,
        note=f"{mode}, draft {draft}; from the start of the process {process_s:.2f} s",
    )
