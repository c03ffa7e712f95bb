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
FILES = {"config.json": b"{}", "tokenizer.json": b"{}", "model.safetensors": b"w" * 300_000}
OTHERS = {"consolidated.safetensors": b"c", "original/model.pth": b"o", "pytorch_model.bin": b"b"}


def find(hub: Hub, home: Path, *revision: str, **environment: str) -> tuple[str, str]:
    """stdout and stderr of a fresh process that looks for the model."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("HF_")}
    paths = {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "PYTHONPATH": str(ROOT / "src")}
    done = subprocess.run(
        [sys.executable, "-c", CODE, *revision],
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
        ({"model-Q4_K_M.gguf": b"g"}, None, "", "NotYetError.*GGUF"),
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
def test_a_gated_model_without_a_token(tmp_path: Path) -> None:
    with Hub(FILES, gated=True) as hub:
        out, _ = find(hub, tmp_path)
    assert re.search("ModelNotFoundError.*gated.*HF_TOKEN", out)


def say(name: str, **environment: str) -> str:
    """The one line of `foretoken info NAME`."""
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
