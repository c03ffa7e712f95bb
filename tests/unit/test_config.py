"""What a user may write in `LLM(...)` and `speculative_config`, and what each mistake answers."""

import json
import logging
from pathlib import Path
from typing import Any

import pytest

import foretoken
from foretoken import checkpoint
from foretoken.config import DrafterConfig, EngineConfig, SpeculativeConfig
from foretoken.config.auto import MOST_WITH_WEIGHTS, auto_drafters, expected_gain
from foretoken.config.drafter import drafter_keys
from foretoken.config.method_registry import built_methods, find_method, known_methods
from foretoken.config.other_engines import other_names, other_values
from foretoken.config.reader import keys_of
from foretoken.config.speculative import RULES
from foretoken.config.translate import SPECULATIVE_KEYS
from foretoken.errors import ConfigError, NotYetError


def one(given: dict[str, Any]) -> DrafterConfig:
    [drafter] = SpeculativeConfig.from_dict(given).drafters
    return drafter


def test_vllm_arguments_are_taken() -> None:
    config = EngineConfig.from_kwargs(
        model="demo",
        dtype="bfloat16",
        max_model_len=512,
        tensor_parallel_size=1,
        gpu_memory_utilization=0.5,
        enforce_eager=True,
        trust_remote_code=False,
        speculative_config={"method": "ngram", "num_speculative_tokens": 3},
    )
    assert config.speculative_config is not None
    assert config.speculative_config.num_speculative_tokens == 3


def test_unknown_key_is_an_error_with_a_hint() -> None:
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'") as caught:
        EngineConfig.from_kwargs(model="demo", max_num_seq=4)
    assert caught.value.field == "LLM.max_num_seq"


def test_kv_cache_dtype_of_target_and_draft() -> None:
    draft = {"model": "demo-draft", "kv_cache_dtype": "int8"}
    config = EngineConfig.from_kwargs(
        model="demo", kv_cache_dtype="int8", speculative_config={**draft, "kv_cache_dtype": None}
    )
    assert config.kv_cache_dtype == "int8" and config.speculative_config is not None
    assert config.speculative_config.drafters[0].kv_cache_dtype == "auto"
    for method, model in (("draft_model", "demo-draft"), ("eagle3", "demo-eagle3")):
        given = {**draft, "method": method, "model": model}
        assert one(given).kv_cache_dtype == "int8"
    with pytest.raises(NotYetError, match="auto, int8"):
        SpeculativeConfig.from_dict({**draft, "kv_cache_dtype": "fp8"})
    with pytest.raises(ConfigError, match="auto, int8"):
        EngineConfig.from_kwargs(model="demo", kv_cache_dtype="int7")


@pytest.mark.parametrize(
    "given",
    [
        {"method": "ngram"},
        {"method": "suffix"},
        {"method": "mlp", "model": "demo-mlp"},
        {"method": "medusa", "model": "demo-medusa"},
        {"method": "custom_class", "model": "a.b.C"},
    ],
    ids=str,
)
def test_no_keys_of_its_own_no_type_of_keys(given: dict[str, str]) -> None:
    SpeculativeConfig.from_dict({**given, "kv_cache_dtype": "auto"})
    with pytest.raises(ConfigError, match="keeps no keys and values of its own"):
        SpeculativeConfig.from_dict({**given, "kv_cache_dtype": "int8"})
    with pytest.raises(ConfigError, match="goes inside one of the drafters"):
        SpeculativeConfig.from_dict({"drafters": [given], "kv_cache_dtype": "int8"})


