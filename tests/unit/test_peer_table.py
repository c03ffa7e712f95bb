"""The arithmetic of `benchmarks/peers.py` on planted numbers: goals, floors, intervals, arms."""

import sys
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from foretoken.shape.model import ModelShape

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
TURNS = (1.0, 1.3, 0.9, 1.1, 2.0, 1.0, 0.8)
"""What the machine's mood does to everyone alike."""
SHAPE = ModelShape.from_fields(
    {
        "model_type": "llama", "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 3,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 100,
        "max_position_embeddings": 64, "rms_norm_eps": 1e-5,
    }
)  # fmt: skip
MATRICES = 3 * (8 * (2 * 8 + 2 * 4) + 3 * 8 * 16)
HEAD = 100 * 8
NORMS = 3 * 2 * 8 + 8


@pytest.fixture(scope="module")
def bench() -> Any:
    names = ("peer_table", "bandwidth", "peer_cases", "peer_search", "peers")
    sys.path.insert(0, str(BENCHMARKS))
    try:
        return SimpleNamespace(**{name: import_module(name) for name in names})
    finally:
        sys.path.remove(str(BENCHMARKS))


def measured(bench: Any, seconds: float, **more: Any) -> Any:
    """An engine that takes so long when the machine is at ease."""
    own = tuple(seconds * turn for turn in TURNS)
    figures = {"seconds": own, "shown": 1 / seconds, "unit": "tokens/s", "read_gb_per_s": 40.0}
    return bench.peer_table.Measured(**{**figures, **more})


def row(bench: Any, wanted: float | None, over: str = "peers") -> Any:
    return bench.peer_table.Row(
        name="planted", part="int8", metric="decode", mode="weight-only", wanted=wanted, over=over
    )


def test_a_goal_is_judged_against_the_fastest_peer(bench: Any) -> None:
    table = bench.peer_table
    engines = {
        "foretoken": measured(bench, 2.0),
        "openvino": measured(bench, 2.5),
        "llama-cpp": measured(bench, 3.0),
    }
    met = table.judge(row(bench, 1.25), engines)
    assert met.best_peer == "openvino"
    assert met.judged.value == pytest.approx(1.25)
    assert met.met and met.short_by == 0.0
    missed = table.judge(row(bench, 1.5), engines)
    assert not missed.met
    assert missed.short_by == pytest.approx(1 / 6)
    assert "MISSED by 16.7%" in table.verdict(missed)
    [goal] = table.goals([missed])
    assert (goal.measured, goal.met) == (pytest.approx(1.25), False)


def test_what_slows_a_turn_for_all_widens_no_interval(bench: Any) -> None:
    engines = {"foretoken": measured(bench, 2.0), "vllm": measured(bench, 2.2)}
    ratio = bench.peer_table.judge(row(bench, None), engines).judged
    assert ratio.repeats == len(TURNS)
    assert ratio.low == pytest.approx(1.1) and ratio.high == pytest.approx(1.1)


def test_what_slows_one_engine_widens_the_interval(bench: Any) -> None:
    noisy = tuple(2.2 * turn for turn in reversed(TURNS))
    vllm = replace(measured(bench, 2.2), seconds=noisy)
    engines = {"foretoken": measured(bench, 2.0), "vllm": vllm}
    ratio = bench.peer_table.judge(row(bench, None), engines).judged
    assert ratio.value == pytest.approx(1.1)
    assert ratio.low < 1.0 < ratio.high


def test_an_engine_in_the_other_mode_is_nobodys_peer(bench: Any) -> None:
    engines = {
        "foretoken": measured(bench, 2.0),
        "foretoken, 8-bit activations": measured(bench, 1.0),
        "openvino": measured(bench, 3.0),
    }
    assert bench.peer_table.judge(row(bench, 1.0), engines).best_peer == "openvino"


def test_a_wrong_text_is_no_speed(bench: Any) -> None:
    table = bench.peer_table
    wrong = measured(bench, 1.0, right=False)
    beside = table.judge(
        row(bench, 1.0),
        {"foretoken": measured(bench, 2.0), "openvino": wrong, "vllm": measured(bench, 2.4)},
    )
    assert beside.best_peer == "vllm"
    ours = table.judge(row(bench, 1.0), {"foretoken": wrong, "vllm": measured(bench, 2.4)})
    assert ours.judged is None and ours.met is None
    assert "our text is wrong" in table.verdict(ours)


