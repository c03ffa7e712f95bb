"""Packaged drafters: names that resolve, defaults for the packaged target, and their size."""

import json
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken import checkpoint
from foretoken.config import EngineConfig
from foretoken.config.published import head_method
from foretoken.errors import ConfigError, ModelNotFoundError

HEADS = {
    "demo-eagle3": {"speculators_model_type": "eagle3"},
    "demo-mlp": {"model_type": "mlp_speculator", "n_predict": 3},
    "demo-medusa": {"medusa_num_heads": 4},
    "demo-parallel": {"speculators_model_type": "peagle_anchored"},
    "demo-dflash": {"speculators_model_type": "dflash"},
    "demo-dspark": {"speculators_model_type": "dspark"},
}
PACKAGED = Path(foretoken.__file__).parent / "packaged"
MEGABYTE = 10**6


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packaged folder that holds all heads."""
    for name, config in HEADS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(checkpoint, "_packaged_root", lambda: tmp_path)
    return tmp_path


def _drafter(target: str, **given: Any) -> tuple[str, str | None]:
    config = EngineConfig.from_kwargs(model=target, speculative_config=given).speculative_config
    assert config is not None
    [drafter] = config.drafters
    return drafter.method, drafter.model


@pytest.mark.parametrize(
    ("given", "method", "model"),
    [
        ({"method": "mlp"}, "mlp", "demo-mlp"),
        ({"method": "mlp_speculator"}, "mlp", "demo-mlp"),
        ({"method": "eagle3"}, "eagle3", "demo-eagle3"),
        ({"method": "medusa"}, "medusa", "demo-medusa"),
        ({"method": "peagle"}, "eagle3", "demo-parallel"),
        ({"method": "eagle3", "parallel_drafting": True}, "eagle3", "demo-parallel"),
        ({"method": "dflash"}, "dflash", "demo-dflash"),
        ({"method": "dspark"}, "dspark", "demo-dspark"),
        ({"method": "draft_model"}, "draft_model", "demo-draft"),
        ({"method": "mlp", "model": "other"}, "mlp", "other"),
        ({"method": "ngram"}, "ngram", None),
    ],
)
def test_the_shipped_drafter_is_found(given: dict[str, Any], method: str, model: str) -> None:
    assert _drafter("demo", **given, num_speculative_tokens=3) == (method, model)


@pytest.mark.parametrize(
    ("config", "found", "missing"),
    [
        ({"pard_token": 1}, "pard", "peagle"),
        ({"speculators_model_type": "peagle_anchored"}, "peagle", "pard"),
    ],
)
def test_the_parallel_drafter_has_one_method(
    shipped: Path, config: dict[str, Any], found: str, missing: str
) -> None:
    """PARD or P-EAGLE, whichever ships; EAGLE-3 is never taken in the place of P-EAGLE."""
    (shipped / "demo-parallel" / "config.json").write_text(json.dumps(config))
    assert _drafter("demo", method=found)[1] == "demo-parallel"
    with pytest.raises(ConfigError, match=r"speculative_config\.model"):
        _drafter("demo", method=missing)
    assert _drafter("demo", method="eagle3")[1] == "demo-eagle3"


def test_each_of_several_drafters_finds_its_own() -> None:
    several = {"drafters": [{"method": "ngram"}, {"method": "mlp"}], "num_speculative_tokens": 3}
    config = EngineConfig.from_kwargs(model="demo", speculative_config=several).speculative_config
    assert config is not None
    assert [one.model for one in config.drafters] == [None, "demo-mlp"]


@pytest.mark.parametrize("given", [{"method": "eagle"}, {"method": "mlp"}])
def test_nothing_ships_for_another_target(given: dict[str, Any]) -> None:
    target = "demo" if given["method"] == "eagle" else "my-model"
    with pytest.raises(ConfigError, match=r"speculative_config\.model"):
        _drafter(target, **given)


@pytest.mark.parametrize("name", HEADS)
def test_packaged_names_resolve_and_name_their_method(shipped: Path, name: str) -> None:
    assert checkpoint.find_model(name) == shipped / name
    assert head_method(name) == ("eagle3" if "parallel" in name else name.removeprefix("demo-"))
    assert checkpoint.installed() == tuple(n for n in checkpoint.PACKAGED if n in HEADS)


def test_a_missing_head_says_what_is_there(shipped: Path) -> None:
    (shipped / "demo-mlp" / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="demo-mlp.*demo-eagle3, demo-medusa"):
        checkpoint.find_model("demo-mlp")


def _bytes(name: str, pattern: str = "*") -> int:
    return sum(f.stat().st_size for f in (PACKAGED / name).rglob(pattern) if f.is_file())


def test_what_ships_is_small() -> None:
    """All packaged weights <= 45 MB, the block heads of them <= 7 MB; each with its card."""
    heads = [name for name in HEADS if (PACKAGED / name).is_dir()]
    assert _bytes(".", "*.safetensors") <= 45 * MEGABYTE
    assert _bytes("demo-dflash") + _bytes("demo-dspark") <= 7 * MEGABYTE
    for name in heads:
        assert "Held out" in (PACKAGED / name / "README.md").read_text()
