"""From the name of a model to a folder or file on disk: packaged names, local ones, hub ids.

Knows nothing about what is in them beyond the file names worth downloading.
"""

import fnmatch
import glob
import re
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

from foretoken.errors import ModelNotFoundError, nearest

PACKAGED = (
    "demo", "demo-draft", "demo-eagle3", "demo-mlp", "demo-medusa", "demo-parallel", "demo-dflash",
    "demo-dspark",
)  # fmt: skip
"""Names that mean what ships with the package; an installation may lack some of the heads."""
_BESIDES = ("*.json", "tokenizer.model", "*.jinja", "*.txt")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_PART = re.compile(r"-\d{5}-of-\d{5}\.gguf$")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_READ = "safetensors, .bin or GGUF files"
_GGUF_TYPE = re.compile(
    r"(?<![a-z0-9])(?:ud-)?(?:i?q\d|tq\d|mxfp4|nvfp4|bf16|fp?16|fp?32)(?:_[a-z0-9]+)*"
    r"(?![a-z0-9_])",
    re.IGNORECASE,
)
"""How files' names say what the weights are, as Q4_K_M."""
_BESIDE_GGUF = re.compile(r"mmproj|imatrix", re.IGNORECASE)
"""Files of this format that are no language models."""
_FIRST_CHOICE = "Q4_K_M"


class _HubId(NamedTuple):
    """What a name asks of the hub."""

    repo: str
    gguf: str | None = None
    """A type of its GGUF files, or the path of one; None: whatever the repository has."""


def find_model(name: str, *, revision: str | None = None) -> Path:
    """The folder or GGUF file that holds model `name`, downloaded first if it is a Hugging Face id.

    A local folder of that name comes before a packaged model, a packaged model before the hub. Of
    a hub id's GGUF files one is named by its type, `org/repo:Q4_K_M`, or by its path,
    `org/repo/file.gguf`; all of its parts are fetched.

    Raises:
        ModelNotFoundError: nothing of that name, several GGUF files, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if name in PACKAGED:
        return packaged_model(name)
    found = local_gguf(path)
    if found is not None:
        return found
    files = _gguf_files(path)
    if files:
        listed = ", ".join(file.name for file in files)
        raise ModelNotFoundError("model", name, f"one of its GGUF files: {listed}")
    asked = None if path.exists() or name.startswith((".", "/", "~")) else _hub_id(name)
    if asked is None:
        allowed = "a folder with a config.json"
        if name.endswith(".gguf"):
            allowed = "a GGUF file that is there, or org/repo/file.gguf of the hub"
        raise ModelNotFoundError("model", name, allowed)
    return _download(asked, revision)


def local_gguf(path: Path) -> Path | None:
    """The GGUF file at `path`, or the only one of a folder without a config.json."""
    if path.suffix == ".gguf" and path.is_file():
        return path
    files = [] if (path / "config.json").is_file() else _gguf_files(path)
    return files[0] if len(files) == 1 else None


def _gguf_files(folder: Path) -> list[Path]:
    """Those of a folder; of a model in several parts the first."""
    files = sorted(folder.glob("*.gguf")) if folder.is_dir() else []
    return [file for file in files if not _LATER_PART.search(file.name)]


def packaged_model(name: str) -> Path:
    """The folder of a model or head that ships with the package. Raises ModelNotFoundError: it is
    not installed."""
    path = _packaged_root() / name
    if not (path / "config.json").is_file():
        raise ModelNotFoundError("model", name, f"a packaged model: {', '.join(installed())}")
    return path


def installed() -> tuple[str, ...]:
    """Those of PACKAGED that this installation has."""
    root = _packaged_root()
    return tuple(name for name in PACKAGED if (root / name / "config.json").is_file())


def _packaged_root() -> Path:
    return Path(str(resources.files("foretoken") / "packaged"))


def _hub_id(name: str) -> _HubId | None:
    """What `name` asks of the hub; None: it can only be meant for this machine."""
    repo, colon, kind = name.partition(":")
    if colon:
        return _HubId(repo, kind) if kind else None
    if not name.endswith(".gguf"):
        return None if name.count("/") > 1 else _HubId(name)
    parts = name.split("/")
    if Path(*parts[:-1][:2]).is_dir():  # of a name without a folder: where we are
        return None
    repo = "/".join(parts[:2])
    return _HubId(repo, "/".join(parts[2:]) or None)


def _download(asked: _HubId, revision: str | None) -> Path:
    """The snapshot of a hub id, or its GGUF file, downloaded as far as it is not there; progress on
    stderr.

    Interrupted downloads go on where they stopped. HF_HUB_OFFLINE, HF_TOKEN (or a login), HF_HOME
    and HF_ENDPOINT are the hub library's own and hold here too.
    """
    from huggingface_hub.errors import RevisionNotFoundError

    name = asked.repo
    try:
        return _weights(asked, revision)
    except RevisionNotFoundError as error:
        raise ModelNotFoundError("revision", revision, f"one that {name} has") from error
    except hub_errors() as error:
        raise ModelNotFoundError("model", name, _allowed_instead(name, error)) from error


def hub_errors() -> tuple[type[Exception], ...]:
    """What the hub library raises where something cannot be had. Over the years it has spoken HTTP
    through several packages; its own error is a child of what the present one raises."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    of_http = [kind for kind in HfHubHTTPError.__mro__ if kind.__name__ == "HTTPError"]
    return (HFValidationError, OSError, *of_http)


def _allowed_instead(name: str, error: Exception) -> str:
    """What could be given, why the hub did not give `name`, and the packaged name it resembles."""
    near = nearest(name, installed())
    meant = f". Did you mean {near}?" if near else ""
    known = f"{', '.join(installed())}, a local folder, or a Hugging Face id"
    return f"{known} ({hub_trouble(name, error)}){meant}"