def test_activations_of_target_and_draft() -> None:
    draft = {"model": "demo-draft", "activations": "int16"}
    config = EngineConfig.from_kwargs(
        model="demo", quantization="int4", activations="int8", speculative_config=draft
    )
    assert config.precision.x_bits == 8 and config.precision.x_bits_asked_by == "activations"
    assert one(draft).precision.x_bits == 16
    assert EngineConfig.from_kwargs(model="demo").precision.x_bits == 16
    rounded = EngineConfig.from_kwargs(model="demo", quantization="int8")
    assert rounded.precision.x_bits == 16, "a target's tokens are nobody's to check"
    for method in ("draft_model", "eagle3"):
        given = {"method": method, "model": "demo-draft", "quantization": "int8"}
        assert one(given).precision.x_bits == (8 if method == "draft_model" else 16)
        assert one(given).precision.x_bits_asked_by is None
        assert one({**given, "activations": "int16"}).precision.x_bits == 16
    assert EngineConfig.from_kwargs(model="demo").precision.x_bits_asked_by is None
    head = {"method": "eagle3", "model": "demo-eagle3", "activations": "int8"}
    assert one({**head, "quantization": "int8"}).precision.x_bits == 8
    with pytest.raises(ConfigError, match="beside quantization"):
        one(head)
    with pytest.raises(ConfigError, match="ngram has no weights"):
        one({"method": "ngram", "activations": "int8"})
    with pytest.raises(ConfigError, match="auto, int16, int8"):
        EngineConfig.from_kwargs(model="demo", activations="int4")


def test_a_part_not_built_says_so() -> None:
    with pytest.raises(NotYetError, match="not yet built"):
        EngineConfig.from_kwargs(model="demo", kv_cache_dtype="fp8")
    with pytest.raises(NotYetError, match="mtp"):
        SpeculativeConfig.from_dict({"method": "mtp", "model": "x"})
    with pytest.raises(NotYetError, match="fly"):
        SpeculativeConfig.from_dict({"method": "ngram", "rejection_sample_method": "fly"})
    with pytest.raises(ConfigError, match="only draft_model, parallel, eagle3"):
        SpeculativeConfig.from_dict({"method": "ngram", "parallel_drafting": True})


def test_neutral_values_of_parts_not_built_are_taken() -> None:
    given = {"method": "ngram", "parallel_drafting": False, "suffix_decoding_max_tree_depth": 24}
    assert one(given).method == "ngram"


def test_removed_keys_name_their_successor() -> None:
    with pytest.raises(ConfigError, match="synthetic_acceptance_rates"):
        SpeculativeConfig.from_dict({"method": "ngram", "synthetic_acceptance_rate": 0.4})
    with pytest.raises(ConfigError, match="leave it out"):
        EngineConfig.from_kwargs(model="demo", swap_space=4)
    with pytest.raises(ConfigError, match="one process"):
        SpeculativeConfig.from_dict({"method": "ngram", "tensor_parallel_size": 1})


@pytest.mark.parametrize(
    ("gone", "fine", "instead"),
    [
        ({"policy": "best"}, (), "adaptive_speculation chooses"),
        ({"policy": "first"}, (), "the first in the list"),
        ({"disable_padded_drafter_batch": False}, (True,), "True or left out"),
        ({"draft_tensor_parallel_size": 2}, (None, 1), "1 or left out: .* one process"),
        ({"draft_expected_gain": True}, (), "draft_confidence_threshold"),
    ],
)
def test_settings_that_went_say_what_to_do_instead(
    gone: dict[str, Any], fine: tuple[object, ...], instead: str
) -> None:
    [key] = gone
    for given in ({"model": "demo-draft", **gone}, {"drafters": [{**NGRAM, **gone}]}):
        with pytest.raises(ConfigError, match=f"{key}: .*{instead}"):
            EngineConfig.from_kwargs(model="demo", tensor_parallel_size=2, speculative_config=given)
    for value in fine:
        assert one({"model": "demo-draft", key: value}).method == "draft_model"


def test_control_by_trial_went() -> None:
    with pytest.raises(ConfigError, match="True learns from what steps took"):
        EngineConfig.from_kwargs(model="demo", adaptive_speculation="measured")


def test_method_is_inferred() -> None:
    assert one({"model": "ngram"}).method == "ngram"
    assert one({"model": "demo-draft"}).method == "draft_model"
    with pytest.raises(ConfigError, match="method"):
        SpeculativeConfig.from_dict({"num_speculative_tokens": 3})


