"""The corpus: what is read, what is held out, and text of packages."""

import json
import random
from importlib.metadata import Distribution, PackageNotFoundError
from pathlib import Path

import pytest

from foretoken.errors import ConfigError
from tools.demo_models import manifest, packages
from tools.demo_models.packages import (
    PACKAGES,
    SHORTEST_TEXT,
    Package,
    is_permissive,
    licence_of,
    load_packages,
    without_notice,
)
from tools.python_text.heldout import (
    EDITS,
    edit_document,
    edit_prompts,
    edit_text,
    excerpt,
    heldout_prompts,
)
from tools.python_text.stdlib import (
    HELD_OUT,
    MOST_SHARED_LINES,
    Corpus,
    SourceFile,
    distinctive_lines,
    load_corpus,
)

HELD = "".join(
    f"def held_out_function_{i}(argument):\n    return argument + {i}\n" for i in range(9)
)
FREE = "".join(f"class Something{i}(BaseOfEverything):\n    attribute = None\n" for i in range(9))


@pytest.fixture
def library(tmp_path: Path) -> Path:
    (tmp_path / "textwrap.py").write_text(HELD)
    (tmp_path / "free.py").write_text(FREE)
    (tmp_path / "twin.py").write_text(FREE)
    (tmp_path / "copied.py").write_text(FREE.replace("Something", "Else") + HELD[:200])
    (tmp_path / "table.py").write_text("TABLE = [" + "0x1234, " * 200 + "]\n")
    for folder in ("encodings", "site-packages", "test"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "inner.py").write_text(f"class Inner_{folder}:\n    pass\n")
    (tmp_path / "test" / "test_textwrap.py").write_text("class TestOfHeldOut:\n    pass\n")
    return tmp_path


def test_selection(library: Path) -> None:
    corpus = load_corpus(library)
    assert [file.path for file in corpus.held_out] == ["textwrap.py"]
    assert {file.path: file.is_test for file in corpus.training} == {
        "free.py": False,
        "test/inner.py": True,
    }


def test_no_sources(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="corpus"):
        load_corpus(tmp_path)


@pytest.fixture(scope="module")
def installed() -> Corpus:
    return load_corpus()


@pytest.mark.slow
def test_no_held_out_text_is_trained_on(installed: Corpus) -> None:
    held = {file.path for file in installed.held_out}
    assert held <= set(HELD_OUT) and len(held) >= 35
    assert not held & {file.path for file in installed.training}
    assert not {file.digest for file in installed.held_out} & {
        file.digest for file in installed.training
    }
    everything = [distinctive_lines(file.text) for file in installed.training]
    for file in installed.held_out:
        lines = distinctive_lines(file.text)
        worst = max(len(lines & other) for other in everything)
        assert worst <= MOST_SHARED_LINES * len(lines), (file.path, worst, len(lines))


@pytest.mark.slow
def test_prompts_are_held_out_and_repeatable(installed: Corpus) -> None:
    prompts = heldout_prompts(12, tokens=64, rest=32)
    assert prompts == heldout_prompts(12, tokens=64, rest=32)
    assert prompts != heldout_prompts(12, tokens=64, rest=32, seed=1)
    texts = {file.path: file.text for file in installed.held_out}
    for prompt in prompts:
        assert prompt.text + prompt.reference in texts[prompt.name.split(":")[0]]
        assert prompt.text.endswith(":") or '"""' in prompt.text.split("\n")[-1]
        assert prompt.reference.startswith("\n")


def test_edit_prompts_hold_what_they_ask_to_copy() -> None:
    for prompt in edit_prompts(12, tokens=120):
        original, _, started = prompt.text.removeprefix("# original\n").partition("# edited: ")
        edited = started.partition("\n")[2] + prompt.reference
        shared = set(original.splitlines()) & set(edited.splitlines())
        assert len(shared) >= 0.3 * len(set(original.splitlines())), prompt.name


def test_every_edit_changes_and_says_so() -> None:
    source = "# note\ndef area(width, height):\n    return width * height * 7 or 'none'\n"
    for make in dict.fromkeys(EDITS):
        edit = make(source, random.Random(3))
        assert edit is not None
        assert (edit.text == source) == (edit.request == "no change"), edit


def test_edit_document_is_repeatable() -> None:
    first = edit_document(HELD, random.Random(5))
    assert first == edit_document(HELD, random.Random(5))
    assert first.text.startswith("# original\n" + HELD)
    assert edit_text("", random.Random(0)).request == "no change"


def test_excerpt_is_whole_lines() -> None:
    piece = excerpt(HELD, 150, random.Random(1))
    assert piece in HELD and piece.endswith("\n") and len(piece) <= 150


def code(word: str, count: int = 20) -> str:
    return "".join(
        f"def {word}_function_{i}(argument):\n    return {word}_of(argument)\n"
        for i in range(count)
    )


CORPUS = Corpus(
    training=(SourceFile(path="known.py", text=code("known"), is_test=False),),
    held_out=(SourceFile(path="held.py", text=code("held"), is_test=False),),
)


