"""Every name of the table of other engines, through `LLM`, `foretoken serve` and the linter.

Those of vLLM's current release are taken as what they mean here; all others are answered with what
to type: three times the same.
"""

import json
import shlex
from collections.abc import Callable
from typing import Any

import pytest
import typer

from foretoken.cli.app import app
from foretoken.cli.lab.lint import own_parser
from foretoken.cli.serve import served, settings_of
from foretoken.cli.serve_options import other_settings
from foretoken.config import EngineConfig
from foretoken.config.method_registry import built_methods, find_method
from foretoken.config.other_engines import OtherName, find_other, other_names
from foretoken.engine.metrics import EngineMetrics
from foretoken.errors import ConfigError, NotYetError
from foretoken.lab.launch.read import read_source
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine

VALUES: dict[str, object] = {
    "method": "ngram",
    "model": "demo-draft",
    "num_speculative_tokens": 3,
    "revision": "main",
    "quantization": "int8",
    "kv_cache_dtype": "int8",
    "max_model_len": 64,
    "draft_tensor_parallel_size": 1,
    "disable_padded_drafter_batch": True,
    "disable_by_batch_size": 8,
    "choices": [[0], [0, 0]],
    "tree_top_k": 2,
    "tree_depth": 3,
    "min_speculative_tokens": 2,
    "draft_confidence_threshold": 0.5,
    "draft_sample_method": "greedy",
    "rejection_sample_method": "standard",
    "posterior_threshold": 0.05,
    "posterior_alpha": 0.2,
    "prompt_lookup_max": 6,
    "prompt_lookup_min": 1,
    "synthetic_acceptance_length": 2.0,
    "synthetic_acceptance_rates": [0.5, 0.5, 0.5, 0.5, 0.5],
    "num_speculative_tokens_per_batch_size": [[1, 8, 3]],
    "moe_backend": "auto",
    "attention_backend": "auto",
    "fly_entropy_threshold": 0.3,
    "fly_entropy_top_k": 3,
    "suffix_decoding_max_tree_depth": 8,
    "suffix_decoding_max_cached_requests": 8,
    "suffix_decoding_max_spec_factor": 1.5,
    "suffix_decoding_min_token_prob": 0.2,
}
"""A value for each key; False or None for those that are not here."""
NEUTRAL_NONE = (
    "draft_load_config",
    "code_revision",
    "fly_window_size",
    "draft_lm_head_quantization",
)
ROOT: Any = typer.main.get_command(app)
PARSE = own_parser(ROOT)

SHORT = ("spec_method", "spec_model", "spec_tokens")
LINT = "; `foretoken lab lint 'COMMAND'` translates the words of other engines"

Outcome = tuple[str, Any]
"""`taken` with the configuration, or `answered` with what to type."""


def base(key: str) -> dict[str, Any]:
    """The speculative config that a key needs beside it."""
    if key == "method":
        return {}
    if key == "model":
        return {"num_speculative_tokens": 4}
    found: dict[str, Any] = {"model": "demo-draft", "method": "draft_model"}
    if key.startswith(("prompt_lookup", "suffix")):
        found = {"method": "ngram" if key.startswith("prompt") else "suffix"}
    if key.startswith("posterior"):
        found["rejection_sample_method"] = "typical"
    if key.startswith("synthetic"):
        found["rejection_sample_method"] = "synthetic"
    if key == "tree_depth":
        found["tree_top_k"] = 2
    return found


def value_for(key: str | None) -> object:
    if key in NEUTRAL_NONE:
        return None
    return VALUES.get(key or "", False)


def outcome(make: Callable[[], EngineConfig]) -> Outcome:
    try:
        return "taken", make()
    except ConfigError as error:
        return "answered", error.allowed


def through_llm(keywords: dict[str, Any]) -> Outcome:
    return outcome(lambda: EngineConfig.from_kwargs(model="demo", **keywords))


def through_serve(words: list[str]) -> Outcome:
    def make() -> EngineConfig:
        made = ROOT.commands["serve"].make_context("serve", ["demo", *words])
        return served(settings_of(made.params, other_settings(made)))[0]

    return outcome(make)


def through_lint(words: list[str]) -> Outcome:
    text = shlex.join(["foretoken", "serve", "demo", *words])
    [verdict] = lint(read_source(text), Machine(), own=PARSE).launches
    [finding] = verdict.findings
    return ("answered", finding.remedy) if finding.level == "error" else ("taken", finding.message)