def test_one_lookup_bound_moves_the_other() -> None:
    own = one({"method": "ngram", "prompt_lookup_min": 9}).own
    assert (own.prompt_lookup_min, own.prompt_lookup_max) == (9, 9)
    own = one({"method": "ngram", "prompt_lookup_max": 1}).own
    assert (own.prompt_lookup_min, own.prompt_lookup_max) == (1, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("num_speculative_tokens", 0),
        ("num_speculative_tokens", -1),
        ("num_speculative_tokens", 2.5),
        ("num_speculative_tokens", True),
        ("prompt_lookup_min", 0),
        ("prompt_lookup_min", 6),
        ("draft_sample_method", "best"),
        ("rejection_sample_method", "strictly"),
        ("max_model_len", 0),
        ("model", "demo-draft"),
    ],
)
def test_speculative_values_out_of_range(key: str, value: object) -> None:
    given = {"method": "ngram", "prompt_lookup_max": 5, key: value}
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_dict(given)
    assert caught.value.field == f"speculative_config.{key}"
    assert caught.value.given == value


def test_a_draft_model_needs_a_name() -> None:
    with pytest.raises(ConfigError, match=r"speculative_config\.model"):
        SpeculativeConfig.from_dict({"method": "draft_model"})


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", "fp8"),
        ("device", "mps"),
        ("max_num_seqs", 0),
        ("max_model_len", -1),
        ("block_size", 12),
        ("gpu_memory_utilization", 0),
        ("gpu_memory_utilization", 1.5),
        ("batch_invariant", "yes"),
        ("tensor_parallel_size", 0),
        ("seed", "x"),
        ("speculative_config", "ngram"),
    ],
)
def test_engine_values_out_of_range(key: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(**{"model": "demo", key: value})
    assert caught.value.field == key
    assert caught.value.given == value


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


def test_a_schedule_gives_the_number_of_drafts_where_there_is_none() -> None:
    schedule = [[1, 4, 6], [5, 8, 2], [9, 64, 0]]
    config = read(**NGRAM, num_speculative_tokens_per_batch_size=schedule)
    assert config.num_speculative_tokens == 6
    read_as = config.load.num_speculative_tokens_per_batch_size
    assert read_as == ((1, 4, 6), (5, 8, 2), (9, 64, 0))


def test_a_dotted_path_of_a_class_means_custom_class() -> None:
    assert read(model="my_package.drafting.MyProposer").drafters[0].method == "custom_class"
    assert read(model="org/model-1.5B").drafters[0].method == "draft_model"
    assert read(model="demo-draft").drafters[0].method == "draft_model"


def config(**keys: object) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict({"model": "x", **keys})


def test_choices_are_paths_and_count_as_drafts() -> None:
    [found] = config(choices=[[1], [0], [0, 0]]).drafters
    assert found.tree.choices == ((0,), (0, 0), (1,)) and found.num_speculative_tokens == 3
    [text] = config(choices="[(0,), (0, 0), (1,)]").drafters
    assert text.tree == found.tree
    assert config(choices=[[0]], num_speculative_tokens=1).num_speculative_tokens == 1


def test_synthetic_rates_are_of_depths() -> None:
    keys = {"choices": [[0], [1], [1, 0]], "rejection_sample_method": "synthetic"}
    assert config(**keys, synthetic_acceptance_rates=[0.5, 0.2]).synthetic_rates == (0.5, 0.2)
    with pytest.raises(ConfigError, match="1 to num_speculative_tokens"):
        config(**keys, synthetic_acceptance_length=3.5)


def test_only_draft_models_draft_trees() -> None:
    with pytest.raises(ConfigError, match="draft_model"):
        SpeculativeConfig.from_dict({"method": "ngram", "choices": [[0], [1]]})


def test_dynamic_trees() -> None:
    [found] = config(tree_top_k=4).drafters
    assert (found.tree.tree_depth, found.num_speculative_tokens) == (5, 20)
    [found] = config(tree_top_k=2, tree_depth=3, num_speculative_tokens=4, method="eagle").drafters
    assert (found.tree.tree_top_k, found.tree.tree_depth) == (2, 3)
    assert found.num_speculative_tokens == 4
    keys = {"rejection_sample_method": "synthetic", "synthetic_acceptance_length": 3.5}
    assert config(tree_top_k=2, tree_depth=3, **keys).synthetic_rates == (1.0, 1.0, 0.5, 0.0)[:3]


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
    ("given", "instead"),
    [
        ({"rejection_sample_method": "strict"}, "matching"),
        ({"rejection_sample_method": "probabilistic"}, "standard"),
        ({"acceptance_method": "rejection_sampler"}, '"rejection_sample_method": "standard"'),
        (
            {"spec-decoding-acceptance-method": "typical_acceptance_sampler"},
            '"rejection_sample_method": "typical"',
        ),
        ({"typical_acceptance_sampler_posterior_alpha": 0.2}, '"posterior_alpha": 0.2'),
        ({"use_rejection_sampling": False}, '"rejection_sample_method": "matching"'),
        ({"use_rejection_sampling": True}, '"rejection_sample_method": "standard"'),
        ({"max_draft_len": 7}, '"num_speculative_tokens": 7'),
        ({"max_matching_ngram_size": 3}, '"prompt_lookup_max": 3'),
        ({"decoding_type": "NGram"}, '"method": "ngram"'),
        ({"medusa_choices": [[0]]}, '"choices": [[0]]'),
        ({"method": "EAGLE3"}, "eagle3"),
    ],
)
def test_words_of_other_engines_are_answered_with_ours(
    given: dict[str, object], instead: str
) -> None:
    """Those of vLLM's older releases too, in a dictionary and in one of several."""
    for whole in (given, {"drafters": [given]}):
        with pytest.raises(ConfigError) as caught:
            SpeculativeConfig.from_dict(whole)
        [key] = given
        place = "drafters[0]." if whole is not given else ""
        assert caught.value.field == f"speculative_config.{place}{key.replace('-', '_')}"
        assert caught.value.allowed == f"{instead}; {LINT}"


