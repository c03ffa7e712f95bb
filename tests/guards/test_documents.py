"""Documents say what is true: snippets run, generated files are fresh, layers are the layers."""

import re
import subprocess
import sys
import tomllib
from collections import Counter
from importlib import util
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import foretoken
from tests.guards.sources import PACKAGE, ROOT
from tests.shown import run_shown

GENERATED = ("cli.md", "configuration.md")
FOR_CHANGING = ("architecture.md", "glossary.md")
LOG = ROOT / "benchmarks" / "LOG.md"
MOST_WORDS = {"pages for users": 25_800, "notebook": 30_000, "all": 60_000}
"""Of all documents but the generated ones; a new page takes its words from here. 500 of the pages'
are what GPUs and audits of others added."""
MOST_WORDS_OF_THE_README = 1_200
SNIPPET = re.compile(r"<!-- test -->\n```python\n(.*?)```", re.DOTALL)
FENCE = re.compile(r"^```.*?^```$", re.DOTALL | re.MULTILINE)


def load_script(name: str) -> ModuleType:
    spec = util.spec_from_file_location(name, ROOT / "scripts" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def pyproject() -> dict[str, Any]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))


def documents() -> list[Path]:
    """Every page in the root and in docs, and the notebook."""
    return [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), LOG]


def words(pages: list[Path]) -> int:
    return sum(len(page.read_text("utf-8").split()) for page in pages)


def snippets() -> list[str]:
    """The README's Python blocks that are marked for testing."""
    return SNIPPET.findall((ROOT / "README.md").read_text("utf-8"))


@pytest.mark.parametrize(
    ("script", "page"), [("write_configuration", "configuration"), ("write_cli_help", "cli")]
)
def test_generated_pages_are_fresh(script: str, page: str) -> None:
    written = (ROOT / "docs" / f"{page}.md").read_text("utf-8")
    assert written == load_script(script).render(), "if what changed is meant, run `make docs`"


def test_readme_says_what_it_is_and_then_how_to_try_it() -> None:
    readme = (ROOT / "README.md").read_text("utf-8")
    first_screen, block = readme.split("```")[:2]
    assert block.splitlines()[1:] == ["make demo", "make test"]
    assert re.findall(r"^#+ (.*)", first_screen, re.MULTILINE) == ["Foretoken"]
    assert 60 <= len(first_screen.split()) <= 130, "three or four short sentences and the picture"
    assert "docs/generate.svg" in first_screen


def test_the_index_lists_every_page() -> None:
    index = (ROOT / "docs" / "README.md").read_text("utf-8")
    pages = [path.name for path in (ROOT / "docs").glob("*.md") if path.name != "README.md"]
    assert [name for name in sorted(pages) if f"]({name})" not in index] == []


def test_documents_can_be_read() -> None:
    pages = [page for page in documents() if page.name not in GENERATED]
    others = [LOG, ROOT / "CONTRIBUTING.md", *(ROOT / "docs" / name for name in FOR_CHANGING)]
    for_users = [page for page in pages if page not in others]
    found = {"pages for users": words(for_users), "notebook": words([LOG]), "all": words(pages)}
    assert {kind: n for kind, n in found.items() if n > MOST_WORDS[kind]} == {}, found
    assert words([ROOT / "README.md"]) <= MOST_WORDS_OF_THE_README


def test_pages_link_to_no_entry_of_the_notebook() -> None:
    linked = [page.name for page in documents() if "LOG.md#" in page.read_text("utf-8")]
    assert not linked, "an entry may be shortened or go; say the number with its hardware instead"


def test_the_notebook_names_scripts_that_are_there() -> None:
    chapter = LOG.read_text("utf-8").split("## Repeat a measurement")[1].split("\n## ")[0]
    scripts = re.findall(r"(\w+\.py)\b", chapter)
    assert len(scripts) >= 10
    assert [name for name in scripts if not (LOG.parent / name).is_file()] == []
    known = "".join(path.read_text("utf-8") for path in LOG.parent.glob("*.py"))
    options = re.findall(r"(?<=[ \"`])--[a-z][\w-]*", chapter)
    assert options and {name for name in options if f'"{name}"' not in known} <= {"--help"}


def test_readme_names_the_long_tests() -> None:
    assert "make test-full" in (ROOT / "README.md").read_text("utf-8")


def test_changelog_has_this_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text("utf-8")
    assert re.search(rf"^## \[{re.escape(foretoken.__version__)}\]", changelog, re.MULTILINE)


