"""Runs of a pair of servers whose steps follow a known law."""

from dataclasses import replace
from pathlib import Path
from typing import Any

from foretoken.lab.analysis.cost_model import MeasuredCosts, learn
from foretoken.lab.records.results import RequestAcceptance, RequestRecord
from foretoken.lab.records.run_files import GRID, LineWriter, write_json
from tests.unit.lab.summaries import ab
from tests.unit.lab.test_steps import a_block

CHANCE = 0.75
LENGTHS, LOADS = (1, 3, 5), (1, 4, 8, 24)
BASE_S, REQUEST_S, ROW_S, ONCE_S, DRAFT_S = 0.010, 0.0002, 0.0005, 0.001, 0.0004
OFF = "llama-server -m a.gguf --port {port} --parallel 24"
ON = f"{OFF} --spec-draft-model b.gguf --spec-type draft-simple --spec-draft-n-max {{k}}"


def law_s(batch: float, k: int, scale: float = 1.0) -> float:
    """A step's time; `scale` multiplies what drafting and verifying cost."""
    own = BASE_S + REQUEST_S * batch + ROW_S * batch
    return own + scale * (ROW_S * batch * k + (ONCE_S + DRAFT_S * k if k else 0.0))


def a_run(k: int, batch: int, scale: float = 1.0, chance: float = CHANCE) -> list[RequestRecord]:
    """Three blocks of requests that decode side by side, 39 steps each after the first token."""
    accepted = round(39 * sum(chance**i for i in range(1, k + 1)))
    told = RequestAcceptance(source="body", num_drafted=39 * k, num_accepted=accepted, num_steps=39)
    found = []
    for block in range(3):
        for record in a_block(block, batch, 0.0, law_s(batch, k, scale), bool(k)):
            tokens = 40 + (accepted if k else 0)
            found.append(
                replace(
                    record,
                    arm="on" if k else "off",
                    acceptance=told if k else None,
                    prompt_tokens=300,
                    output_tokens=tokens,
                )
            )
    return found


def a_model(scale: float = 1.0) -> MeasuredCosts:
    return learn(
        {
            k: [
                replace(record, block=record.block + 100 * batch)
                for batch in LOADS
                for record in a_run(k, batch, scale)
            ]
            for k in (0, *LENGTHS)
        }
    )


def write_grid(folder: Path, on: str = ON, scale: float = 1.0, loads: Any = LOADS) -> Path:
    """What `lab ab --grid k=... --grid concurrency=...` leaves."""
    rows = []
    for k in LENGTHS:
        for batch in loads:
            cell = folder / f"k-{k}_concurrency-{batch}"
            config = {
                "baseline": {"name": "off", "command": OFF},
                "candidate": {"name": "on", "command": on.replace("{k}", str(k))},
                "workload": {"file": "prompts.txt"},
                "load": {"kind": "closed", "concurrency": batch},
            }
            write_json(cell / "summary.json", ab(config=config))
            with LineWriter(cell / "requests.jsonl") as writer:
                for record in (*a_run(0, batch), *a_run(k, batch, scale)):
                    writer.write(record)
            rows.append({"values": {"k": k, "concurrency": batch}, "folder": cell.name})
    write_json(folder / GRID, {"kind": "grid", "schema": 1, "forced": False, "cells": rows})
    return folder
