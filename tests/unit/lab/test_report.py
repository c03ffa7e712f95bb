"""Reports: complete, self-contained, the same for the same data, and drawn from what is there."""

import csv
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.records.run_files import LineWriter, write_json
from foretoken.lab.report.accepted import by_position, lengths_by_k
from foretoken.lab.report.canvas import as_svg, house_style
from foretoken.lab.report.figures import ONE_RUN, run_plots
from foretoken.lab.report.html import Stamp, write_report
from foretoken.lab.report.judged import names_of, read_runs, requests_csv
from foretoken.lab.report.times import blocks, label
from foretoken.lab.stats.intervals import Interval
from tests.unit.lab.summaries import ab, arm, bucket, class_gains, with_candidate, write_run
from tests.unit.lab.test_steady import decaying

STAMP = Stamp(version="1", when="then")
POLICY = load_policy(None)


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
    write_report(root / "out", read_runs(folders, POLICY), POLICY, STAMP)
    return root / "out"


def test_the_page_is_whole_and_self_contained(page: Path) -> None:
    text = (page / "report.html").read_text("utf-8")
    parser = Balanced()
    parser.feed(text)
    assert not parser.wrong and not parser.open
    assert "<script" not in text, "what users wrote is escaped, and nothing runs"
    assert not re.search(r'(?:src|href)="(?!#)', text), "nothing is loaded from elsewhere"
    assert "For part of the traffic only" in text and "It would ship at 1 requests/s" in text
    assert "let k fall to 0 above 1" in text


def test_ids_of_figures_do_not_clash(page: Path) -> None:
    text = (page / "report.html").read_text("utf-8")
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids)
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    assert used <= set(ids)


def test_every_plot_is_drawn_and_written(page: Path) -> None:
    names = {path.stem for path in (page / "plots").glob("*.png")}
    one = {f"load-8-{name}" for name, *_ in ONE_RUN}
    assert one - names == set()
    along = {"gain", "tpot_along", "ttft_along", "goodput_along", "frontier"}
    assert along <= names
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in (page / "plots").iterdir())


def test_figures_follow_the_page_s_colours(page: Path) -> None:
    text = (page / "report.html").read_text("utf-8")
    assert "var(--ink)" in text and "var(--grid)" in text
    assert 'width="' not in re.findall(r"<svg[^>]*>", text)[0]


def test_numbers_are_there_for_machines(page: Path) -> None:
    with (page / "gains.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert {row["run"] for row in rows} == {"load-1", "load-8"}
    assert any(float(row["ratio"]) == 1.7 for row in rows if row["metric"] == "tpot_p50")
    lines = [json.loads(line) for line in (page / "report.jsonl").read_text().splitlines()]
    assert [line["decision"]["verdict"] for line in lines] == ["SHIP", "DO NOT SHIP"]
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
    rows = csv.DictReader(requests_csv([run]).splitlines())
    assert sum(row["warm_up"] == "True" for row in rows) == 2 * 8 * cut


def test_blocks_are_counted_in_whole_numbers(tmp_path: Path) -> None:
    write_json(tmp_path / "run" / "summary.json", ab(1.5, blocks=4))
    [run] = read_runs([tmp_path / "run"], POLICY)
    figure = blocks(run)
    assert figure is not None
    ticks = figure.axes[0].get_xticks()
    assert all(float(tick).is_integer() for tick in ticks)


def test_a_bare_summary_is_enough(tmp_path: Path) -> None:
    bare = with_candidate(ab(1.6), acceptance=(bucket(histogram=(), num_steps=None),), ttft=None)
    write_json(tmp_path / "run" / "summary.json", replace(bare, arms=(arm("off"), bare.arms[1])))
    [run] = read_runs([tmp_path / "run"], load_policy(None))
    names = [plot.name.removeprefix("run-") for plot in run_plots(run)]
    assert names == ["latency", "acceptance", "gains", "blocks"]
    write_report(tmp_path / "out", [run], POLICY, STAMP)
    assert not (tmp_path / "out" / "requests.csv").exists()


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


def test_smaller_k_follow_from_the_histogram() -> None:
    """Ten verifications at k = 2: four rejected at once, three after one, three not at all."""
    assert lengths_by_k([4, 3, 3]) == pytest.approx([1 + 6 / 10, 1 + 9 / 10])


@pytest.mark.parametrize(
    ("metric", "shown"),
    [("tpot_p50", "TPOT P50"), ("tokens_per_s", "tokens/s"), ("e2e_p99", "whole answer P99"),
     ("goodput", "goodput"), ("cost", "cost")],
)  # fmt: skip
def test_labels(metric: str, shown: str) -> None:
    assert label(metric) == shown


@pytest.mark.slow
def test_the_command_writes_and_names_the_page(tmp_path: Path) -> None:
    write_run(tmp_path / "run", ab(1.6))
    result = CliRunner().invoke(app, ["lab", "report", str(tmp_path / "run")])
    assert result.exit_code == 0, result.output
    assert "report.html" in result.stdout
    listed = CliRunner().invoke(app, ["lab", "report", str(tmp_path / "run"), "--json"])
    files = json.loads(listed.stdout)["files"]
    assert len(files) > 10 and all(Path(name).is_file() for name in files)
    assert (tmp_path / "run" / "report" / "report.html").is_file()
    assert CliRunner().invoke(app, ["lab", "report", str(tmp_path)]).exit_code == 2
