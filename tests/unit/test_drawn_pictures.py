"""Scripts that draw pictures, on made-up results: which line is whose, and who is left out."""

import json
import re
import sys
from argparse import Namespace
from collections.abc import Iterator
from importlib import import_module
from itertools import combinations
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from foretoken.lab.report.canvas import house_style, new_figure
from foretoken.training import run_folder
from tests.outside import module_outside

ROOT = Path(__file__).parents[2]
EIGHT = "8-bit activations"


@pytest.fixture(scope="module")
def used() -> Any:
    """The script, and the modules whose line it reads."""
    folders = [str(ROOT / "scripts"), str(ROOT / "benchmarks")]
    sys.path[:0] = folders
    try:
        names = ("draw_roofline", "peer_table", "common")
        return SimpleNamespace(**{name: import_module(name) for name in names})
    finally:
        del sys.path[: len(folders)]


def measured(used: Any, shown: float, note: str, floor: float | None = None, **more: Any) -> Any:
    """An engine whose floor, in tokens a second, is `floor`."""
    figures = {"seconds": tuple(turn / shown for turn in (0.9, 1.0, 1.2)), "shown": shown,
               "unit": "tokens/s", "read_gb_per_s": 40.0, "note": note}  # fmt: skip
    if floor is not None:
        figures["floor_s"] = tuple(turn / floor for turn in (0.9, 1.0, 1.1))
    return used.peer_table.Measured(**{**figures, **more})


def printed(used: Any, capsys: pytest.CaptureFixture[str]) -> str:
    """As `benchmarks/peers.py` ends."""
    wide = {
        "foretoken": measured(used, 38.0, "weight-only; threads 2", 40.0),
        "foretoken, 8-bit activations": measured(used, 36.0, f"{EIGHT}; threads 2", 40.0),
        "llama-cpp": measured(used, 30.0, f"{EIGHT}; poll 0", 40.0),
        "openvino": measured(used, 99.0, f"{EIGHT}; k 3", 40.0, right=False),
    }
    drafts = {
        "foretoken": measured(used, 77.0, "weight-only; k 3"),
        "openvino": measured(used, 52.0, f"{EIGHT}; k 3"),
    }
    eight = {"foretoken": measured(used, 20.0, "16 bit"), "vllm": measured(used, 15.0, "16 bit")}
    first = {"foretoken": measured(used, 0.8, "16 bit", unit="s")}
    engines = {
        ("plain, int8", "weight-only"): wide,
        ("plain, int8", EIGHT): wide,
        ("draft right at 80 %, int8", "weight-only"): drafts,
        ("draft right at 80 %, int8", EIGHT): {},
        ("eight at once, 16 bit", "16 bit"): eight,
        ("prompt of 4,000, 16 bit", "16 bit"): first,
    }
    table = {(row.name, row.mode): row for row in used.peer_table.ROWS}
    rows = [used.peer_table.judge(table[key], own) for key, own in engines.items()]
    used.common.finish("peers", {}, Namespace(quick=True), {"rows": rows}, [])
    return f"met, or missed\n{capsys.readouterr().out}"


def test_lines_have_everyone_who_was_right(used: Any, capsys: pytest.CaptureFixture[str]) -> None:
    found = json.loads(printed(used, capsys).splitlines()[-1])
    lines = {line.name: line for line in used.draw_roofline.lines_of(found)}
    told = {
        name: [(p.engine, p.eight_bits, round(p.at, 2)) for p in line.points]
        for name, line in lines.items()
    }
    assert told == {
        "plain, int8": [
            ("llama-cpp", True, 0.75),
            ("foretoken", False, 0.95),
            ("foretoken", True, 0.9),
        ],
        "draft right at 80 %, int8": [("openvino", True, 52.0), ("foretoken", False, 77.0)],
        "eight at once, 16 bit": [("vllm", False, 15.0), ("foretoken", False, 20.0)],
    }
    assert [name for name, line in lines.items() if line.has_floor] == ["plain, int8"]


