"""Models by hub id: what is fetched, how, and what is said when it cannot be.

The guarded bugs: a download that starts again from the beginning, a token or revision that is
dropped, the same weights fetched in several formats, a network that is asked when it must not be.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.hub import COMMIT, Hub
from tests.guards.sources import ROOT

CODE = """
import sys
from foretoken.checkpoint import find_model
from foretoken.errors import ForetokenError
try:
    found = find_model("some/model", revision=sys.argv[1] if len(sys.argv) > 1 else None)
    print(found.name, *sorted(path.name for path in found.iterdir()))
except ForetokenError as error:
    print(type(error).__name__, error)
"""
CODE_OF_FILES = """
import sys
from foretoken.checkpoint import find_model
from foretoken.errors import ForetokenError
for name in sys.argv[1:]:
    try:
        found = find_model(name)
        root = next(one for one in found.parents if one.parent.name == "snapshots")
        there = sorted(file.relative_to(root).as_posix() for file in root.rglob("*.gguf"))
        print(found.relative_to(root).as_posix(), "|", *there)
    except ForetokenError as error:
        print(type(error).__name__, error)
"""
GGUFS = {
    "README.md": b"r",
    "m-Q8_0.gguf": b"8" * 1000,
    "m-Q4_K_M.gguf": b"4" * 1000,
    "BF16/m-BF16-00001-of-00002.gguf": b"1",
    "BF16/m-BF16-00002-of-00002.gguf": b"2",
    "mmproj-F16.gguf": b"m",
}
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w" * 300_000}
OTHERS = {"consolidated.safetensors": b"c", "original/model.pth": b"o", "pytorch_model.bin": b"b"}


def find(
    hub: Hub, home: Path, *given: str, code: str = CODE, **environment: str
) -> tuple[str, str]:
    """stdout and stderr of a fresh process that looks for the model."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    paths = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", code, *given],
        env={**kept, **paths, **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return done.stdout.strip(), done.stderr


@pytest.mark.slow
def test_one_kind_of_weights_with_progress_and_token(tmp_path: Path) -> None:
    with Hub({**FILES, **OTHERS}, gated=True) as hub:
        out, err = find(hub, tmp_path, "v2", HF_TOKEN="hf_mine")
        assert out.split() == [COMMIT, *sorted(FILES)]
        assert "100%" in err
        assert any("/revision/v2" in asked.path for asked in hub.asked)
        mine = [asked for asked in hub.asked if "some/model" in asked.path]
        assert {asked.token for asked in mine} == {"Bearer hf_mine"}
        hub.asked.clear()
        assert find(hub, tmp_path, "v2", HF_HUB_OFFLINE="1")[0] == out
        assert hub.asked == []


@pytest.mark.slow
def test_an_interrupted_download_goes_on(tmp_path: Path) -> None:
    large = {**FILES, "model.safetensors": b"0123456789abcdef" * (24 << 16)}
    with Hub(large, breaks_at={"model.safetensors": 21 << 20}) as hub:
        out, _ = find(hub, tmp_path)
        if "model.safetensors" not in out:
            out, _ = find(hub, tmp_path)
    assert out.split() == [COMMIT, *sorted(FILES)]
    weights = [a for a in hub.asked if a.method == "GET" and a.path.endswith("model.safetensors")]
    first, second = (asked.range for asked in weights)
    assert first is None
    assert second is not None and int(second.removeprefix("bytes=").rstrip("-")) >= 10 << 20
    [snapshot] = tmp_path.rglob("model.safetensors")
    assert snapshot.read_bytes() == large["model.safetensors"]


@pytest.mark.slow
def test_pickled_weights_where_there_are_no_others(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "pytorch_model.bin": b"b" * 100, "training_args.bin": b"t"}
    with Hub(files) as hub:
        out, _ = find(hub, tmp_path)
    assert out.split() == [COMMIT, "config.json", "pytorch_model.bin"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("files", "revision", "offline", "said"),
    [
        ({"a-Q5_0.gguf": b"g", "a-Q6_K.gguf": b"g"}, None, "", "NotFound.*some/model.*Q5_0, Q6_K"),
        ({"config.json": b"{}"}, None, "", "ModelNotFoundError.*safetensors"),
        (FILES, "v9", "", "ModelNotFoundError.*revision.*v9"),
        (FILES, None, "1", "ModelNotFoundError.*some/model.*HF_HUB_OFFLINE is set"),
    ],
)
def test_what_cannot_be_had(
    files: dict[str, bytes], revision: str | None, offline: str, said: str, tmp_path: Path
) -> None:
    with Hub(files) as hub:
        out, _ = find(hub, tmp_path, *([revision] if revision else []), HF_HUB_OFFLINE=offline)
        assert re.search(said, out), out
        assert not (offline and hub.asked)


@pytest.mark.slow
def test_gguf_files_by_type_and_by_path(tmp_path: Path) -> None:
    """Each is fetched alone, with its parts, and never again; without a hub those are found."""
    names = ["some/model:q8_0", "some/model", "some/model:bf16", "some/model/m-Q8_0.gguf"]
    wrong = ["some/model:Q2_K", "some/model/other.gguf", "some/other:Q8_0"]
    with Hub(GGUFS) as hub:
        out, _ = find(hub, tmp_path, *names, *wrong, code=CODE_OF_FILES)
        got = [one.path.rsplit("/", 1)[1] for one in hub.asked if one.method == "GET"]
        hub.asked.clear()
        again, err = find(hub, tmp_path, *names, code=CODE_OF_FILES)
        assert not any("/resolve/" in one.path for one in hub.asked) and "Fetching" not in err
        hub.asked.clear()
        offline, _ = find(hub, tmp_path, *names, code=CODE_OF_FILES, HF_HUB_OFFLINE="1")
        assert hub.asked == []
    without, _ = find(hub, tmp_path, *names[:1], names[0] + "x", code=CODE_OF_FILES)
    found, parts = (
        out.splitlines(),
        "BF16/m-BF16-00001-of-00002.gguf BF16/m-BF16-00002-of-00002.gguf",
    )
    assert found[0] == "m-Q8_0.gguf | m-Q8_0.gguf"
    assert found[1] == "m-Q4_K_M.gguf | m-Q4_K_M.gguf m-Q8_0.gguf"
    assert found[2] == f"BF16/m-BF16-00001-of-00002.gguf | {parts} m-Q4_K_M.gguf m-Q8_0.gguf"
    assert found[3].startswith("m-Q8_0.gguf |")
    assert (
        got.count("m-Q8_0.gguf") == got.count("m-Q4_K_M.gguf") == 1 and "mmproj-F16.gguf" not in got
    )
    assert re.search(
        r"'some/model:Q2_K'; allowed: some/model:TYPE.*: BF16, Q4_K_M, Q8_0$", found[4]
    )
    assert re.search(r"'some/model/other.gguf'; allowed: .*: BF16, Q4_K_M, Q8_0", found[5])
    assert f"{hub.url} has none of this name" in found[6]
    for later in (again, offline):
        assert [line.split(" |")[0] for line in later.splitlines()] == [
            line.split(" |")[0] for line in found[:4]
        ]
    assert without.splitlines()[0].startswith("m-Q8_0.gguf |") and "BF16, Q4_K_M" in without


@pytest.mark.slow
def test_a_gated_model_without_a_token(tmp_path: Path) -> None:
    with Hub(FILES, gated=True) as hub:
        out, _ = find(hub, tmp_path)
    assert re.search("ModelNotFoundError.*gated.*HF_TOKEN", out)


def say(name: str, **environment: str) -> str:
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    done = subprocess.run(
        [sys.executable, "-m", "foretoken", "info", name],
        env={**kept, "PYTHONPATH": str(ROOT / "src"), **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 3, done.stderr
    [line] = done.stderr.strip().splitlines()
    return line


@pytest.mark.slow
def test_what_is_said_is_one_line_of_ours(tmp_path: Path) -> None:
    """Not the connection error of a library three layers down, which names neither cause."""
    nobody = {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    line = say("demo-drft", **nobody)
    assert "http://127.0.0.1:9 cannot be reached" in line and "Did you mean demo-draft?" in line
    assert "Error" not in line and "http://127.0.0.1:9" in say("owner/name", **nobody)
    assert "owner/name" in say("a b/c", **nobody)
    assert "HF_HUB_OFFLINE is set" in say("owner/model", **nobody, HF_HUB_OFFLINE="1")
    with Hub(FILES) as hub:
        line = say("some/other", HF_ENDPOINT=hub.url, HF_HOME=str(tmp_path))
    assert f"{hub.url} has none of this name" in line