def hub_trouble(name: str, error: Exception) -> str:
    """Why there is no model `name` from the hub, in one line and in our words."""
    from huggingface_hub.constants import ENDPOINT, HF_HUB_OFFLINE
    from huggingface_hub.errors import (
        GatedRepoError,
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
    )

    if isinstance(error, GatedRepoError):
        return f"this one is gated: accept its terms at {ENDPOINT}/{name} and set HF_TOKEN"
    if isinstance(error, RepositoryNotFoundError):
        return f"{ENDPOINT} has none of this name, or a private one that needs HF_TOKEN"
    if isinstance(error, HFValidationError):
        return "which is like owner/name"
    if HF_HUB_OFFLINE:
        return "HF_HUB_OFFLINE is set, and this one was not downloaded before"
    if isinstance(error, HfHubHTTPError):
        return f"{ENDPOINT} answered {error.response.status_code}"
    if isinstance(error, LocalEntryNotFoundError) or not isinstance(error, OSError):
        return f"{ENDPOINT} cannot be reached, and this one was not downloaded before"
    return " ".join(str(error).split())


def _weights(asked: _HubId, revision: str | None) -> Path:
    """The small files and one kind of weights, under Hugging Face's names only: repositories hold
    the same weights in other layouts too (`original/`, `consolidated`, `.bin`). Or the GGUF file
    that is meant, the first of its parts if it has several."""
    from huggingface_hub import snapshot_download

    def fetch(*patterns: str, besides: str | None = None) -> Path:
        found = snapshot_download(
            asked.repo, revision=revision, allow_patterns=list(patterns), ignore_patterns=besides
        )
        return Path(found)

    folder, files = _listed(asked.repo, revision)
    for pattern in _WEIGHTS if asked.gguf is None and "config.json" in files else ():
        if fnmatch.filter([file for file in files if "/" not in file], pattern):
            return fetch(*_BESIDES, pattern, besides="*/*")
    files = [file for file in files if file.endswith(".gguf")]
    first = _choose(asked, files)
    parts = [file for file in files if _PART.sub("", file) == _PART.sub("", first)]
    if folder is None or not all((folder / part).is_file() for part in parts):
        folder = fetch(*map(glob.escape, parts))
    return folder / first


def _listed(repo: str, revision: str | None) -> tuple[Path | None, list[str]]:
    """A repository's files, those that are here if the hub does not answer; and the folder where
    the downloaded ones are, if there are any."""
    from huggingface_hub import HfApi, snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import (
        HfHubHTTPError,
        HFValidationError,
        LocalEntryNotFoundError,
        RepositoryNotFoundError,
        RevisionNotFoundError,
    )

    try:
        info = HfApi().model_info(repo, revision=revision)
    except (RepositoryNotFoundError, RevisionNotFoundError, HFValidationError):
        raise
    except hub_errors() as error:
        try:  # no patterns: nothing has to be there
            kept = snapshot_download(
                repo, revision=revision, allow_patterns=[], local_files_only=True
            )
        except LocalEntryNotFoundError:
            if isinstance(error, HfHubHTTPError):  # it answered
                raise error from None
            raise
        here = [file for file in Path(kept).rglob("*") if file.is_file()]
        return Path(kept), sorted(file.relative_to(kept).as_posix() for file in here)
    files = sorted(one.rfilename for one in info.siblings or ())
    for file in files:
        found = try_to_load_from_cache(repo, file, revision=info.sha)
        if isinstance(found, str):
            return Path(found.removesuffix(file)), files
    return None, files


def _choose(asked: _HubId, files: Sequence[str]) -> str:
    """The one of a repository's GGUF files that is meant. Raises ModelNotFoundError: none is, or
    several."""
    repo, wanted = asked
    given = repo if wanted is None else f"{repo}{'/' if wanted.endswith('.gguf') else ':'}{wanted}"
    models = [file for file in files if not _LATER_PART.search(file)]
    if wanted is not None and wanted.endswith(".gguf"):
        found = [file for file in models if file == wanted]
    else:
        models = [file for file in models if not _BESIDE_GGUF.search(file)]
        found = models if wanted is None else _of_type(models, wanted)
        if wanted is None and len(models) > 1:
            found = _of_type(models, _FIRST_CHOICE)
    if len(found) == 1:
        return found[0]
    if not models:
        what = f"a model with a config.json and {_READ}" if wanted is None else "GGUF files"
        raise ModelNotFoundError("model", given, f"{what}; {repo} has none")
    if found:
        listed = ", ".join(f"{repo}/{file}" for file in found)
        raise ModelNotFoundError("model", given, f"one of its files: {listed}")
    types = ", ".join(dict.fromkeys(_type_of(file) or file for file in models))
    raise ModelNotFoundError("model", given, f"{repo}:TYPE, with a type that it has: {types}")


def _of_type(files: Sequence[str], kind: str) -> list[str]:
    """Those whose name says this type; where none says just it, those that say it with more
    around, as UD-Q4_K_XL does for Q4_K_XL."""
    exact = [file for file in files if (_type_of(file) or "").lower() == kind.lower()]
    within = rf"(?<![a-z0-9]){re.escape(kind)}(?![a-z0-9_])"
    return exact or [file for file in files if re.search(within, file, re.IGNORECASE)]


def _type_of(file: str) -> str | None:
    """The last type that the path of a file names."""
    found = _GGUF_TYPE.findall(_PART.sub("", file).removesuffix(".gguf"))
    return found[-1] if found else None
