"""Reports: complete, self-contained, the same for the same data, and drawn from what is there."""

import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.analysis.warm_up import without_start
from foretoken.lab.decide.overall import judge_runs
from foretoken.lab.decide.ship_policy import load_policy
from foretoken.lab.records.run_files import LineWriter, write_json
from foretoken.lab.report.canvas import variables
from foretoken.lab.report.page import write_page
from foretoken.lab.report.runs import ReportRun, names_of, read_runs
from foretoken.lab.stats.intervals import Interval
from tests.unit.lab.summaries import ab, arm, bucket, class_gains, with_candidate, write_run
from tests.unit.lab.test_statistics import decaying

POLICY = load_policy(None)


def written(file: Path, runs: tuple[ReportRun, ...]) -> str:
    """The page about these runs."""
    overall = judge_runs([(run.summary, run.decision) for run in runs], POLICY)
    write_page(file, runs, overall, "default")
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
        if tag not in self.VOID and (not self.open or self.open.pop() != tag):
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
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(set(ids)) == len(ids), "ids of figures do not clash"
    used = set(re.findall(r"url\(#([^)]+)\)", text)) | set(re.findall(r'href="#([^"]+)"', text))
    assert used <= set(ids)


@pytest.mark.slow
def test_every_plot_is_drawn_in_the_page_s_colours(page: Path) -> None:
    text = (page / "page.html").read_text("utf-8")
    titles = re.findall(r"<h3>([^<]*)</h3>", text)
    assert titles == ["Latency", "Acceptance by position", "Gain by requests/s", "Gain by class",
                      "Acceptance by class"]  # fmt: skip
    for svg in re.findall(r"<svg.*?</svg>", text, re.DOTALL):
        used = set(re.findall(r"var\((--[a-z0-9-]+)\)", svg))
        assert {"--faint", "--grid"} <= used
        assert all(f"{name}: #" in variables(dark=False) for name in used)
        assert not re.findall(r"#[0-9a-f]{6}", svg), "every colour is the page's"
        assert 'width="' not in svg[: svg.index(">")]


def test_a_slow_start_is_left_out_as_in_the_summary(tmp_path: Path) -> None:
    """The distributions showed all requests, beside numbers of those after the start."""
    records = decaying("off", 0.0, 0) + decaying("on", 0.5, 1)
    write_json(tmp_path / "run" / "summary.json", ab(1.1))
    with LineWriter(tmp_path / "run" / "requests.jsonl") as writer:
        for record in records:
            writer.write(record)
    [run] = read_runs([tmp_path / "run"], POLICY)
    cut = without_start(records).cut
    assert cut >= 10
    assert sum(record.warm_up for record in run.read_requests()) == 2 * 8 * cut


@pytest.mark.slow
def test_a_bare_summary_is_enough(tmp_path: Path) -> None:
    bare = with_candidate(ab(1.6), acceptance=(bucket(histogram=(), num_steps=None),), ttft=None)
    write_json(tmp_path / "run" / "summary.json", replace(bare, arms=(arm("off"), bare.arms[1])))
    page = written(tmp_path / "page.html", read_runs([tmp_path / "run"], POLICY))
    assert re.findall(r"<h3>([^<]*)</h3>", page) == ["Latency", "Acceptance by class"]
    assert "USE IT" in page


def test_runs_of_one_name_are_told_apart() -> None:
    """Their plots would overwrite each other."""
    assert names_of([Path("/x/a/run"), Path("/x/b/run")]) == ["a-run", "b-run"]
    assert names_of([Path("/x/one"), Path("/x/two")]) == ["one", "two"]
    assert names_of([Path("/x/one"), Path("/x/one")]) == ["1-x-one", "2-x-one"]


def test_the_same_data_gives_the_same_plots(tmp_path: Path) -> None:
    write_run(tmp_path / "run", ab(1.6))
    runs = read_runs([tmp_path / "run"], POLICY)
    pages = [written(tmp_path / "page.html", runs) for _ in range(2)]
    first, second = (re.findall(r"<svg.*?</svg>", page, re.DOTALL) for page in pages)
    assert first and first == second


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


@pytest.mark.slow
def test_the_command_writes_the_page(tmp_path: Path) -> None:
    run, page = str(write_run(tmp_path / "run", ab(1.6))), tmp_path / "new" / "page.html"
    result = CliRunner().invoke(app, ["lab", "decide", run, "--html", str(page)])
    assert result.exit_code == 0, result.output
    assert "<h1>USE IT</h1>" in page.read_text("utf-8")
    tables = CliRunner().invoke(app, ["lab", "decide", run, "--csv", str(tmp_path / "tables")])
    assert tables.exit_code == 2 and "--csv" in tables.output and "summary.json" in tables.output
    refused = CliRunner().invoke(app, ["lab", "decide", run, "--html", str(tmp_path)])
    assert refused.exit_code == 2 and "--html" in refused.output
    gone = CliRunner().invoke(app, ["lab", "report", run])
    assert gone.exit_code == 2 and "decide RUN... --html FILE" in gone.output