def test_architecture_shows_the_layers() -> None:
    layers = pyproject()["tool"]["importlinter"]["contracts"][0]["layers"]
    plain = [re.sub(r"[()]", "", layer).replace(" : ", ", ") for layer in layers]
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    assert "\n".join(["```", *plain, "```"]) in text, "\n".join(plain)


def test_architecture_names_what_is_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    where = text.split("## Where things are")[1].split("Outside the package")[0]
    named = re.findall(r"^\| `(\w+)/` \|", where, re.MULTILINE)
    folders = [path.name for path in PACKAGE.glob("[!_]*") if any(path.glob("[!_]*"))]
    assert sorted(named) == sorted(folders), "the table of folders"
    answers = where.split("| question |")[1].split("\n\n")[0]
    paths = re.findall(r"`(\w+(?:/\w+)*(?:\.py|/))`", answers)
    assert len(paths) >= 10
    assert [path for path in paths if not (PACKAGE / path).exists()] == []


def test_imports_only_point_down() -> None:
    command = [str(Path(sys.executable).with_name("lint-imports")), "--no-cache"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr


def anchors(page: Path) -> set[str]:
    """The names that links give to the headings of a page."""
    names: Counter[str] = Counter()
    found = set()
    for heading in re.findall(r"^#+ (.*)", FENCE.sub("", page.read_text("utf-8")), re.MULTILINE):
        name = re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")
        found.add(f"{name}-{names[name]}" if names[name] else name)
        names[name] += 1
    return found


def test_links_lead_somewhere() -> None:
    broken = []
    for path in documents():
        text = FENCE.sub("", path.read_text("utf-8"))
        for target, anchor in re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]*))?\)", text):
            page = path.parent / target if target else path
            if target.startswith(("http:", "https:")):
                continue
            if not page.exists() or (anchor and anchor not in anchors(page)):
                broken.append(f"{path.name}: {target}#{anchor}")
    assert not broken


def test_named_tests_exist() -> None:
    missing = []
    for path in documents():
        for file, name in re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", path.read_text("utf-8")):
            source = ROOT / file
            if not source.is_file() or (name and f"def {name}(" not in source.read_text("utf-8")):
                missing.append(f"{path.name}: {file}::{name}")
    assert not missing, f"documents name tests that are not there: {missing}"


def test_sources_name_pages_that_are_there() -> None:
    lost = []
    for folder in ("src", "scripts", "deploy", "examples", "benchmarks"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".toml", ".yaml", ".yml", ".html"):
                pages = re.findall(r"\bdocs/[\w-]+\.(?:md|svg)\b", path.read_text("utf-8"))
                lost += [f"{path}: {page}" for page in pages if not (ROOT / page).is_file()]
    assert not lost


def test_contributing_leads_to_files_that_are_there() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text("utf-8")
    paths = re.findall(r"`((?:src|tests|examples|scripts|docs|benchmarks)/[\w./]+)`", text)
    assert len(paths) >= 8, "a path to read along"
    assert [path for path in paths if not (ROOT / path).exists()] == []
    reading = text.split("## Where to start reading")[1].split("## ")[0]
    steps = re.findall(r"^\d+\. `([\w./]+)`", reading, re.MULTILINE)
    assert 6 <= len(steps) <= 10, steps


@pytest.mark.slow
@pytest.mark.parametrize("code", snippets(), ids=lambda code: code.split("\n")[2][:30])
def test_readme_snippets_run(code: str) -> None:
    assert (PACKAGE / "packaged" / "demo").is_dir(), "the packaged models are missing"
    run_shown(["-c", code])


@pytest.mark.slow
def test_the_picture_is_of_a_run() -> None:
    script = load_script("record_picture")
    written = script.record()
    shown = script.text_of(script.render(written))
    plain = re.sub(r"\x1b\[[\d;]*m", "", written).rstrip("\n")
    assert " ".join(shown[1:]).split() == plain.split(), "other words than were written"
    lines = [line.rstrip() for line in plain.split("\n")]
    fit = [line for line in lines if len(line) <= script.COLUMNS]
    assert [line for line in shown[1:] if line in fit] == fit, "only longer lines are broken"
    committed = script.text_of(script.PICTURE.read_text("utf-8"))
    # But for the speed, which takes two lines of the narrow terminal, and what was accepted by it.
    assert committed[:-3] == shown[:-3], "run scripts/record_picture.py"
