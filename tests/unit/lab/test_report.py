"""Reports: complete, self-contained, the same for the same data, and drawn from what is there."""

import csv
import re
from dataclasses import replace
from html.parser import HTMLParser
from itertools import combinations
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.decide.overall import judge_runs
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.records.run_files import LineWriter, write_json
from foretoken.lab.report.canvas import (
    PALETTE,
    SERIES,
    as_image,
    as_svg,
    house_style,
    line_style,
    new_figure,
    variables,
)
from foretoken.lab.report.page import Stamp, write_page
from foretoken.lab.report.plots import ONE_RUN, blocks, by_position, label, run_plots
from foretoken.lab.report.runs import ReportRun, names_of, read_runs, write_tables
from foretoken.lab.stats.intervals import Interval
from tests.unit.lab.summaries import ab, arm, bucket, class_gains, with_candidate, write_run
from tests.unit.lab.test_steady import decaying

STAMP = Stamp(version="1", when="then", policy="default")
POLICY = load_policy(None)


def written(file: Path, runs: tuple[ReportRun, ...]) -> str:
    """The page about these runs."""
    overall = judge_runs([(run.summary, run.decision) for run in runs], POLICY)
    write_page(file, runs, overall, STAMP)
    return file.read_text("utf-8")


class Balanced(HTMLParser):
    """Collects tags that are closed in the wrong order."""

    VOID = {"meta", "br", "link", "img", "use", "path", "hr"}

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.wrong: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        if tag in self.VOID:
            return
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a report about two loads."""
    root = tmp_path_factory.mktemp("report")
    folders = []
    for load, speedup in ((1.0, 1.7), (8.0, 1.1)):
        good = Interval(0.9 * load, 0.8 * load, load)
        arms = tuple(replace(a, requests_per_s=load, goodput_per_s=good) for a in ab(speedup).arms)
        nasty: dict[str, Any] = {
            "config": {"name": "<script>alert(1)</script>"},
            "notes": ("a < b & c",),
            "classes": (
                class_gains("json", 1.1 * speedup),
                class_gains("prose", speedup, pairs=90),
            ),
        }
        folders.append(write_run(root / f"load-{load:g}", replace(ab(speedup), arms=arms, **nasty)))
    runs = read_runs(folders, POLICY)
    written(root / "out" / "page.html", runs)
    write_tables(root / "out", runs)
    return root / "out"


@pytest.mark.slow
def test_the_page_is_whole_and_self_contained(page: Path) -> None:
    text = (page / "page.html").read_text("utf-8")
    parser = Balanced()
    parser.feed(text)
    assert not parser.wrong and not parser.open
    assert "<script" not in text, "what users wrote is escaped, and nothing runs"
    assert not re.search(r'(?:src|href)="(?!#)', text), "nothing is loaded from elsewhere"
    first = re.sub(r"<[^>]*>", "", text.split("<h1>")[1]).strip()
    assert first.startswith("LEAVE IT OFF for part of the traffic"), "the verdict comes first"
    assert "LEAVE IT OFF for part of the traffic: it pays at 1 requests/s" in text
    assert "let k fall to 0 above 1" in text


@pytest.mark.slow
def test_ids_of_figures_do_not_clash(page: Path) -> None:
    text = (page / "page.html").read_text("utf-8")
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids)
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    assert used <= set(ids)


@pytest.mark.slow
def test_every_plot_is_drawn(page: Path) -> None:
    text = (page / "page.html").read_text("utf-8")
    titles = [title for _, title, *_ in ONE_RUN]
    along = ("Gain", "Time per output token", "Time to first token", "Goodput")
    titles += [f"{title} by requests/s" for title in along]
    titles.append("Throughput against interactivity")
    assert all(f"<h3>{title}</h3>" in text for title in titles)


@pytest.mark.slow
def test_figures_follow_the_page_s_colours(page: Path) -> None:
    text = (page / "page.html").read_text("utf-8")
    assert "var(--ink)" in text and "var(--grid)" in text
    assert 'width="' not in re.findall(r"<svg[^>]*>", text)[0]


@pytest.mark.slow
def test_numbers_are_there_for_machines(page: Path) -> None:
    with (page / "gains.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"load-1", "load-8"}
    assert any(float(row["ratio"]) == 1.7 for row in rows if row["metric"] == "tpot_p50")
    with (page / "rules.csv").open() as file:
        assert {"speedup", "ttft"} <= {row["rule"] for row in csv.DictReader(file)}
    with (page / "requests.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 3 * 2 * 30


def test_a_slow_start_is_left_out_as_in_the_summary(tmp_path: Path) -> None:
    """The distributions showed all requests, beside numbers of those after the start."""
    records = decaying("off", 0.0, 0) + decaying("on", 0.5, 1)
    write_json(tmp_path / "run" / "summary.json", ab(1.1))
    with LineWriter(tmp_path / "run" / "requests.jsonl") as writer:
        for record in records:
            writer.write(record)
    [run] = read_runs([tmp_path / "run"], POLICY)
    cut = without_start(records).cut
    assert cut >= 10 and len(run.of_arm("on")) == 8 * (40 - cut)
    write_tables(tmp_path, [run])
    rows = csv.DictReader((tmp_path / "requests.csv").read_text().splitlines())
    assert sum(row["warm_up"] == "True" for row in rows) == 2 * 8 * cut


def test_blocks_are_counted_in_whole_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / "run" / "summary.json", ab(1.5, blocks=4))
    [run] = read_runs([tmp_path / "run"], POLICY)
    figure = blocks(run)
    assert figure is not None
    ticks = figure.axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)


@pytest.mark.slow
def test_a_bare_summary_is_enough(tmp_path: Path) -> None:
    bare = with_candidate(ab(1.6), acceptance=(bucket(histogram=(), num_steps=None),), ttft=None)
    write_json(tmp_path / "run" / "summary.json", replace(bare, arms=(arm("off"), bare.arms[1])))
    [run] = read_runs([tmp_path / "run"], load_policy(None))
    names = [plot.name.removeprefix("run-") for plot in run_plots(run)]
    assert names == ["latency", "acceptance", "gains", "blocks"]
    assert "USE IT" in written(tmp_path / "page.html", (run,))


def test_runs_of_one_name_are_told_apart() -> None:
    """Their plots would overwrite each other."""
    assert names_of([Path("/x/a/run"), Path("/x/b/run")]) == ["a-run", "b-run"]
    assert names_of([Path("/x/one"), Path("/x/two")]) == ["one", "two"]
    assert names_of([Path("/x/one"), Path("/x/one")]) == ["1-x-one", "2-x-one"]


def test_the_same_data_gives_the_same_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", ab(1.6))
    runs = read_runs([tmp_path / "run"], load_policy(None))
    with house_style():
        first, second = (as_svg(by_position(run) or Figure(), "x") for run in (*runs, *runs))
    assert first == second


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
def test_colours_are_seen_and_told_apart(dark: int, ground: str) -> None:
    """WCAG's contrast of 3 for graphics; and far enough apart for those who see no red or green."""
    light_of = (0.2126, 0.7152, 0.0722)
    drawn = {name: both[dark] for name, both in PALETTE.items() if name != "grid"}
    for name, colour in drawn.items():
        lights = [float(linear(c) @ light_of) + 0.05 for c in (colour, ground)]
        assert max(lights) / min(lights) >= 2.75, name
    series = [colour for name, colour in drawn.items() if name.startswith("series")]
    for seen in (np.eye(3), np.array(NO_RED), np.array(NO_GREEN)):
        for one, other in combinations(series, 2):
            apart = np.linalg.norm(lab(seen @ linear(one)) - lab(seen @ linear(other)))
            assert apart >= 12, (one, other, apart)