LINT = "`foretoken lab lint 'COMMAND'` translates the words of other engines"


def test_words_of_vllm_are_taken(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "foretoken"):
        assert read(method="ngram_gpu").drafters[0].method == "ngram"
    assert "'ngram_gpu' is taken as 'ngram'" in caplog.text


@pytest.mark.parametrize(
    "keys", [{"rejection_sample_method": "typical"}, {"num_speculative_tokens": 3}]
)
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
    same = {"method": "ngram", "prompt_lookup_max": 4, "prompt-lookup-max": 4}
    assert setting(SpeculativeConfig.from_dict(same), "prompt_lookup_max") == 4
    with pytest.raises(ConfigError, match="one value of prompt_lookup_max"):
        SpeculativeConfig.from_dict({**same, "prompt-lookup-max": 5})
    with pytest.raises(ConfigError, match="one value of method"):
        EngineConfig.from_kwargs(model="demo", spec_method="ngram", speculative_config=MODEL)


def test_methods_of_tensorrt_that_are_not_built() -> None:
    with pytest.raises(NotYetError, match="mtp"):
        SpeculativeConfig.from_dict({"decoding_type": "MTP", "speculative_model": "x"})


@pytest.mark.parametrize(
    ("flag", "value", "instead"),
    [
        ("speculative_model", "[ngram]", 'speculative_config={"model": "[ngram]"}; ' + LINT),
        ("num_speculative_tokens", 4, 'speculative_config={"num_speculative_tokens": 4}'),
        ("ngram_prompt_lookup_max", 6, 'speculative_config={"prompt_lookup_max": 6}; ' + LINT),
    ],
)
def test_flags_from_before_the_dictionary(flag: str, value: object, instead: str) -> None:
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_kwargs(model="demo", **{flag: value})
    assert (caught.value.field, caught.value.allowed) == (f"LLM.{flag}", instead)


def rule(name: str, **others: object) -> dict[str, object]:
    base: dict[str, object] = {"method": "ngram", "num_speculative_tokens": 2}
    return {**base, "rejection_sample_method": name, **others}


