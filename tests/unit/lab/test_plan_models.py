"""What plans are made of: models, devices, methods, and ranks that are processes."""

import json
import tomllib
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from foretoken.checkpoint import packaged_model
from foretoken.config import method_registry
from foretoken.config.memory import ModelMemory
from foretoken.config.method_registry import DraftingMethod
from foretoken.errors import CheckpointError, ConfigError, ModelNotFoundError
from foretoken.lab.launch.read import read_source
from foretoken.lab.lint.fit import Machine, check_pair
from foretoken.lab.plan.memory_plan import (
    draft_load,
    kv_per_token,
    overhead_bytes,
    plan_memory,
    weight_bytes,
)
from foretoken.lab.plan.method_plans import MethodPlan, planned_methods
from foretoken.lab.plan.page import expert_reads, what_fits
from foretoken.lab.plan.planner import SpeculationPlan, build_plan, ready_commands
from foretoken.lab.plan.predict import StepCosts
from foretoken.lab.plan.setup import PlanSettings, Setup, find_device, known_devices, resolve_setup
from foretoken.lab.plan.sizes import (
    find_quantization,
    known_models,
    kv_element_bytes,
    load_plan_model,
    read_config,
)
from foretoken.shape import ModelShape
from foretoken.shape.families import families

PUBLISHED = {  # billions of weights, from the models' cards
    "llama-3.1-8b": 8.03, "llama-3.1-70b": 70.55, "llama-3.1-405b": 405.85, "llama-3.2-1b": 1.24,
    "llama-3.2-3b": 3.21, "llama-2-13b": 13.02, "qwen2.5-0.5b": 0.494, "qwen2.5-7b": 7.62,
    "qwen2.5-72b": 72.7, "qwen3-0.6b": 0.596, "qwen3-8b": 8.19, "qwen3-30b-a3b": 30.5,
    "qwen3-235b-a22b": 235.1, "gpt-oss-20b": 20.9, "gpt-oss-120b": 116.8, "deepseek-v3": 671.0,
}  # fmt: skip
ACTIVE = {"gpt-oss-20b": 3.6, "gpt-oss-120b": 5.1, "deepseek-v3": 36.7, "qwen3-235b-a22b": 21.6}


@pytest.mark.parametrize(("name", "billions"), PUBLISHED.items())
def test_weights_match_the_cards(name: str, billions: float) -> None:
    assert load_plan_model(name, "target").params / 1e9 == pytest.approx(billions, rel=0.005)


@pytest.mark.parametrize(("name", "billions"), ACTIVE.items())
def test_active_weights_of_experts(name: str, billions: float) -> None:
    assert load_plan_model(name, "target").active_params / 1e9 == pytest.approx(billions, rel=0.01)


def test_keys_and_values_per_token() -> None:
    big, small = load_plan_model("llama-3.1-70b", "t"), load_plan_model("llama-3.1-8b", "t")
    assert kv_per_token(big, 2, 4096) == 320 * 1024
    assert kv_per_token(small, 2, 4096) == 128 * 1024
    latent = load_plan_model("deepseek-v3", "t")
    assert kv_per_token(latent, 2, 4096) == 61 * (512 + 64) * 2


def test_windows_bound_what_a_token_costs() -> None:
    model = load_plan_model("gpt-oss-120b", "t")
    short, long = kv_per_token(model, 2, 128), kv_per_token(model, 2, 131072)
    assert short == 2 * 36 * 2 * 8 * 64
    assert long == pytest.approx(short / 2, rel=0.01)


