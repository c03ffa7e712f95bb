"""From the name of a model to a folder on disk: packaged names, local folders, hub ids.

Knows nothing about what is in the folder beyond the file names worth downloading.
"""

import re
from importlib import resources
from pathlib import Path

from foretoken.errors import ModelNotFoundError, NotYetError, nearest

PACKAGED = (
    "demo", "demo-draft", "demo-eagle3", "demo-mlp", "demo-medusa", "demo-parallel", "demo-dflash",
    "demo-dspark",
)  # fmt: skip
"""Names that mean what ships with the package; an installation may lack some of the heads."""
_BESIDES = ("*.json", "tokenizer.model", "*.jinja", "*.txt")
_WEIGHTS = ("model*.safetensors", "pytorch_model*.bin")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_READ = "safetensors, or .bin; of GGUF files, the path of one on this machine"


def find_model(name: str, *, revision: str | None = None) -> Path:
    """The folder or GGUF file that holds model `name`, downloaded first if it is a Hugging Face id.

    A local folder of that name comes before a packaged model, a packaged model before the hub.

    Raises:
        ModelNotFoundError: nothing of that name, several GGUF files, or the hub cannot be reached.
        NotYetError: the weights on the hub are GGUF files only.
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
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError("model", name, "a folder with a config.json")
    return _download(name, revision)


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
    """The folder of a model or head that ships with the package.

    Raises:
        ModelNotFoundError: it is not installed.
    """
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


def _download(name: str, revision: str | None) -> Path:
    """The snapshot of a hub id, downloaded as far as it is not there; progress on stderr.

    Interrupted downloads go on where they stopped. HF_HUB_OFFLINE, HF_TOKEN (or a login), HF_HOME
    and HF_ENDPOINT are the hub library's own and hold here too.
    """
    import httpx
    from huggingface_hub.errors import HFValidationError, RevisionNotFoundError

    try:
        return _snapshot(name, revision)
    except RevisionNotFoundError as error:
        raise ModelNotFoundError("revision", revision, f"one that {name} has") from error
    except (httpx.HTTPError, HFValidationError, OSError) as error:
        raise ModelNotFoundError("model", name, _allowed_instead(name, error)) from error


def _allowed_instead(name: str, error: Exception) -> str:
    """What could be given, why the hub did not give `name`, and the packaged name it resembles."""
    near = nearest(name, installed())
    meant = f". Did you mean {near}?" if near else ""
    known = f"{', '.join(installed())}, a local folder, or a Hugging Face id"
    return f"{known} ({_trouble(name, error)}){meant}"


def _trouble(name: str, error: Exception) -> str:
    """Why there is no model `name` from the hub, in one line and in our words."""
    import httpx
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
    if isinstance(error, LocalEntryNotFoundError | httpx.HTTPError):
        return f"{ENDPOINT} cannot be reached, and this one was not downloaded before"
    return " ".join(str(error).split())


def _snapshot(name: str, revision: str | None) -> Path:
    """The small files, then one kind of weights, under Hugging Face's names only: repositories
    hold the same weights in other layouts too (`original/`, `consolidated`, `.bin`)."""
    from huggingface_hub import HfApi, snapshot_download
    from huggingface_hub.constants import HF_HUB_OFFLINE

    def fetch(*patterns: str) -> Path:
        found = snapshot_download(
            name, revision=revision, allow_patterns=list(patterns), ignore_patterns=["*/*"]
        )
        return Path(found)

    folder = fetch(*_BESIDES)
    for pattern in _WEIGHTS:
        if not HF_HUB_OFFLINE:
            folder = fetch(pattern)
        if (folder / "config.json").is_file() and any(folder.glob(pattern)):
            return folder
    files = [] if HF_HUB_OFFLINE else HfApi().list_repo_files(name, revision=revision)
    gguf = [file for file in files if file.endswith(".gguf")]
    if gguf:
        raise NotYetError("model", f"{name} ({gguf[0]})", f"a folder or hub id with {_READ}")
    raise ModelNotFoundError("model", name, f"a model with a config.json and {_READ}")
