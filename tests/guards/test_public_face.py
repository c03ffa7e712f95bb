"""What `import foretoken` gives, and what it must not cost."""

import re
import subprocess
import sys

import pytest

import foretoken
from tests.guards.sources import ROOT

HEAVY = ("torch", "transformers", "tokenizers", "numpy", "huggingface_hub", "rich")


def loaded_after(code: str) -> set[str]:
    """The heavy packages that a fresh interpreter has loaded after running `code`."""
    probe = f"{code}\nimport sys; print([m for m in {HEAVY!r} if m in sys.modules])"
    source = f"import sys; sys.path.insert(0, {str(ROOT / 'src')!r})\n{probe}"
    done = subprocess.run(
        [sys.executable, "-c", source], capture_output=True, text=True, check=True, timeout=120
    )
    return set(re.findall(r"'(\w+)'", done.stdout.splitlines()[-1]))


def test_public_names() -> None:
    expected = [
        "LLM",
        "CompletionOutput",
        "DraftingMethod",
        "ModelFamily",
        "RequestOutput",
        "SamplingParams",
        "__version__",
        "register_family",
        "register_method",
    ]
    assert foretoken.__all__ == expected
    assert set(dir(foretoken)) == set(expected)


def test_unknown_names_are_attribute_errors() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = foretoken.Llm


def test_public_names_load() -> None:
    from foretoken import LLM, SamplingParams

    assert LLM.__name__ == "LLM"
    assert SamplingParams().temperature == 1.0


def test_import_is_light() -> None:
    assert loaded_after("import foretoken") == set()


def test_types_and_config_are_torch_free() -> None:
    loaded = loaded_after("import foretoken.config; from foretoken import SamplingParams")
    assert "torch" not in loaded
    assert "transformers" not in loaded


def test_the_command_line_is_torch_free() -> None:
    loaded = loaded_after("from foretoken.cli.app import app")
    assert "torch" not in loaded
    assert "transformers" not in loaded