def test_a_mixture_in_mxfp4_as_published() -> None:
    """gpt-oss-120b: experts in MXFP4, all else in 16 bits: 60.8 GiB in its files, of which a token
    reads its experts and the rest once; eight rows of one text read up to 3.4 times that."""
    found = setup(PlanSettings(target="gpt-oss-120b", device="h100", count=1))
    assert found.quantization.name == "mxfp4"
    assert weight_bytes(found.target, found.quantization) / 2**30 == pytest.approx(60.8, rel=0.005)
    reads = {one["rows"]: one for one in expert_reads(found)}
    assert [one["experts"] for one in reads.values()] == [4.0, 7.9, 15.3, 22.2, 28.7, 51.0]
    dense = 2 * (found.target.head_params + found.target.dense_params)
    one = dense + found.target.expert_params * 4 / 128 * 4.25 / 8
    assert reads[1]["bytes"] == pytest.approx(one) and reads[1]["break_even_tokens"] == 1.0
    more = reads[8]["bytes"] / one
    assert more == pytest.approx(3.37, abs=0.05)
    assert 1.0 < reads[8]["break_even_tokens"] < more, "one row waits for launches"
    cpu = setup(PlanSettings(target="gpt-oss-120b", device="epyc-9654", engine="foretoken"))
    assert list(expert_reads(cpu))[4]["break_even_tokens"] == pytest.approx(more, rel=0.05)
    dense_model = resolve_setup(PlanSettings(target="llama-3.1-8b", quantization="mxfp4"))
    assert dense_model.quantization.dense_bytes(dense_model.target) == 4.25 / 8


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("gpt-oss-120b", "foretoken serve openai/gpt-oss-120b"),
        ("llama-3.1-8b", "# Foretoken does not read mxfp4"),
    ],
)
def test_foretoken_reads_mxfp4_where_it_is_published(target: str, said: str) -> None:
    asked = PlanSettings(target=target, quantization="mxfp4", engine="foretoken", method="ngram")
    plan = build_plan(asked)
    assert plan.commands["foretoken"].startswith(said)


@pytest.mark.parametrize("name", ["demo", "demo-draft"])
def test_agrees_with_the_engine(name: str) -> None:
    shape = ModelShape.from_config(packaged_model(name))
    model = load_plan_model(name, "t")
    assert model.params == shape.parameter_count()
    assert model.kv_elements * 2 == shape.kv_bytes_per_token(2)
    assert model.flops_per_token(512) == shape.flops_per_token(512)
    assert model.tokenizer != ""


