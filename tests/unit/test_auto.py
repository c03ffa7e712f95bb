"""`{"method": "auto"}`: who competes for which target, with which lengths, and what is refused."""

import json
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken import checkpoint
from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.config.auto import MOST_WITH_WEIGHTS, auto_drafters, expected_gain
from foretoken.config.methods import built_methods, find_method
from foretoken.errors import ConfigError

LOOK_UPS = ["ngram", "suffix"]
PACKAGED = Path(foretoken.__file__).parent / "packaged"


def read(target: str | None = "demo", **given: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict({"method": "auto", **given}, target)


def labels(config: SpeculativeConfig) -> list[str]:
    return [one.label for one in config.drafters]


def test_everything_that_ships_competes_and_the_best_three_have_weights() -> None:
    config = read()
    assert labels(config) == [*LOOK_UPS, "eagle3", "dspark", "peagle"]
    assert config.policy == "best"
    weighty = [one for one in config.drafters if one.model is not None]
    assert len(weighty) == MOST_WITH_WEIGHTS
    assert [one.model for one in weighty] == ["demo-eagle3", "demo-dspark", "demo-parallel"]
    assert [one.parallel_drafting for one in weighty] == [False, False, True]
    gains = [
        expected_gain(find_method(method), card)
        for method, name in (("eagle3", "demo-eagle3"), ("dspark", "demo-dspark"))
        for card in find_method(method).packaged
        if card.model == name
    ]
    assert gains == sorted(gains, reverse=True) and min(gains) > 1.5


@pytest.mark.parametrize("target", [None, "my/model"])
def test_a_target_for_which_nothing_ships_gets_look_ups(target: str | None) -> None:
    assert labels(read(target)) == LOOK_UPS


def test_what_is_not_installed_does_not_compete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo-mlp").mkdir()
    config = {"model_type": "mlp_speculator", "n_predict": 3}
    (tmp_path / "demo-mlp" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(checkpoint, "_packaged_root", lambda: tmp_path)
    assert labels(read()) == [*LOOK_UPS, "mlp"]


def test_a_number_is_the_most_of_any_drafter() -> None:
    lengths = [one.num_speculative_tokens for one in read(num_speculative_tokens=2).drafters]
    assert lengths == [2] * 5
    assert [one.num_speculative_tokens for one in read().drafters] == [10, 16, 8, 7, 5]
    schedule = [[1, 4, 6], [5, 9, 0]]
    by_load = read(num_speculative_tokens_per_batch_size=schedule)
    # P-EAGLE drafts no further than it was trained for, whatever is asked.
    assert [one.num_speculative_tokens for one in by_load.drafters] == [6, 6, 6, 6, 5]


def test_a_list_beside_auto_is_what_competes() -> None:
    config = read(drafters=[{"method": "ngram"}, {"method": "mlp"}], num_speculative_tokens=3)
    assert labels(config) == ["ngram", "mlp"] and config.policy == "best"
    assert read(drafters=[{"method": "ngram"}], policy="first").policy == "first"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"model": "demo-draft"}, "model"),
        ({"quantization": "int8"}, "quantization"),
        ({"prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"num_speculative_tokens": "many"}, "num_speculative_tokens"),
        ({"num_speculative_tokens": 129}, "num_speculative_tokens"),
        ({"drafters": [{"method": "auto"}]}, "drafters[0].method"),
        ({"colour": "red"}, "colour"),
    ],
)
def test_what_does_not_go_beside_auto(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(**given)
    assert caught.value.field == f"speculative_config.{field}"


def test_what_is_expected_of_a_drafter_before_it_was_measured() -> None:
    expected = {one.label: one.usual_acceptance for one in read().drafters}
    assert expected["eagle3"] == 0.73 and expected["dspark"] == 0.68
    assert expected["ngram"] == find_method("ngram").usual_acceptance
    own = SpeculativeConfig.from_dict({"method": "eagle3", "model": "mine"}).drafters[0]
    assert own.usual_acceptance == find_method("eagle3").usual_acceptance


def test_the_table_says_of_packaged_heads_what_their_files_say() -> None:
    cards = {card.model: card for method in built_methods() for card in method.packaged}
    stages = json.loads((PACKAGED / "demo-mlp" / "config.json").read_text())["n_predict"]
    heads = json.loads((PACKAGED / "demo-medusa" / "config.json").read_text())["medusa_num_heads"]
    assert cards["demo-mlp"].most_drafts == stages
    assert cards["demo-medusa"].most_drafts == heads
    for method in built_methods():
        assert 0.0 < method.usual_acceptance < 1.0 and method.usual_cost >= 0.0, method.name


def test_auto_drafters_wants_a_number() -> None:
    with pytest.raises(ConfigError):
        auto_drafters("demo", -1)


@pytest.mark.parametrize(
    ("given", "speculative", "control"),
    [
        ({}, None, "fixed"),
        ({}, {"method": "ngram"}, "adaptive"),
        ({}, {"method": "ngram", "disable_by_batch_size": 4}, "fixed"),
        ({"adaptive_speculation": True}, None, "adaptive"),
        ({"adaptive_speculation": False}, {"method": "auto"}, "fixed"),
        ({"adaptive_speculation": "measured"}, {"method": "auto"}, "measured"),
    ],
)
def test_control_is_on_wherever_there_is_a_drafter(
    given: dict[str, Any], speculative: dict[str, Any] | None, control: str
) -> None:
    config = EngineConfig.from_kwargs(model="demo", speculative_config=speculative, **given)
    assert config.control == control


@pytest.mark.parametrize("wanted", [True, "measured", "often"])
def test_control_is_refused_beside_lengths_by_load(wanted: bool | str) -> None:
    by_load = {"method": "ngram", "disable_by_batch_size": 4}
    settings: dict[str, Any] = {"speculative_config": by_load, "adaptive_speculation": wanted}
    with pytest.raises(ConfigError, match="adaptive_speculation"):
        EngineConfig.from_kwargs(model="demo", **settings)