def typed(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def rows(kind: str) -> list[OtherName]:
    return [row for row in other_names() if row.kind == kind]


def is_taken(row: OtherName) -> bool:
    """Whether a flag or a key is taken: it is ours too, or vLLM's of today."""
    ours = row.key in (None, row.name) if row.kind == "keys" else row.engine == "vllm"
    return ours and not row.say and (row.kind == "keys" or not row.gone)


def instead(row: OtherName, value: object) -> str:
    """What is said in place of a name that is not taken: our key with our value."""
    assert row.key is not None
    ours = value
    if isinstance(value, bool):
        ours = row.values.get(str(value).lower(), value)
    if row.key == "method":
        ours = "ngram"
    return json.dumps({row.key: ours})


@pytest.mark.parametrize("row", rows("flags"), ids=lambda row: f"{row.engine}:{row.name}")
def test_every_flag(row: OtherName) -> None:
    if row.name == "speculative_config":
        return
    config, value = base(row.key or ""), value_for(row.key)
    keywords = {row.name: value} | ({"speculative_config": config} if config else {})
    words = ["--speculative-config", json.dumps(config)] if config else []
    words += [f"--{row.name.replace('_', '-')}", typed(value)]
    offline, served = through_llm(keywords), through_serve(words)
    own_option = row.name == "per_request_spec_decode_metrics" or row.name in SHORT
    if is_taken(row):
        assert offline == through_llm({"speculative_config": config | {str(row.key): value}})
    elif row.say:
        assert offline == ("answered", row.say)
        assert own_option or served == offline
    else:
        pair, lint = instead(row, value), "" if row.key == row.name else LINT
        assert offline == ("answered", f"speculative_config={pair}{lint}")
        assert served == ("answered", f"--speculative-config '{pair}'{lint}")
    linted = through_lint(words)
    if not own_option:
        assert linted == (served[0], served[1].removesuffix(LINT)) or served[0] == "taken", linted


@pytest.mark.parametrize("row", rows("keys"), ids=lambda row: f"{row.engine}:{row.name}")
def test_every_key(row: OtherName) -> None:
    key = row.key or row.name
    value = value_for(None if row.say else key)
    config = base(key) | {row.name: value}
    words = ["--speculative-config", json.dumps(config)]
    offline = through_llm({"speculative_config": config})
    assert offline[0] == ("taken" if is_taken(row) else "answered"), offline
    if not is_taken(row):
        assert offline[1] == (row.say or instead(row, value)[1:-1] + LINT)
    assert through_serve(words) == offline
    assert through_lint(words)[0] == offline[0]


@pytest.mark.parametrize("row", rows("methods"), ids=lambda row: f"{row.engine}:{row.name}")
def test_every_method(row: OtherName) -> None:
    config = {"method": row.name, "model": "demo-draft", "num_speculative_tokens": 3}
    ours = row.method or row.name
    if ours in ("ngram", "suffix", "auto"):
        del config["model"]
    if row.name == "custom_class":
        config["model"] = "package.module.Class"
    offline = through_llm({"speculative_config": config})
    built = ours == "auto" or any(ours in (one.name, *one.aliases) for one in built_methods())
    if row.say:
        assert offline == ("answered", row.say)
    elif not built:
        with pytest.raises(NotYetError):
            find_method(ours)
        assert offline[0] == "answered" and "is not yet built" in offline[1]
    elif ours == row.name or (row.engine == "vllm" and not row.gone):
        assert offline[0] == "taken", offline
    else:
        assert offline == ("answered", ours + LINT)
    words = ["--speculative-config", json.dumps(config)]
    assert through_serve(words) == offline
    assert through_lint(words)[0] == offline[0]


def test_vllms_counters_of_speculation_have_its_names_here() -> None:
    ours = {metric.name for metric in EngineMetrics("m", log_stats=False).read()}
    counted = ("drafts", "draft_tokens", "accepted_tokens", "accepted_tokens_per_pos")
    assert {f"vllm:spec_decode_num_{name}" for name in counted} <= ours


def test_names_are_found_however_they_are_written() -> None:
    for name in ("draft-max", "draft_max", "DRAFT_MAX"):
        row = find_other("flags", name)
        assert row is not None and row.key == "num_speculative_tokens"
    lookahead = find_other("methods", "Lookahead"), find_other("methods", "LOOKAHEAD")
    assert [row.engine for row in lookahead if row] == ["tensorrt-llm", "sglang"]


@pytest.mark.parametrize(
    ("words", "answer"),
    [
        (["--nonsense", "5"], "`foretoken lab lint 'COMMAND'`"),
        (["--max-num-sqs", "5"], "--max-num-seqs, or another option"),
        (["--model", "other"], "nothing beside the model 'demo'; a draft model is --spec-model"),
        (["--trust-remote-code"], "left out (not yet built)"),
        (["--prompt-lookup-max", "4"], "--speculative-config '{\"prompt_lookup_max\": 4}'"),
        (["-md", "demo-draft"], '--speculative-config \'{"model": "demo-draft"}\''),
    ],
)
def test_serve_answers(words: list[str], answer: str) -> None:
    found = through_serve(words)
    assert found[0] == "answered" and answer in found[1], found


def test_serve_takes_vllms_dotted_keys_and_the_model_as_an_option() -> None:
    words = ["--speculative-config.method", "ngram", "--speculative-config.prompt_lookup_max=4"]
    expected = through_llm({"speculative_config": {"method": "ngram", "prompt_lookup_max": 4}})
    assert through_serve(words) == expected
    made = ROOT.commands["serve"].make_context("serve", ["--model", "demo"])
    assert served(settings_of(made.params, other_settings(made)))[0].model == "demo"
