"""What may be written as `choices`, and what each mistake answers."""

import pytest

from foretoken.config import SpeculativeConfig
from foretoken.errors import ConfigError


def config(**keys: object) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict({"model": "x", **keys})


def test_choices_are_paths_and_count_as_drafts() -> None:
    [found] = config(choices=[[1], [0], [0, 0]]).drafters
    assert found.tree.choices == ((0,), (0, 0), (1,)) and found.num_speculative_tokens == 3
    [older] = config(speculative_token_tree="[(0,), (0, 0), (1,)]").drafters
    assert older.tree == found.tree
    assert config(medusa_choices=[[0]], num_speculative_tokens=1).num_speculative_tokens == 1


def test_synthetic_rates_are_of_depths() -> None:
    keys = {"choices": [[0], [1], [1, 0]], "rejection_sample_method": "synthetic"}
    assert config(**keys, synthetic_acceptance_rates=[0.5, 0.2]).synthetic_rates == (0.5, 0.2)
    with pytest.raises(ConfigError, match="1 to num_speculative_tokens"):
        config(**keys, synthetic_acceptance_length=3.5)


@pytest.mark.parametrize(
    "choices", [[], [[]], [[0, 0]], [[0], [0]], [[-1]], [["0"]], "nonsense", 5, [[0]] * 129]
)
def test_malformed_choices(choices: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config(choices=choices)
    assert caught.value.field == "speculative_config.choices"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_speculative_tokens", 3),
        ("draft_confidence_threshold", 0.5),
        ("min_speculative_tokens", 1),
        ("use_string_matching", True),
    ],
)
def test_what_trees_do_not_go_with(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        config(choices=[[0], [1]], **{key: value})
    assert caught.value.field == f"speculative_config.{key}"


def test_only_draft_models_draft_trees() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        SpeculativeConfig.from_dict({"method": "ngram", "choices": [[0], [1]]})


def test_dynamic_trees() -> None:
    [found] = config(tree_top_k=4).drafters
    assert (found.tree.tree_depth, found.num_speculative_tokens) == (5, 20)
    theirs = config(
        speculative_eagle_topk=2, speculative_num_steps=3, num_speculative_tokens=4, method="eagle"
    )
    [found] = theirs.drafters
    assert (found.tree.tree_top_k, found.tree.tree_depth) == (2, 3)
    assert found.num_speculative_tokens == 4
    counts_the_root = config(speculative_eagle_topk=2, speculative_num_draft_tokens=9)
    assert counts_the_root.num_speculative_tokens == 8
    keys = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5}
    assert config(tree_top_k=2, tree_depth=3, **keys).synthetic_rates == (1.0, 1.0, 0.5, 0.0)[:3]


@pytest.mark.parametrize(
    ("field", "keys"),
    [
        ("tree_top_k", {"tree_top_k": 0}),
        ("tree_top_k", {"tree_top_k": 33}),
        ("tree_top_k", {"tree_top_k": 2, "method": "suffix", "model": None}),
        ("tree_depth", {"tree_depth": 4}),
        ("tree_depth", {"tree_top_k": 2, "tree_depth": 0}),
        ("choices", {"tree_top_k": 2, "choices": [[0]], "num_speculative_tokens": 1}),
        ("draft_confidence_threshold", {"tree_top_k": 2, "draft_confidence_threshold": 0.2}),
        ("draft_expected_gain", {"tree_top_k": 2, "draft_expected_gain": True}),
    ],
)
def test_what_dynamic_trees_do_not_go_with(field: str, keys: dict[str, object]) -> None:
    with pytest.raises(ConfigError) as caught:
        config(**keys)
    assert caught.value.field == f"speculative_config.{field}"
