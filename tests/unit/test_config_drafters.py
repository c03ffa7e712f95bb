"""Settings of drafters: several of them, lengths by load, classes of the user's own."""

from typing import Any

import pytest

from foretoken.config import SpeculativeConfig
from foretoken.errors import ConfigError

NGRAM: dict[str, Any] = {"method": "ngram"}
MODEL: dict[str, Any] = {"method": "draft_model", "model": "demo-draft"}


def read(**given: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict(given)


def test_one_drafter_is_a_list_of_one() -> None:
    config = read(**NGRAM)
    assert [one.label for one in config.drafters] == ["ngram"]


def test_several_drafters_share_the_common_number_of_drafts() -> None:
    own = {**NGRAM, "num_speculative_tokens": 9, "name": "look-up"}
    config = read(drafters=[own, MODEL], num_speculative_tokens=3, rejection_sample_method="block")
    assert [one.label for one in config.drafters] == ["look-up", "draft_model"]
    assert [one.num_speculative_tokens for one in config.drafters] == [9, 3]
    assert config.num_speculative_tokens == 9
    assert config.rule.rejection_sample_method == "block"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"drafters": []}, "drafters"),
        ({"drafters": "ngram"}, "drafters"),
        ({"drafters": [3]}, "drafters[0]"),
        ({"drafters": [NGRAM, NGRAM]}, "drafters[1].name"),
        ({"drafters": [{**NGRAM, "name": "prediction"}]}, "drafters[0].name"),
        ({"drafters": [{**NGRAM, "policy": "first"}]}, "drafters[0].policy"),
        ({"drafters": [{"drafters": [NGRAM]}]}, "drafters[0].drafters"),
        ({"drafters": [NGRAM, {**NGRAM, "max_model_len": 0}]}, "drafters[1].max_model_len"),
        ({"drafters": [NGRAM], "quantization": "int8"}, "quantization"),
        ({"drafters": [NGRAM], "parallel_drafting": True}, "parallel_drafting"),
        ({"drafters": [NGRAM], "tree_top_k": 2}, "tree_top_k"),
        ({"drafters": [NGRAM], "tree_depth": 2}, "tree_depth"),
        ({"drafters": [NGRAM], "method": "ngram"}, "method"),
        ({"drafters": [NGRAM], "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"drafters": [NGRAM], "policy": "last"}, "policy"),
        ({"drafters": [NGRAM], "colour": "red"}, "colour"),
        ({**NGRAM, "policy": "best"}, "policy"),
    ],
)
def test_wrong_lists_name_the_field(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_dict(given)
    assert caught.value.field == f"speculative_config.{field}"


def test_a_schedule_gives_the_number_of_drafts_where_there_is_none() -> None:
    schedule = [[1, 4, 6], [5, 8, 2], [9, 64, 0]]
    config = read(**NGRAM, num_speculative_tokens_per_batch_size=schedule)
    assert config.num_speculative_tokens == 6
    read_as = config.load.num_speculative_tokens_per_batch_size
    assert read_as == ((1, 4, 6), (5, 8, 2), (9, 64, 0))


@pytest.mark.parametrize(
    "schedule",
    [
        [],
        "1-4",
        [[1, 4]],
        [[2, 4, 3]],
        [[1, 4, 3], [4, 6, 2]],
        [[1, 0, 3]],
        [[1, 4, -1]],
        [[1, 4, 9]],
        [[1, 4, 2.0]],
    ],
)
def test_wrong_schedules(schedule: object) -> None:
    key = "num_speculative_tokens_per_batch_size"
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_dict({**NGRAM, "num_speculative_tokens": 8, key: schedule})
    assert caught.value.field == f"speculative_config.{key}"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({**NGRAM, "min_speculative_tokens": 6}, "min_speculative_tokens"),
        ({**NGRAM, "min_speculative_tokens": -1}, "min_speculative_tokens"),
        ({**NGRAM, "draft_confidence_threshold": 0.5}, "draft_confidence_threshold"),
        ({"method": "suffix", "draft_confidence_threshold": 0.5}, "draft_confidence_threshold"),
        ({**MODEL, "draft_confidence_threshold": 1}, "draft_confidence_threshold"),
        ({**MODEL, "draft_confidence_threshold": "high"}, "draft_confidence_threshold"),
        ({**NGRAM, "draft_expected_gain": True}, "draft_expected_gain"),
        ({**MODEL, "draft_expected_gain": 1}, "draft_expected_gain"),
        ({**MODEL, "disable_padded_drafter_batch": 0}, "disable_padded_drafter_batch"),
        (
            {"drafters": [NGRAM], "disable_padded_drafter_batch": False},
            "disable_padded_drafter_batch",
        ),
        ({**NGRAM, "disable_by_batch_size": 1}, "disable_by_batch_size"),
        ({**NGRAM, "suffix_decoding_max_tree_depth": 1}, "suffix_decoding_max_tree_depth"),
        ({**NGRAM, "suffix_decoding_min_token_prob": 1.5}, "suffix_decoding_min_token_prob"),
        ({**NGRAM, "suffix_decoding_max_spec_factor": -1}, "suffix_decoding_max_spec_factor"),
        (
            {**NGRAM, "suffix_decoding_max_cached_requests": -1},
            "suffix_decoding_max_cached_requests",
        ),
        (
            {
                **NGRAM,
                "disable_by_batch_size": 4,
                "num_speculative_tokens_per_batch_size": [[1, 9, 2]],
            },
            "disable_by_batch_size",
        ),
        ({"method": "custom_class", "model": "a name"}, "model"),
        ({"method": "custom_class"}, "model"),
    ],
)
def test_values_out_of_range(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_dict(given)
    assert caught.value.field == f"speculative_config.{field}"


def test_a_dotted_path_of_a_class_means_custom_class() -> None:
    assert read(model="my_package.drafting.MyProposer").drafters[0].method == "custom_class"
    assert read(model="org/model-1.5B").drafters[0].method == "draft_model"
    assert read(model="demo-draft").drafters[0].method == "draft_model"
