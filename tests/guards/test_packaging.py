"""What is published: everything in the sdist, only the package in the wheel, no dead links."""

import os
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from foretoken.kernels import build
from tests.guards.sources import ROOT
from tests.guards.test_documents import load_script, pyproject

README = """
# Title

[rules](docs/rules.md), [page](https://example.org/x), ![drawing](docs/a.svg), [below](#title)
<img src="docs/b.svg" width="10">

```python
f[0](x)
```
"""


def test_without_a_repository_links_become_words() -> None:
    shown = load_script("index_readme").for_index(README, None)
    assert "\nrules, [page](https://example.org/x), , [below](#title)\n\n" in shown
    assert "```python\nf[0](x)\n```" in shown


def test_with_a_repository_links_lead_there() -> None:
    shown = load_script("index_readme").for_index(README, "https://example.org/here/")
    assert "[rules](https://example.org/here/blob/HEAD/docs/rules.md)" in shown
    assert "![drawing](https://example.org/here/raw/HEAD/docs/a.svg)" in shown
    assert '<img src="https://example.org/here/raw/HEAD/docs/b.svg" width="10">' in shown
    assert "```python\nf[0](x)\n```" in shown


def test_pythons_are_those_of_the_documents() -> None:
    page = (ROOT / "docs" / "running.md").read_text("utf-8")
    row = re.search(r"^\| Python \|([^|]*)\|", page, re.MULTILINE)
    assert row is not None
    named = [
        one.rsplit(" ", 1)[1]
        for one in pyproject()["project"]["classifiers"]
        if re.search(r":: 3\.\d+$", one)
    ]
    assert ", ".join(named) == row.group(1).strip()


@pytest.mark.parametrize(
    ("system", "has_nvidia", "settings", "chosen"),
    [
        ("Linux", False, [], True),
        ("Linux", False, ["global.cert='/etc/x'", ":env:.default-timeout='9'"], True),
        ("Linux", True, [], False),
        ("Darwin", False, [], False),
        ("Linux", False, ["global.index-url='https://example.org'"], False),
        ("Linux", False, ["global.extra-index-url='https://example.org'"], False),
        ("Linux", False, [":env:.find-links='/wheels'"], False),
        ("Linux", False, ["install.no-index='true'"], False),
    ],
)
def test_the_index_of_pytorch(
    system: str, has_nvidia: bool, settings: list[str], chosen: bool
) -> None:
    script = load_script("torch_index")
    assert script.index_for(system, has_nvidia, settings) == (script.CPU if chosen else "")


def test_pip_tells_how_it_is_configured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PIP_FIND_LINKS", "/wheels")
    script = load_script("torch_index")
    assert script.index_for("Linux", False, script.pip_settings(sys.executable)) == ""


def hatchling(source: Path, out: Path, kind: str, **environment: str) -> tuple[Path, str]:
    """The file that the build backend makes of `source`, and what it said."""
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "hatchling", "build", "-t", kind, "-d", str(out)]
    done = subprocess.run(
        command,
        cwd=source,
        env={**os.environ, **environment},
        capture_output=True,
        text=True,
        timeout=250,
    )
    assert done.returncode == 0, done.stderr
    [made] = out.iterdir()
    return made, done.stderr + done.stdout


@pytest.mark.slow
def test_an_sdist_has_every_file(tmp_path: Path) -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("not a checkout")
    script = load_script("make_dist")
    sdist, _ = hatchling(ROOT, tmp_path, "sdist")
    assert script.tracked(ROOT) <= script.names_in(sdist)


def sources_without_kernels(tmp_path: Path) -> Path:
    """A copy of what a wheel is built from, small models and no library."""
    copy = tmp_path / "source"
    copy.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", ".gitignore"):
        shutil.copy(ROOT / name, copy)
    shutil.copytree(ROOT / "scripts", copy / "scripts")
    unwanted = shutil.ignore_patterns("*.safetensors", "lib", "__pycache__")
    shutil.copytree(ROOT / "src", copy / "src", ignore=unwanted)
    return copy


def test_without_a_compiler_the_build_says_so(tmp_path: Path) -> None:
    source = sources_without_kernels(tmp_path)
    bare = tmp_path / "bare"
    bare.mkdir()
    wheel, said = hatchling(source, tmp_path / "out", "wheel", PATH=str(bare), CC="")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert "kernels were not compiled" in said and "many times slower" in said
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path / "installed")
    code = "from foretoken.kernels.library import find_library as f; print(f())"
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "installed")},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.strip() == "None", done.stderr
    assert "installed without a C compiler" in done.stderr


def test_a_wheel_has_the_library_and_no_objects(tmp_path: Path) -> None:
    library = build.library_path()
    if not library.is_file():
        pytest.skip("no kernels here")
    source = sources_without_kernels(tmp_path)
    kept = source / "src" / "foretoken" / "kernels" / "lib"
    (kept / "objects").mkdir(parents=True)
    (kept / "objects" / "pool.o").write_bytes(b"")
    (kept / "foretoken-old.so").write_bytes(b"")
    shutil.copy(library, kept)
    wheel, _ = hatchling(source, tmp_path / "out", "wheel")
    assert "-py3-none-" in wheel.name and not wheel.name.endswith("-any.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
        metadata = next(name for name in names if name.endswith("/METADATA"))
        text = archive.read(metadata).decode()
    assert [name for name in names if "/lib/" in name] == [f"foretoken/kernels/lib/{library.name}"]
    assert not re.search(r"\]\((?!https?://|#)", text.split("\n\n", 1)[1])
    assert "Provides-Extra: serve" in text
