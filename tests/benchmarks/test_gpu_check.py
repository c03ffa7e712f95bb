"""The script that is run when there is a GPU, rehearsed without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"


def test_every_section_is_rehearsed() -> None:
    """On twins of the kernels, with tiny sizes: a line each, no section cut or broken, and nothing
    that differs."""
    done = subprocess.run(
        [sys.executable, BENCHMARKS / "gpu_check.py", "--rehearse"],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=True,
    )
    lines = {line["section"]: line for line in map(json.loads, done.stdout.splitlines())}
    assert [*lines] == [
        "card", "tests", "bits", "models", "shapes", "steps", "mixtures", "yardstick",
    ]  # fmt: skip
    assert not [line for line in lines.values() if "error" in line], lines
    bits = {name: found for name, found in lines["bits"].items() if name.startswith("rows")}
    assert len(bits) == 5 and set(bits.values()) == {"equal"}
    assert {lines["models"][name] for name in ("ngram", "draft model")} == {"equal"}
    assert lines["steps"]["batch 1, 1 rows, place 504"]["launches"] <= 9 * 3 + 8
    mixtures = lines["mixtures"]
    for name, place in (("tiny qwen3-30b-a3b", 504), ("tiny gpt-oss-20b", 1000)):
        assert mixtures[f"rows {name}"] == "equal"
        step = mixtures[f"{name}, batch 1, 1 rows, place {place}"]
        assert step["launches"] <= 12 * 3 + 8 and step["experts"] == 2
        assert step["mib"][0] == step["mib"][1] > 0
