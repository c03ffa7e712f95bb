"""What could not be read as a whole, or ends in an error, is not reported as fine."""

from pathlib import Path

import pytest
from prometheus_client.core import CounterMetricFamily, HistogramMetricFamily
from prometheus_client.exposition import generate_latest
from prometheus_client.registry import CollectorRegistry
from typer.testing import CliRunner

from foretoken.cli.app import app
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine

ENGINE = """from vllm import LLM
llm = LLM("Qwen/Qwen3-8B", {counters}speculative_config={{"method": "ngram",
          "num_speculative_tokens": 3}})
"""
SERVE = (
    "vllm serve Qwen/Qwen3-8B --per-request-spec-decode-metrics detailed "
    '--speculative-config \'{"method": "ngram", "num_speculative_tokens": 3}\''
)
LOOP = 'for m in llm.get_metrics():\n    if "spec_decode" in m.name:\n        print(m.value)\n'
COUNTING = "disable_log_stats=False, "


def code_of(path: Path, text: str) -> int:
    path.write_text(text)
    result = CliRunner().invoke(app, ["lab", "lint", str(path)])
    assert result.exit_code in (0, 1), result.output
    return result.exit_code


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("loop.py", ENGINE.format(counters=COUNTING) + LOOP, 1),
        ("counters.py", ENGINE.format(counters="") + "print(llm.get_metrics())\n", 1),
        ("keeps.py", ENGINE.format(counters=COUNTING) + "print(llm.get_metrics())\n", 0),
        ("given.py", ENGINE.format(counters="**more, ") + "print(llm.get_metrics())\n", 0),
        ("two.py", f'{ENGINE.format(counters="")}other = LLM("a")\n', 1),
        ("torn.py", ENGINE.format(counters="") + "for x in [1]\n    print(x)\n", 1),
        ("whole.py", ENGINE.format(counters="") + "for x in [1]:\n    print(x)\n", 0),
        ("open.sh", f'{SERVE} &\nvllm serve "Qwen/Qwen3-4B --port 8001\n', 1),
        ("open", f'#!/usr/bin/env bash\n{SERVE} &\nllama-server -m "a.gguf\n', 1),
        ("closed.sh", f"# don't\ncat <<EOF\nit's a text\nEOF\n{SERVE}\n", 0),
        ("open.yaml", "services:\n  a:\n    command: vllm serve m\n   x: [\n", 1),
        ("tagged.yaml", "a:\n  image: vllm/vllm-openai\n  command: !override [--model, m]\n", 0),
        ("chart.yaml", "a:\n  command: vllm serve {{ .Values.model }}\n", 0),
        ("torn.json", '{"model": "m", "speculative_config": {"method": "ngram"\nvllm serve m', 1),
        ("lines.json", '{"prompt": "a"}\n{"prompt": "b"}\n', 0),
    ],
)
def test_a_file_that_ends_in_an_error_fails(
    name: str, text: str, code: int, tmp_path: Path
) -> None:
    assert code_of(tmp_path / name, text) == code


def test_a_page_is_no_script() -> None:
    page = f"We don't know.\n{SERVE}\nfrom vllm import LLM\nand 'so on\n"
    assert all(one.level != "error" for one in lint(read_source(page), Machine()).findings)


class _Exposed:
    """A server of ours, as far as names go."""

    def collect(self) -> list[CounterMetricFamily | HistogramMetricFamily]:
        """Counters whose explanation has their name without `_total`, and a kept histogram."""
        counters = [
            CounterMetricFamily(name, name, value=1.0)
            for name in ("vllm:spec_decode_num_drafts", "vllm:prompt_tokens", "foretoken:steps")
        ]
        name = "vllm:time_per_output_token_seconds"
        return [*counters, HistogramMetricFamily(name, name, buckets=[("+Inf", 1.0)], sum_value=1)]


def test_what_a_server_of_ours_exposes_is_right() -> None:
    registry = CollectorRegistry()
    registry.register(_Exposed())
    text = generate_latest(registry).decode()
    assert "# HELP vllm:spec_decode_num_drafts" in text
    source = read_source(text)
    assert "vllm:spec_decode_num_drafts_total" in source.metrics
    assert not lint(source, Machine()).findings
    vllm = lint(source, Machine(), "vllm").findings
    assert {one.where.partition("_seconds")[0] for one in vllm} == {"vllm:time_per_output_token"}, (
        "vLLM has it no more"
    )


@pytest.mark.parametrize(
    ("words", "loads"),
    [
        ("--quantization awq", True),
        ("--quantization gptq_marlin", True),
        ("--quantization fp8_per_tensor", True),
        ("--quantization bf16", False),
        ("", False),
        ("--quantization compressed-tensors", None),
        ("--quantization $Q", None),
    ],
)
def test_weights_are_as_wide_as_the_launch_says(words: str, loads: bool | None) -> None:
    """70 billion of 16 bits do not fit one device; of 4 or 8 they do. None: nobody knows."""
    text = f"vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 4096 {words}"
    found = {one.check for one in lint(read_source(text), Machine(device="h100-sxm")).findings}
    assert ("kv_budget" in found) == (loads is False)
    assert ("unplanned" in found) == (loads is None)


def test_a_draft_of_few_bits_is_judged_as_one() -> None:
    text = (
        "vllm serve meta-llama/Llama-3.1-70B-Instruct --max-model-len 90000 --quantization awq "
        '--speculative-config \'{"model": "meta-llama/Llama-3.1-8B-Instruct", '
        '"num_speculative_tokens": 3%s}\''
    )
    machine = Machine(device="rtx-pro-6000")
    checks = [
        {one.check for one in lint(read_source(text % more), machine).findings}
        for more in ("", ', "quantization": "awq"')
    ]
    assert "kv_budget" in checks[0] and "kv_budget" not in checks[1]


def test_a_draft_that_is_translated_may_have_another_vocabulary() -> None:
    text = (
        'vllm serve meta-llama/Llama-3.1-8B-Instruct --speculative-config \'{"model": '
        '"Qwen/Qwen3-0.6B", "num_speculative_tokens": 3%s}\''
    )
    alone, told = (
        {one.check for one in lint(read_source(text % more), Machine()).findings}
        for more in ("", ', "method": "draft_model", "use_heterogeneous_vocab": true')
    )
    assert "same_tokenizer" in alone and "same_tokenizer" not in told
