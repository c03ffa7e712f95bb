"""Names of other engines mean the same here, and never something twice."""

import logging
from typing import Any

import pytest

from foretoken.config import EngineConfig, SpeculativeConfig
from foretoken.config.aliases import SPECULATIVE_KEYS
from foretoken.config.drafter import drafter_keys
from foretoken.config.methods import known_methods
from foretoken.config.other_engines import other_names, other_values
from foretoken.config.reader import keys_of
from foretoken.config.speculative import RULES
from foretoken.errors import ConfigError, NotYetError


def test_the_table_leads_to_keys_and_methods_that_exist() -> None:
    own = {*keys_of(SpeculativeConfig), *drafter_keys()}
    methods = {"auto", *(method.name for method in known_methods())}
    for row in other_names():
        assert row.key is None or row.key in own or row.key in SPECULATIVE_KEYS.neutral, row
        assert row.method is None or row.method in methods, row
        assert not (row.say and (row.key or row.method)), f"accepted or answered: {row}"
        if row.kind in ("flags", "keys") and row.name in own and row.key:
            assert row.key == row.name, f"{row.name} is ours already"
    assert set(other_values("rejection_sample_method").values()) <= set(RULES)


def test_a_name_means_one_thing_whoever_has_it() -> None:
    """Flags and keys are read alike: one name must not be two things."""
    meanings: dict[str, set[str | None]] = {}
    for row in other_names():
        if row.kind in ("flags", "keys"):
            meanings.setdefault(row.name, set()).add(row.key or row.say or row.name)
    assert {name: found for name, found in meanings.items() if len(found) > 1} == {}


def setting(config: SpeculativeConfig, key: str) -> Any:
    [drafter] = config.drafters
    for settings in (drafter, drafter.own, config.rule):
        if hasattr(settings, key):
            return getattr(settings, key)
    raise AssertionError(key)


@pytest.mark.parametrize(
    ("given", "key", "value"),
    [
        ({"rejection_sample_method": "strict"}, "rejection_sample_method", "matching"),
        ({"rejection_sample_method": "probabilistic"}, "rejection_sample_method", "standard"),
        ({"acceptance_method": "rejection_sampler"}, "rejection_sample_method", "standard"),
        (
            {"spec-decoding-acceptance-method": "typical_acceptance_sampler"},
            "rejection_sample_method",
            "typical",
        ),
        ({"use_rejection_sampling": False}, "rejection_sample_method", "matching"),
        ({"use_rejection_sampling": True}, "rejection_sample_method", "standard"),
        ({"max_draft_len": 7}, "num_speculative_tokens", 7),
        ({"max_matching_ngram_size": 3}, "prompt_lookup_max", 3),
        ({"decoding_type": "NGram"}, "method", "ngram"),
        ({"ngram_prompt_lookup_max": 8}, "prompt_lookup_max", 8),
    ],
)
def test_values_arrive_under_our_names(
    given: dict[str, object], key: str, value: object, caplog: pytest.LogCaptureFixture
) -> None:
    base = {} if "decoding_type" in given else {"method": "ngram"}
    with caplog.at_level(logging.INFO, "foretoken"):
        config = SpeculativeConfig.from_dict({**base, **given})
    assert setting(config, key) == value
    assert key in caplog.text, "the translation is not logged"


def test_older_typical_thresholds() -> None:
    config = SpeculativeConfig.from_dict(
        {
            "model": "ngram",
            "spec_decoding_acceptance_method": "typical_acceptance_sampler",
            "typical_acceptance_sampler_posterior_threshold": 0.05,
            "typical_acceptance_sampler_posterior_alpha": 0.2,
        }
    )
    assert (config.rule.posterior_threshold, config.rule.posterior_alpha) == (0.05, 0.2)


@pytest.mark.parametrize("keys", [{"rejection_sample_method": "typical"}, {"max_draft_len": 3}])
def test_who_drafts_has_to_be_said_in_a_config(keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match="method: got None; allowed: auto for what suits"):
        SpeculativeConfig.from_dict(keys)


@pytest.mark.parametrize(
    ("flag", "answer"),
    [
        ("speculative_lookahead_min_match_window_size", "prompt_lookup_min"),
        ("speculative_lookahead_branch_length", "num_speculative_tokens"),
        ("draft_engine_dir", "draft_model"),
        ("draft_target_model_config", "draft_model"),
        ("prompt_lookup_config", "prompt_lookup_max"),
        ("ngram_config", "ngram"),
        ("lookahead_config", "suffix"),
        ("eagle_use_dynamic_tree", "tree_top_k"),
    ],
)
def test_a_flag_of_another_age_is_answered(flag: str, answer: str) -> None:
    with pytest.raises(ConfigError, match=answer):
        EngineConfig.from_kwargs(model="demo", **{flag: 1})


def test_one_setting_under_two_names() -> None:
    same = {"method": "ngram", "prompt_lookup_max": 4, "ngram_prompt_lookup_max": 4}
    assert setting(SpeculativeConfig.from_dict(same), "prompt_lookup_max") == 4
    with pytest.raises(ConfigError, match="one value of prompt_lookup_max"):
        SpeculativeConfig.from_dict({**same, "ngram_prompt_lookup_max": 5})


def test_methods_of_tensorrt_that_are_not_built() -> None:
    with pytest.raises(NotYetError, match="mtp"):
        SpeculativeConfig.from_dict({"decoding_type": "MTP", "speculative_model": "x"})


def test_flags_from_before_the_dictionary() -> None:
    config = EngineConfig.from_kwargs(
        model="demo",
        speculative_model="[ngram]",
        num_speculative_tokens=4,
        ngram_prompt_lookup_max=6,
    )
    found = config.speculative_config
    assert found is not None
    keys = "method", "num_speculative_tokens", "prompt_lookup_max"
    assert [setting(found, key) for key in keys] == ["ngram", 4, 6]
    with pytest.raises(ConfigError, match="num_speculative_tokens"):
        EngineConfig.from_kwargs(
            model="demo",
            num_speculative_tokens=4,
            speculative_config={"method": "ngram", "num_speculative_tokens": 3},
        )


def rule(name: str, **others: object) -> dict[str, object]:
    base: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 2}
    return {**base, "rejection_sample_method": name, **others}


@pytest.mark.parametrize(
    ("given", "field"),
    [
        (rule("typical", posterior_threshold=0), "posterior_threshold"),
        (rule("typical", posterior_alpha="high"), "posterior_alpha"),
        (rule("standard", posterior_alpha=0.2), "posterior_alpha"),
        (rule("synthetic"), "synthetic_acceptance_rates"),
        (rule("synthetic", synthetic_acceptance_rates=[0.5]), "synthetic_acceptance_rates"),
        (rule("synthetic", synthetic_acceptance_rates=[0.5, 0.6]), "synthetic_acceptance_rates"),
        (rule("synthetic", synthetic_acceptance_rates=[1.5, 0.6]), "synthetic_acceptance_rates"),
        (rule("synthetic", synthetic_acceptance_length=0.5), "synthetic_acceptance_length"),
        (rule("synthetic", synthetic_acceptance_length=3.5), "synthetic_acceptance_length"),
        (
            rule("synthetic", synthetic_acceptance_length=2, synthetic_acceptance_rates=[0.5, 0.5]),
            "synthetic_acceptance_rates",
        ),
        (rule("auto", synthetic_acceptance_length=2), "synthetic_acceptance_length"),
    ],
)
def test_settings_of_rules_out_of_range(given: dict[str, object], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_dict(given)
    assert caught.value.field == f"speculative_config.{field}"