def install(root: Path, name: str, about: str, files: dict[str, str]) -> None:
    """A package as an installer leaves it."""
    info = root / f"{name}-1.0.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{about}\n")
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    (info / "RECORD").write_text("".join(f"{path},,\n" for path in files))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An environment of its own, with one package asked for that it lacks."""

    def distribution(name: str) -> Distribution:
        for found in Distribution.discover(name=name, path=[str(tmp_path)]):
            return found
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packages, "distribution", distribution)
    monkeypatch.setattr(packages, "load_corpus", lambda: CORPUS)
    monkeypatch.setattr(packages, "PACKAGES", ("first", "second", "absent"))
    return tmp_path


def read() -> tuple[Package, ...]:
    return load_packages.__wrapped__()


def paths(found: tuple[Package, ...]) -> dict[str, set[str]]:
    return {package.name: {file.path for file in package.files} for package in found}


def test_selection_of_packages(site: Path) -> None:
    files = {
        "first/plain.py": code("plain"),
        "first/short.py": "x = 1\n",
        "first/tests/inner.py": code("inner"),
        "first/_vendor/other.py": code("other"),
        "first/wire.py": "# Generated by the compiler of protocols.\n" + code("wire"),
        "first/table.py": "TABLE = [" + "0x1234, " * 200 + "]\n",
        "first/copied.py": code("copied") + code("held", 3),
        "first/known.py": code("known", 12) + code("little", 4),
        "first/notes.txt": code("notes"),
    }
    install(site, "first", "License-Expression: MIT", files)
    again = {"second/again.py": code("plain"), "second/new.py": code("new")}
    install(site, "second", "License: BSD", again)
    assert paths(read()) == {"first": {"first/plain.py"}, "second": {"second/new.py"}}


def test_little_of_a_large_held_out_module_is_too_much_of_a_small_file(
    site: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Five of 40 lines of its own, and below a tenth of the module's."""
    large = SourceFile(path="held.py", text=code("held", 80), is_test=False)
    corpus = Corpus(training=CORPUS.training, held_out=(large,))
    monkeypatch.setattr(packages, "load_corpus", lambda: corpus)
    text = code("small", 18) + code("held", 5)
    install(site, "first", "License: BSD", {"first/a.py": text, "first/b.py": code("free")})
    assert paths(read()) == {"first": {"first/b.py"}}


def test_a_large_package_is_cut(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {f"first/part_{i}.py": code(f"part_{i}") for i in range(6)}
    install(site, "first", "License-Expression: MIT", files)
    whole = read()
    size = len(files["first/part_0.py"])
    monkeypatch.setattr(packages, "MOST_CHARACTERS", 2 * size)
    assert len(whole[0].files) == 6 and size > SHORTEST_TEXT
    assert read()[0].files == whole[0].files[:2]


@pytest.mark.parametrize(
    ("about", "licence", "fine"),
    [
        ("License-Expression: Apache-2.0 OR BSD-2-Clause", "Apache-2.0 OR BSD-2-Clause", True),
        ("License-Expression: (MIT) AND MPL-2.0", "(MIT) AND MPL-2.0", False),
        ("Classifier: License :: OSI Approved\nLicense: MIT", "MIT", True),
        ("License: words\nClassifier: License :: OSI Approved :: BSD License", "BSD License", True),
        ("License: GNU General Public License", "GNU General Public License", False),
        ("", "", False),
    ],
)
def test_only_what_metadata_call_permissive_is_read(
    site: Path, about: str, licence: str, fine: bool
) -> None:
    install(site, "first", about, {"first/plain.py": code("plain")})
    (package,) = Distribution.discover(name="first", path=[str(site)])
    assert licence_of(package) == licence
    assert is_permissive(licence) == fine
    if fine:
        assert read()[0].licence == licence
    else:
        with pytest.raises(ConfigError, match="licence of first"):
            read()


def test_notices_are_cut_and_other_comments_kept() -> None:
    assert without_notice("#!/bin/x\n# Copyright: us\n\n# Licence\nx = 1\n# y\n") == "x = 1\n# y\n"
    assert without_notice("# what this is\nx = 1\n") == "# what this is\nx = 1\n"


def test_a_manifest_of_packages_names_what_differs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(manifest, "MANIFESTS", tmp_path)
    names = ("one", "two", "three")
    made = [Package(name=name, version="1", licence="MIT", files=CORPUS.training) for name in names]
    assert manifest.package_difference(made) is None
    manifest.write_packages(made)
    assert manifest.package_difference(made) == manifest.Difference(
        missing=(), added=(), changed=()
    )
    newer = Package(name="one", version="2", licence="MIT", files=CORPUS.held_out)
    assert newer.digest != made[0].digest
    found = manifest.package_difference([newer, made[1]])
    assert found is not None
    assert (found.missing, found.changed) == (("three",), ("one",))


def test_what_is_pinned_is_permissive_and_from_the_list() -> None:
    pinned = json.loads((Path(manifest.__file__).parent / "manifests/packages.json").read_text())
    assert set(pinned) <= set(PACKAGES)
    assert all(is_permissive(record["licence"]) for record in pinned.values())
    largest = max(record["characters"] for record in pinned.values())
    assert largest <= 0.12 * sum(record["characters"] for record in pinned.values())