@pytest.mark.slow
def test_the_picture_is_drawn_from_the_last_line(
    used: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, picture = tmp_path / "peers.txt", tmp_path / "roofline.svg"
    file.write_text(printed(used, capsys), "utf-8")
    monkeypatch.setattr(sys, "argv", ["draw_roofline", str(file), "--to", str(picture)])
    used.draw_roofline.main()
    drawn = picture.read_text("utf-8")
    texts = {one.text for one in ElementTree.fromstring(drawn).iter() if one.text}
    assert {"llama.cpp", "OpenVINO", "vLLM", "eight at once, 16 bit", "0.95"} <= texts
    assert "ONNX Runtime" not in texts, "it took no part"
    assert "var(--" not in drawn, "an image has no page to take colours of"
    light, _, dark = drawn.partition("prefers-color-scheme: dark")
    assert 'class="ground"' in light and ".ground { fill:" in dark, "its ground follows the scheme"
    used.draw_roofline.main()
    assert picture.read_text("utf-8") == drawn, "the same for the same numbers"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    yield from module_outside("scripts", "draw_scaling")


def case(replicas: int, users: int, **found: list[float]) -> dict[str, Any]:
    starts = {
        policy: [{"found": one, "ttft_p99": 1.0 - one / 2} for one in shares]
        for policy, shares in found.items()
    }
    return {"case": {"replicas": replicas, "users": users}, "starts": starts}


CASES = [
    case(4, 32, random=[0.6, 0.7, 0.5], prefix=[0.8, 0.9, 0.85]),
    case(1, 32, random=[0.9], prefix=[0.9]),
    case(1, 96, random=[0.7], prefix=[0.7]),
]


def test_a_line_is_of_one_policy_at_one_load(script: ModuleType) -> None:
    assert script.points_of(CASES, "random", 32, "found") == [(1, 0.9), (4, 0.6)]
    assert script.points_of(CASES, "prefix", 32, "found") == [(1, 0.9), (4, 0.85)]
    assert script.points_of(CASES, "turns", 32, "found") == []


def test_the_picture_names_policies_and_loads(script: ModuleType, tmp_path: Path) -> None:
    printed = tmp_path / "routed.txt"
    printed.write_text("| rows |\n" + json.dumps({"results": {"cases": CASES}}) + "\n")
    picture = script.draw(script.cases_of(printed.read_text()))
    texts = {"".join(one.itertext()).strip() for one in ElementTree.fromstring(picture).iter()}
    assert {"longest known prefix, 32 users each", "random, 96 users each"} <= texts
    assert "round robin, 32 users each" not in texts, "it was not run"


@pytest.fixture(scope="module")
def training_script() -> Iterator[ModuleType]:
    yield from module_outside("scripts", "draw_training")


def make_run(folder: Path, lengths: list[float]) -> Path:
    history = [
        {"step": i, "tokens": 4096 * 100 * (i + 1), "tokens_a_step": length}
        for i, length in enumerate(lengths)
    ]
    folder.mkdir()
    run_folder.save(folder, 100, {"progress": {"history": history}})
    return folder


def test_the_best_is_named_first(
    training_script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    runs = [make_run(tmp_path / "weak", [1.2, 1.4]), make_run(tmp_path / "strong", [1.5, 2.5])]
    picture = tmp_path / "picture.svg"
    monkeypatch.setattr(sys, "argv", ["draw_training", *map(str, runs), "--to", str(picture)])
    training_script.main()
    drawn = picture.read_text("utf-8")
    names = re.findall(r"strong|weak", drawn)
    assert names[0] == "strong" and "weak" in names


def test_points_are_of_tokens_seen(training_script: ModuleType) -> None:
    history = [{"tokens": 2e6, "tokens_a_step": 1.5, "minutes": 3.0}]
    assert training_script.points_of(history) == [(2.0, 1.5)]


@pytest.fixture(scope="module")
def pictures() -> Iterator[ModuleType]:
    yield from module_outside("scripts", "pictures")


NO_RED = ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216),
          (-0.003882, -0.048116, 1.051998))  # fmt: skip
NO_GREEN = ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413),
            (-0.011820, 0.042940, 0.968881))  # fmt: skip
"""What people without one kind of cones see (Machado, Oliveira and Fernandes 2009), linear RGB."""


def linear(colour: str) -> np.ndarray:
    """Linear RGB of `#rrggbb`."""
    parts = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(parts <= 0.04045, parts / 12.92, ((parts + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    """CIE L*a*b* of linear RGB."""
    rows = ((0.4124, 0.3576, 0.1805), (0.2126, 0.7152, 0.0722), (0.0193, 0.1192, 0.9505))
    x, y, z = np.cbrt(np.array(rows) @ np.clip(rgb, 0, 1) / (0.9505, 1.0, 1.089))
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


@pytest.mark.parametrize(("dark", "ground"), [(0, "#ffffff"), (0, "#f5f7fa"), (1, "#18202b")])
def test_colours_are_seen_and_told_apart(pictures: ModuleType, dark: int, ground: str) -> None:
    """WCAG's contrast of 3 for graphics; and far enough apart for those who see no red or green."""
    light_of = (0.2126, 0.7152, 0.0722)
    drawn = {name: both[dark] for name, both in pictures.PALETTE.items() if name != "grid"}
    for name, colour in drawn.items():
        lights = [float(linear(c) @ light_of) + 0.05 for c in (colour, ground)]
        assert max(lights) / min(lights) >= 2.75, name
    series = [drawn[n] for n in drawn if n == "candidate" or n.startswith("series")]
    for seen in (np.eye(3), np.array(NO_RED), np.array(NO_GREEN)):
        for one, other in combinations(series, 2):
            apart = np.linalg.norm(lab(seen @ linear(one)) - lab(seen @ linear(other)))
            assert apart >= 12, (one, other, apart)


def test_no_two_lines_look_alike(pictures: ModuleType) -> None:
    """Two methods once shared a blue."""
    styles = [pictures.line_style(number) for number in range(3 * len(pictures.SERIES))]
    assert len(set(map(str, styles))) == len(styles) == 21
    assert len({style["color"] for style in styles[:7]}) == 7


def test_a_picture_and_its_ground_follow_the_scheme(pictures: ModuleType) -> None:
    """It once was a white slab on a dark page, and then dark words on a dark page of another
    scheme than the reader's."""
    with house_style():
        figure, axes = new_figure()
        axes.plot([1, 2], [1, 2], **pictures.line_style(0), label="one")
        axes.legend()
        picture = pictures.as_image(figure, "x")
    ElementTree.fromstring(picture)
    light_rules, dark_rules = picture.split("@media (prefers-color-scheme: dark)")
    assert light_rules.count('class="ground"') == 1 and 'fill="#ffffff"' in light_rules
    assert ".ground { fill: #18202b }" in dark_rules and "#ffffff" not in dark_rules
    size = re.match(r'<svg width="(\d+)" height="(\d+)" ', picture)
    assert size is not None and int(size[1]) > int(size[2]) > 100
    for light, dark in (pictures.PALETTE["ink"], pictures.PALETTE["candidate"]):
        assert f'[style*="fill: {light}"] {{ fill: {dark} !important }}' in picture