MOST = {**NGRAM, "num_speculative_tokens": 8}
SCHEDULES: list[Any] = [
    *([], "1-4", [[1, 4]], [[2, 4, 3]], [[1, 4, 3], [4, 6, 2]]),
    *([[1, 0, 3]], [[1, 4, -1]], [[1, 4, 9]], [[1, 4, 2.0]]),
]
CHOICES: list[Any] = [[], [[]], [[0, 0]], [[0], [0]], [[-1]], [["0"]], "nonsense", 5, [[0]] * 129]
BESIDE_CHOICES: list[dict[str, Any]] = [
    {"num_speculative_tokens": 3},
    {"draft_confidence_threshold": 0.5},
    {"min_speculative_tokens": 1},
    {"use_string_matching": True},
]
SCHEDULE = "num_speculative_tokens_per_batch_size"


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"drafters": []}, "drafters"),
        ({"drafters": "ngram"}, "drafters"),
        ({"drafters": [3]}, "drafters[0]"),
        ({"drafters": [NGRAM, NGRAM]}, "drafters[1].name"),
        ({"drafters": [{**NGRAM, "name": "prediction"}]}, "drafters[0].name"),
        ({"drafters": [{**NGRAM, "posterior_alpha": 0.2}]}, "drafters[0].posterior_alpha"),
        ({"drafters": [{"drafters": [NGRAM]}]}, "drafters[0].drafters"),
        ({"drafters": [NGRAM, {**NGRAM, "max_model_len": 0}]}, "drafters[1].max_model_len"),
        ({"drafters": [NGRAM], "quantization": "int8"}, "quantization"),
        ({"drafters": [NGRAM], "parallel_drafting": True}, "parallel_drafting"),
        ({"drafters": [NGRAM], "tree_top_k": 2}, "tree_top_k"),
        ({"drafters": [NGRAM], "tree_depth": 2}, "tree_depth"),
        ({"drafters": [NGRAM], "method": "ngram"}, "method"),
        ({"drafters": [NGRAM], "prompt_lookup_max": 3}, "prompt_lookup_max"),
        ({"drafters": [NGRAM], "colour": "red"}, "colour"),
        ({**NGRAM, "min_speculative_tokens": 6}, "min_speculative_tokens"),
        ({**NGRAM, "min_speculative_tokens": -1}, "min_speculative_tokens"),
        ({**NGRAM, "draft_confidence_threshold": 0.5}, "draft_confidence_threshold"),
        ({"method": "suffix", "draft_confidence_threshold": 0.5}, "draft_confidence_threshold"),
        ({**MODEL, "draft_confidence_threshold": 1}, "draft_confidence_threshold"),
        ({**MODEL, "draft_confidence_threshold": "high"}, "draft_confidence_threshold"),
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
        *(({**MOST, SCHEDULE: wrong}, SCHEDULE) for wrong in SCHEDULES),
        *(({"model": "x", "choices": wrong}, "choices") for wrong in CHOICES),
        *(({"model": "x", "choices": [[0], [1]], **more}, *more) for more in BESIDE_CHOICES),
        ({"model": "x", "tree_top_k": 0}, "tree_top_k"),
        ({"model": "x", "tree_top_k": 33}, "tree_top_k"),
        ({"model": None, "tree_top_k": 2, "method": "suffix"}, "tree_top_k"),
        ({"model": "x", "tree_depth": 4}, "tree_depth"),
        ({"model": "x", "tree_top_k": 2, "tree_depth": 0}, "tree_depth"),
        ({"model": "x", "tree_top_k": 2, "choices": [[0]], "num_speculative_tokens": 1}, "choices"),
        (
            {"model": "x", "tree_top_k": 2, "draft_confidence_threshold": 0.2},
            "draft_confidence_threshold",
        ),
    ],
)
def test_values_out_of_range(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ConfigError) as caught:
        SpeculativeConfig.from_dict(given)
    assert caught.value.field == f"speculative_config.{field}"


LOOK_UPS = ["ngram", "suffix"]
PACKAGED = Path(foretoken.__file__).parent / "packaged"


def auto(target: str | None = "demo", **given: Any) -> SpeculativeConfig:
    return SpeculativeConfig.from_dict({"method": "auto", **given}, target)