def test_no_two_lines_look_alike() -> None:
    """Two methods once shared a blue."""
    styles = [str(line_style(number)) for number in range(3 * len(SERIES))]
    assert len(set(styles)) == len(styles)
    assert len({style["color"] for style in map(line_style, range(7))}) == 7


def test_a_picture_and_its_ground_follow_the_scheme() -> None:
    """It once was a white slab on a dark page, and then dark words on a dark page of another
    scheme than the reader's."""
    with house_style():
        figure, axes = new_figure()
        axes.plot([1, 2], [1, 2], **line_style(0), label="one")
        axes.legend()
        picture, inside = as_image(figure, "x"), as_svg(figure, "x")
    ElementTree.fromstring(picture)
    light_rules, dark_rules = picture.split("@media (prefers-color-scheme: dark)")
    assert light_rules.count('class="ground"') == 1 and 'fill="#ffffff"' in light_rules
    assert ".ground { fill: #18202b }" in dark_rules and "#ffffff" not in dark_rules
    size = re.match(r'<svg width="(\d+)" height="(\d+)" ', picture)
    assert size is not None and int(size[1]) > int(size[2]) > 100
    for light, dark in (PALETTE["ink"], PALETTE["series-1"]):
        assert f'[style*="fill: {light}"] {{ fill: {dark} !important }}' in picture
    known = variables(dark=False)
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", inside))
    assert used and all(f"{name}: #" in known for name in used)
    assert not re.findall(r"#[0-9a-f]{6}", inside), "every colour is the page's"


@pytest.mark.slow
def test_a_page_fits_a_phone(tmp_path: Path) -> None:
    """Rules are cards there, wide tables and plots are moved sideways inside their own."""
    write_run(tmp_path / "run", ab(1.6))
    page = written(tmp_path / "page.html", read_runs([tmp_path / "run"], POLICY))
    assert page.count("<table") == page.count(' scroll"><table') + page.count(
        'scroll long"><table class="rules">'
    )
    assert page.count("<svg") == page.count('<div class="scroll"><svg')
    for dark in (False, True):
        assert variables(dark=dark) in page


@pytest.mark.parametrize(
    ("metric", "shown"),
    [("tpot_p50", "TPOT P50"), ("tokens_per_s", "tokens/s"), ("e2e_p99", "whole answer P99"),
     ("goodput", "goodput"), ("cost", "cost")],
)  # fmt: skip
def test_labels(metric: str, shown: str) -> None:
    assert label(metric) == shown


@pytest.mark.slow
def test_the_command_writes_the_page_and_the_tables(tmp_path: Path) -> None:
    run, page = str(write_run(tmp_path / "run", ab(1.6))), tmp_path / "new" / "page.html"
    options = ["--html", str(page), "--csv", str(tmp_path / "tables")]
    result = CliRunner().invoke(app, ["lab", "decide", run, *options])
    assert result.exit_code == 0, result.output
    assert "<h1>USE IT</h1>" in page.read_text("utf-8")
    names = {path.name for path in (tmp_path / "tables").iterdir()}
    assert names == {"gains.csv", "rules.csv", "requests.csv"}
    refused = CliRunner().invoke(app, ["lab", "decide", run, "--html", str(tmp_path)])
    assert refused.exit_code == 2 and "--html" in refused.output
    gone = CliRunner().invoke(app, ["lab", "report", run])
    assert gone.exit_code == 2 and "decide RUN... --html FILE" in gone.output