def test_a_mode_that_is_not_there_is_not_judged(bench: Any) -> None:
    found = bench.peer_table.judge(row(bench, 1.0), {"vllm": measured(bench, 2.0)}, note="no mode")
    assert found.met is None and "no mode" in bench.peer_table.verdict(found)


def test_the_floor_is_judged_turn_by_turn(bench: Any) -> None:
    floors = tuple(1.9 * turn for turn in TURNS)
    engines = {"foretoken": measured(bench, 2.0, floor_s=floors), "vllm": measured(bench, 9.0)}
    found = bench.peer_table.judge(row(bench, 0.97, over="floor"), engines)
    assert found.judged.value == pytest.approx(0.95)
    assert found.short_by == pytest.approx(1 - 0.95 / 0.97)
    assert found.over_peer.value == pytest.approx(4.5)


def test_a_token_reads_all_weights_but_embeddings_and_its_keys(bench: Any) -> None:
    read = bench.bandwidth.floor_bytes
    keys = 2 * 3 * 4 * 2 * 30.0
    assert read(SHAPE, "16 bit", 30) == pytest.approx(2 * (MATRICES + HEAD + NORMS) + keys)
    outputs = 3 * (8 + 2 * 4 + 2 * 16 + 2 * 8)
    assert read(SHAPE, "int8", 0) == MATRICES + HEAD + 2 * NORMS + 4 * (outputs + 100)


def found(bench: Any, speed: float, **setting: Any) -> Any:
    return bench.peer_search.Found(best=setting, speed=speed, versions={"own": "1"}, tried=[])


def test_what_was_found_is_kept_for_a_machine_and_its_versions(bench: Any, tmp_path: Path) -> None:
    path, versions = tmp_path / "settings.json", {"own": "1"}
    file = bench.peer_search.SettingsFile(path, {"cores": 2})
    file.put("openvino", "int8", found(bench, 30.0, threads=2))
    again = bench.peer_search.SettingsFile(path, {"cores": 2})
    assert again.get("openvino", "int8", versions) == found(bench, 30.0, threads=2)
    assert again.get("openvino", "int8", {"own": "2"}) is None
    cases = bench.peer_cases.CASES
    assert again.first_like("openvino", cases["int4"], versions) == {"threads": 2}
    assert again.first_like("openvino", cases["int4, draft 80 %"], versions) == {}
    with pytest.raises(SystemExit, match="--settings"):
        bench.peer_search.SettingsFile(path, {"cores": 4})


def test_a_peer_far_behind_is_named_and_not_asked(bench: Any) -> None:
    results = {
        "foretoken": found(bench, 20.0, threads=2),
        "openvino": found(bench, 50.0, threads=2),
        "llama-cpp": found(bench, 24.0, threads=2),
    }
    arms, missing = bench.peers.choose_arms(bench.peer_cases.CASES["int8"], results)
    assert set(arms) == {"foretoken", "openvino"}, "ours stays however slow"
    assert missing == {"llama-cpp": "0.48 of openvino's speed when it was tuned: not asked again"}


def test_we_are_also_asked_with_a_peers_draft(bench: Any) -> None:
    results = {
        "foretoken": found(bench, 60.0, draft="int4", k=3),
        "openvino": found(bench, 50.0, draft="int8", k=2),
    }
    arms, _ = bench.peers.choose_arms(bench.peer_cases.CASES["int8, draft 80 %"], results)
    assert arms["foretoken (draft int8)"].setting == {"draft": "int8", "k": 3}
    own = dict.fromkeys(arms, measured(bench, 1.0)) | {"foretoken": measured(bench, 2.0)}
    assert bench.peers.best_of_engine(arms, own)["foretoken"] == own["foretoken"]


def test_every_row_is_run_by_one_part(bench: Any) -> None:
    rows = bench.peer_table.ROWS
    assert {row.part for row in rows} == set(bench.peer_cases.CASES)
    assert len({(one.name, one.mode) for one in rows}) == len(rows)
