"""From the name of a model to a folder on disk: packaged names, local folders, hub ids.

Knows nothing about what is in the folder beyond the file names worth downloading.
"""

from importlib import resources
from pathlib import Path

from foretoken.errors import ModelNotFoundError

PACKAGED = ("demo", "demo-draft")
_WANTED = ["*.json", "*.safetensors", "tokenizer.model", "*.jinja", "*.txt"]


def find_model(name: str, *, revision: str | None = None) -> Path:
    """The folder that holds model `name`, downloaded first if it is a Hugging Face id.

    A local folder of that name comes before a packaged model, a packaged model before the hub.

    Raises:
        ModelNotFoundError: nothing of that name, or the hub cannot be reached.
    """
    path = Path(name).expanduser()
    if (path / "config.json").is_file():
        return path
    if name in PACKAGED:
        return packaged_model(name)
    if path.exists() or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise ModelNotFoundError("model", name, "a folder with a config.json")
    return _download(name, revision)


def packaged_model(name: str) -> Path:
    """The folder of a model that ships with the package.

    Raises:
        ModelNotFoundError: it is not installed.
    """
    path = Path(str(resources.files("foretoken") / "packaged" / name))
    if not (path / "config.json").is_file():
        raise ModelNotFoundError("model", name, f"a packaged model: {', '.join(PACKAGED)}")
    return path


def _download(name: str, revision: str | None) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

    allowed = f"{', '.join(PACKAGED)}, a local folder, or a Hugging Face id that can be reached"
    try:
        return Path(snapshot_download(name, revision=revision, allow_patterns=_WANTED))
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ModelNotFoundError("model", name, f"{allowed} ({error})") from error