SMALL = {
    "vocab_size": 50,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 8192,
}
EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
GROUPED = {
    "n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 24,
    "n_shared_experts": 2, "n_group": 2, "first_k_dense_replace": 1,
}  # fmt: skip
FAMILIES: list[dict[str, Any]] = [
    {"model_type": "llama"},
    {"model_type": "llama", "attention_bias": True, "mlp_bias": True, "head_dim": 24},
    {"model_type": "mistral", "sliding_window": 100},
    {"model_type": "mistral", "sliding_window": None},
    {"model_type": "qwen2"},
    {
        "model_type": "qwen2",
        "use_sliding_window": True,
        "sliding_window": 100,
        "max_window_layers": 4,
    },
    {"model_type": "qwen3"},
    {"model_type": "qwen3", "head_dim": 40, "tie_word_embeddings": True},
    {"model_type": "phi3", "sliding_window": 100},
    {"model_type": "ministral3"},
    {"model_type": "smollm3"},
    {"model_type": "smollm3", "use_sliding_window": True, "sliding_window": 100},
    {"model_type": "olmo2", "attention_bias": True},
    {"model_type": "olmo3", "sliding_window": 100},
    {"model_type": "gemma"},
    {"model_type": "gemma2", "sliding_window": 100},
    {"model_type": "gemma3_text", "sliding_window": 100, "head_dim": 8},
    {"model_type": "mixtral"},
    {"model_type": "qwen2_moe", **EXPERTS},
    {"model_type": "qwen3_moe", **EXPERTS, "decoder_sparse_step": 2},
    {"model_type": "olmoe"},
    {"model_type": "gpt_oss", "sliding_window": 100},
    {"model_type": "granitemoe"},
    {"model_type": "granitemoeshared", "shared_intermediate_size": 40},
    {"model_type": "glm4_moe", **GROUPED, "attention_bias": True},
    {"model_type": "dots1", **GROUPED, "sliding_window": 100},
    {"model_type": "ernie4_5_moe"},
    {"model_type": "hunyuan_v1_moe", "num_experts": 8, "moe_topk": 2},
    {"model_type": "minimax_m2"},
    {"model_type": "hy_v3"},
    {"model_type": "afmoe", "sliding_window": 100},
    {"model_type": "gemma4_text", "sliding_window": 100, "head_dim": 8, "global_head_dim": 24},
    {
        "model_type": "gemma4_text",
        "sliding_window": 100,
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
        "enable_moe_block": True,
        "num_experts": 8,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    {
        "model_type": "gemma4_text",
        "hidden_size_per_layer_input": 8,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 3,
        "use_double_wide_mlp": True,
    },
]


def test_every_family_of_the_engine_is_compared() -> None:
    assert {str(config["model_type"]) for config in FAMILIES} == {
        family.model_type for family in families()
    }


@pytest.mark.parametrize("config", FAMILIES, ids=str)
def test_work_and_sizes_agree_with_the_engine(config: dict[str, Any]) -> None:
    """Heads wider than hidden_size, windows, biases, norms and defaults that config.json omits."""
    config = {**SMALL, **config}
    shape = ModelShape.from_fields(config)
    model = read_config("m", config, family="", tokenizer="")
    for context in (1, 60, 700, 4096):
        assert model.flops_per_token(context) == shape.flops_per_token(context)
    assert model.params == shape.parameter_count()
    assert (model.kv_elements + model.window_elements) * 2 == shape.kv_bytes_per_token(2)
    assert model.matrix_outputs == shape.weight_counts().outputs


def test_attention_of_wide_heads_is_counted() -> None:
    """16 heads of 128 over hidden_size 1024: hidden_size alone would give 1.66 GFLOP."""
    model = load_plan_model("qwen3-0.6b", "t")
    assert model.flops_per_token(4096) / 1e9 == pytest.approx(2.13, abs=0.005)


def test_experts_and_latent_attention_count_what_a_token_uses() -> None:
    windowed, latent = load_plan_model("gpt-oss-120b", "t"), load_plan_model("deepseek-v3", "t")
    weights = 2 * windowed.active_params
    seen = 18 * 4096 + 18 * 128
    assert windowed.flops_per_token(4096) == weights + 4 * seen * 64 * 64
    of_latent = latent.flops_per_token(4096) - 2 * latent.active_params
    assert of_latent == 2 * 61 * 4096 * 128 * (128 + 64 + 128)


def test_a_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    config = known_models()["Qwen/Qwen3-8B"]["config"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    by_file = load_plan_model(str(tmp_path / "config.json"), "t")
    assert by_file.params == load_plan_model(str(tmp_path), "t").params
    assert by_file.params == load_plan_model("Qwen/Qwen3-8B", "t").params


def test_a_missing_size_is_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 8, "num_attention_heads": 2}')
    with pytest.raises(CheckpointError, match=r"num_hidden_layers|vocab_size"):
        load_plan_model(str(tmp_path), "t")


def test_unknown_features_become_notes() -> None:
    config = dict(known_models()["Qwen/Qwen3-8B"]["config"])
    config["layer_types"] = ["linear_attention"] * 3 + ["full_attention"]
    model = read_config("hybrid", config, family="", tokenizer="")
    assert model.kv_elements == 9 * 2 * 8 * 128
    assert any("recurrent" in note for note in model.approximations)


def test_an_unreachable_name_is_asked_for_once_and_lists_what_is_known(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A download would go on asking for most of a minute."""
    import huggingface_hub

    asked = []

    def unreachable(url: str) -> None:
        asked.append(url)
        raise OSError("no network")

    monkeypatch.setattr(huggingface_hub, "get_hf_file_metadata", unreachable)
    with pytest.raises(ModelNotFoundError, match=r"llama-3\.1-70b"):
        load_plan_model("nobody/nothing", "plan.target")
    assert len(asked) == 1


def test_stored_bytes_count_scales_and_wide_tables() -> None:
    model = load_plan_model("llama-3.1-70b", "t")
    four_bit = weight_bytes(model, find_quantization("int4", "q"))
    assert four_bit > 0.5 * model.params * 1.03
    assert four_bit == pytest.approx(39.8e9, rel=0.01), "the size of published AWQ files"
    assert weight_bytes(model, find_quantization("bfloat16", "q")) == 2 * model.params


@pytest.mark.parametrize("name", ["int3", ""])
def test_unknown_quantizations_are_errors(name: str) -> None:
    with pytest.raises(ConfigError, match="int8"):
        find_quantization(name, "quantization")
    with pytest.raises(ConfigError, match="fp8"):
        kv_element_bytes(name, "kv")


def test_every_device_is_plausible_and_sourced() -> None:
    rows = tomllib.loads(resources.files("foretoken.lab.plan").joinpath("devices.toml").read_text())
    for name, device in known_devices().items():
        assert device.source, name
        assert 0.8 < device.memory_bytes / (1e9 * rows[name]["advertised_gb"]) < 1.1, name
        balance = device.flops_for("bf16") / device.bandwidth
        assert 20 < balance < 800, (name, balance)
        assert device.flops_for("fp8") >= device.flops_for("bf16"), name


def test_devices_are_found_by_unique_parts() -> None:
    assert find_device("H200").name == "h200"
    assert find_device("4090").name == "rtx-4090"
    assert find_device("h100").name == "h100-sxm"
    assert find_device("A100").name == "a100-80gb"
    assert find_device("this").memory_bytes > 0
    with pytest.raises(ConfigError, match="h100-sxm"):
        find_device("h1")


TOY = DraftingMethod(
    name="toy",
    summary="a head of a test",
    source="here",
    drafts_with="head",
    code="foretoken.proposers.base",
    own_kv=True,
    extras=(
        MethodPlan(
            usual_drafts=2,
            needs="patience",
            acceptance={"code": (0.5, 0.6), "": (0.1, 0.2)},
            features=1,
        ),
    ),
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A method in the table for the length of a test."""
    monkeypatch.setitem(method_registry._table, TOY.name, TOY)


@pytest.mark.usefixtures("toy")
def test_a_method_of_the_table_is_planned() -> None:
    settings = PlanSettings(
        target="llama-3.1-8b", method="toy", workload="code", engine="foretoken"
    )
    plan = build_plan(settings)
    assert (plan.setup.k, plan.setup.has_weights) == (2, True)
    assert (plan.prediction.acceptance.low, plan.prediction.acceptance.high) == (0.5, 0.6)
    assert plan.speculating.draft_weight_bytes > 0 and plan.speculating.draft_kv_bytes_per_token > 0
    [outlook] = [found for found in plan.outlooks if found.method == "toy"]
    assert (outlook.needs, outlook.available) == ("patience", False)
    assert '"method": "toy"' in plan.commands["foretoken"]
    assert plan.commands["vllm"] == "# vllm does not draft with toy"
    assert plan.commands["llama.cpp"] == "# llama.cpp does not draft with toy"


@pytest.mark.usefixtures("toy")
def test_other_workloads_take_what_stands_for_all() -> None:
    plan = build_plan(PlanSettings(target="llama-3.1-8b", method="toy", workload="chat"))
    assert plan.prediction.acceptance.low == 0.1


def test_what_the_table_says_nothing_of_is_not_planned() -> None:
    assert set(planned_methods()) == {
        "draft_model", "eagle3", "eagle", "mlp", "medusa", "ngram", "suffix", "mtp", "dflash",
        "dspark",
    }  # fmt: skip
    with pytest.raises(ConfigError, match="did you mean 'eagle3'"):
        PlanSettings(target="llama-3.1-8b", method="eagle33")


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_all_drafts_of_a_block_cost_one_pass(method: str) -> None:
    """Fifteen drafts take hardly more drafting than one, where a head that drafts one by one takes
    fifteen passes."""
    block, chain = (
        StepCosts(resolve_setup(PlanSettings(target="qwen3-8b", method=name)))
        for name in (method, "eagle3")
    )
    assert 15 * block.draft(1, 15) < 1.1 * block.draft(1, 1)
    assert 15 * chain.draft(1, 15) == pytest.approx(15 * chain.draft(1, 1))
    assert block.draft(1, 1) > 2 * chain.draft(1, 1), "it has five layers, not one"


def test_a_head_of_a_mixture_has_no_experts() -> None:
    """Counted as layers of the target, five would be six gigabytes; published ones are one."""
    mixture = resolve_setup(PlanSettings(target="qwen3-30b-a3b", method="dflash"))
    assert 0.4e9 < draft_load(mixture).weight_bytes < 1.2e9
    own = resolve_setup(PlanSettings(target="deepseek-v3", method="mtp"))
    assert draft_load(own).weight_bytes > 5e9, "layers of the checkpoint are like its others"


def test_a_rounded_head_is_counted_and_told() -> None:
    def asked(**given: Any) -> SpeculationPlan:
        settings: dict[str, Any] = {
            "target": "qwen3-8b", "device": "epyc-9755", "engine": "foretoken"
        }  # fmt: skip
        return build_plan(PlanSettings(**{**settings, "method": "dspark", **given}))

    plain, rounded = asked(), asked(draft_quantization="int8")
    ratio = rounded.speculating.draft_weight_bytes / plain.speculating.draft_weight_bytes
    assert ratio == pytest.approx(0.5, abs=0.01)
    assert rounded.prediction.at(1).draft_cost < plain.prediction.at(1).draft_cost
    assert '"quantization": "int8"' in rounded.commands["foretoken"]
    assert '"quantization"' not in plain.commands["foretoken"]


@pytest.mark.parametrize("method", ["dflash", "dspark"])
def test_blocks_are_planned_for_every_engine(method: str) -> None:
    plan = build_plan(PlanSettings(target="qwen3-8b", method=method, concurrency=1))
    assert plan.verdict.speculates
    assert f'"method": "{method}"' in plan.commands["vllm"]
    assert f"--spec-type draft-{method} " in plan.commands["llama.cpp"]
    assert f'"method": "{method}"' in plan.commands["foretoken"]
    [outlook] = [found for found in plan.outlooks if found.method == method]
    assert not outlook.available and "trained for exactly this target" in outlook.needs


def test_no_more_drafts_are_proposed_than_a_usual_block_has() -> None:
    def most(**given: Any) -> int:
        return max(load.best_k for load in build_plan(PlanSettings(**given)).prediction.loads)

    math = {"target": "qwen3-8b", "workload": "math", "device": "h200"}
    assert most(**math, method="dspark") == 7 < most(**math, method="dflash") <= 15
    assert most(**math, method="dspark", num_speculative_tokens=16) > 7, "who asks has such a head"


ASKED = PlanSettings(target="llama-3.1-8b", draft="llama-3.2-1b", engine="foretoken",
                     device="epyc-9755")  # fmt: skip
PACKAGED = replace(ASKED, target="demo", draft="demo-draft", context=256, output_tokens=64)


def setup(settings: PlanSettings, **changes: Any) -> Setup:
    return resolve_setup(replace(settings, **changes))


def errors(plan: SpeculationPlan) -> list[str]:
    return [one.check for one in plan.findings if one.level == "error"]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_the_plan_counts_as_the_engine_does(ranks: int) -> None:
    asked = setup(PACKAGED, tensor_parallel_size=ranks)
    found = plan_memory(asked, draft_load(asked))
    counted = []
    for name, count in (("demo", ranks), ("demo-draft", 1)):
        shape = ModelShape.from_config(packaged_model(name))
        model = ModelMemory(shape=shape, ranks=count)
        counted.append((model.weight_bytes(2) + model.copied_bytes(2), model.kv_per_token(2)))
    [(target, kv), (draft, draft_kv)] = counted
    assert found.weight_bytes == pytest.approx(target, rel=0.01)
    assert found.draft_weight_bytes == pytest.approx(draft, rel=0.01)
    assert found.kv_bytes_per_token == kv and found.draft_kv_bytes_per_token == draft_kv
    together = found.fullest_rank_bytes + (ranks - 1) * found.emptiest_rank_bytes
    assert together == pytest.approx(found.weight_bytes + found.draft_weight_bytes)
    assert (found.fullest_rank_bytes > found.emptiest_rank_bytes) == (ranks > 1)


def test_processes_of_one_machine_share_its_memory_and_its_speed() -> None:
    """Each has embeddings and activations of its own; a second socket brings what it has."""
    alone, shared = build_plan(ASKED), build_plan(replace(ASKED, tensor_parallel_size=2))
    both = build_plan(replace(ASKED, count=2))
    assert (shared.setup.tp, shared.setup.devices, both.setup.devices) == (2, 1, 2)
    assert shared.plain.usable_bytes < alone.plain.usable_bytes < both.plain.usable_bytes
    assert alone.plain.weight_bytes < shared.plain.weight_bytes < 1.2 * alone.plain.weight_bytes
    assert shared.plain.tokens < alone.plain.tokens < both.plain.tokens
    steps = [one.prediction.at(1).plain_step_s for one in (both, alone, shared)]
    assert steps == sorted(steps), "exchanges cost time, and bring none back on one socket"
    assert overhead_bytes(shared.setup) > overhead_bytes(alone.setup)
    assert {row["count"] for row in what_fits(shared.setup)} == {1}


def test_drafts_are_made_on_one_rank() -> None:
    own = setup(ASKED, tensor_parallel_size=4)
    head = setup(ASKED, tensor_parallel_size=4, method="eagle3", draft=None)
    assert [one.draft_ranks for one in (own, head)] == [1, 1]
    with pytest.raises(ConfigError, match="draft_tensor_parallel_size"):
        setup(ASKED, tensor_parallel_size=4, draft_tensor_parallel_size=4)


def test_a_head_that_ends_in_the_target_s_own_takes_all_of_it() -> None:
    def more(method: str) -> float:
        asked = setup(ASKED, tensor_parallel_size=2, method=method, draft=None)
        load = draft_load(asked)
        return plan_memory(asked, load).draft_weight_bytes - load.weight_bytes

    assert more("eagle") == 2 * 128256 * 4096 and more("eagle3") == 0


@pytest.mark.parametrize("given", [0, 1])
def test_the_command_says_the_ranks(given: int) -> None:
    plan = build_plan(replace(ASKED, tensor_parallel_size=2, draft_tensor_parallel_size=given))
    assert "--tensor-parallel-size 2" in plan.commands["foretoken"]
    commands = ready_commands(plan.setup, plan.schedule, speculates=True)
    assert "draft_tensor_parallel_size" not in commands["foretoken"]
    assert f'"draft_tensor_parallel_size": {given or 2}' in commands["vllm"]
    alone = build_plan(ASKED).commands["foretoken"]
    assert "tensor" not in alone


@pytest.mark.parametrize(
    ("ranks", "ok"), [(3, True), (8, True), (16, True), (12, False), (64, False)]
)
def test_ranks_share_key_heads_or_have_equal_shares_of_them(ranks: int, ok: bool) -> None:
    """Of 8 key heads and 32 query heads."""
    plan = build_plan(replace(ASKED, draft=None, method="ngram", tensor_parallel_size=ranks))
    assert ("ranks_divide" in errors(plan)) == (not ok)
    launch = f"foretoken serve llama-3.1-8b --tensor-parallel-size {ranks} --spec-method ngram"
    [found] = read_source(launch).launches
    wrong = [one.check for one in check_pair(found, Machine()) if one.level == "error"]
    assert wrong == ([] if ok else ["ranks_divide"])


def test_only_cpus_have_more_ranks_than_devices() -> None:
    for wrong in ({"device": "h100"}, {"engine": "vllm"}):
        with pytest.raises(ConfigError, match="1 to plan.count"):
            setup(ASKED, tensor_parallel_size=2, **wrong)


def test_gpus_have_a_rank_each_with_memory_of_its_own() -> None:
    """The first has all of the draft beside its share; and nobody has tried it."""
    asked = replace(ASKED, device="h100")
    one, two = (build_plan(replace(asked, count=count)) for count in (1, 2))
    assert not errors(two) and "--tensor-parallel-size 2" in two.commands["foretoken"]
    [untried] = [one for one in two.findings if one.check == "several_gpus"]
    assert untried.level == "warning" and "never run on several GPUs" in untried.message
    assert "several_gpus" not in [found.check for found in one.findings]
    found, alone = two.speculating, one.speculating
    assert found.fullest_rank_bytes < alone.fullest_rank_bytes
    more = found.fullest_rank_bytes - found.emptiest_rank_bytes
    assert more == pytest.approx(found.draft_weight_bytes) and more > 0
    table = 2 * setup(asked).target.head_params
    assert found.weight_bytes == pytest.approx(alone.weight_bytes + table)
    assert errors(build_plan(replace(asked, count=3)))[0] == "ranks_divide"