def labels(config: SpeculativeConfig) -> list[str]:
    return [one.label for one in config.drafters]


def test_everything_that_ships_competes_and_the_best_three_have_weights() -> None:
    config = auto()
    assert labels(config) == [*LOOK_UPS, "eagle3", "dspark", "peagle"]
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
    assert labels(auto(target)) == LOOK_UPS


def test_what_is_not_installed_does_not_compete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "demo-mlp").mkdir()
    config = {"model_type": "mlp_speculator", "n_predict": 3}
    (tmp_path / "demo-mlp" / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(checkpoint, "_packaged_root", lambda: tmp_path)
    assert labels(auto()) == [*LOOK_UPS, "mlp"]


def test_a_number_is_the_most_of_any_drafter() -> None:
    lengths = [one.num_speculative_tokens for one in auto(num_speculative_tokens=2).drafters]
    assert lengths == [2] * 5
    assert [one.num_speculative_tokens for one in auto().drafters] == [10, 16, 8, 7, 5]
    schedule = [[1, 4, 6], [5, 9, 0]]
    by_load = auto(num_speculative_tokens_per_batch_size=schedule)
    # P-EAGLE drafts no further than it was trained for, whatever is asked.
    assert [one.num_speculative_tokens for one in by_load.drafters] == [6, 6, 6, 6, 5]


def test_a_list_beside_auto_is_what_competes() -> None:
    config = auto(drafters=[{"method": "ngram"}, {"method": "mlp"}], num_speculative_tokens=3)
    assert labels(config) == ["ngram", "mlp"]


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
        auto(**given)
    assert caught.value.field == f"speculative_config.{field}"


def test_what_is_expected_of_a_drafter_before_it_was_measured() -> None:
    expected = {one.label: one.usual_acceptance for one in auto().drafters}
    assert expected["eagle3"] == 0.73 and expected["dspark"] == 0.68
    assert expected["ngram"] == find_method("ngram").usual_acceptance
    own = SpeculativeConfig.from_dict({"method": "eagle3", "model": "mine"}).drafters[0]
    assert own.usual_acceptance == find_method("eagle3").usual_acceptance


def test_the_table_says_of_packaged_heads_what_their_files_say() -> None:
    cards = {card.model: card for method in built_methods() for card in method.packaged}
    stages = json.loads((PACKAGED / "demo-mlp" / "config.json").read_text())["n_predict"]
    heads = json.loads((PACKAGED / "demo-medusa" / "config.json").read_text())["medusa_num_heads"]
    assert cards["demo-mlp"].max_drafts == stages
    assert cards["demo-medusa"].max_drafts == heads
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
    ],
)
def test_control_is_on_wherever_there_is_a_drafter(
    given: dict[str, Any], speculative: dict[str, Any] | None, control: str
) -> None:
    config = EngineConfig.from_kwargs(model="demo", speculative_config=speculative, **given)
    assert config.control == control


@pytest.mark.parametrize("keys", [{"choices": [[0], [1]]}, {"tree_top_k": 2}])
def test_trees_are_drafted_whole(keys: dict[str, Any]) -> None:
    """Control plans chains; `auto` leaves an engine with trees to its settings."""
    for trees in ({**MODEL, **keys}, {"drafters": [NGRAM, {**MODEL, **keys}]}):
        found = EngineConfig.from_kwargs(model="demo", speculative_config=trees)
        assert found.control == "fixed"
        with pytest.raises(ConfigError, match="False beside trees, .*disable_by_batch_size"):
            EngineConfig.from_kwargs(
                model="demo", speculative_config=trees, adaptive_speculation=True
            )


@pytest.mark.parametrize("wanted", [True, "often"])
def test_control_is_refused_beside_lengths_by_load(wanted: bool | str) -> None:
    by_load = {"method": "ngram", "disable_by_batch_size": 4}
    settings: dict[str, Any] = {"speculative_config": by_load, "adaptive_speculation": wanted}
    with pytest.raises(ConfigError, match="adaptive_speculation"):
        EngineConfig.from_kwargs(model="demo", **settings)
