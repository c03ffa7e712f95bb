"""The share of memory that SGLang and TensorRT-LLM set apart is held against a device."""

import re

import pytest

from foretoken.lab.findings import Finding
from foretoken.lab.launch.sources import read_source
from foretoken.lab.lint.checks import lint
from foretoken.lab.lint.fit import Machine
from foretoken.lab.lint.shares import SHARE_CHECK

SGLANG = "python -m sglang.launch_server --model-path meta-llama/Llama-3.1-70B-Instruct --tp 4 "
DRAFT = (
    "--speculative-algorithm STANDALONE --speculative-num-steps 4 --speculative-eagle-topk 1 "
    "--speculative-draft-model-path meta-llama/Llama-3.1-8B-Instruct "
    "--speculative-num-draft-tokens {verified} "
)
TENSORRT = "trtllm-serve meta-llama/Llama-3.1-70B-Instruct --tp_size 4 --max_seq_len 131072 "


def found(text: str, device: str | None = "h100-sxm", count: int = 4) -> list[Finding]:
    result = lint(read_source(text), Machine(device=device, count=count), "auto")
    return [one for one in result.findings if one.check in (SHARE_CHECK, "kv_budget")]


def sglang(share: float, verified: int = 5, more: str = "--context-length 4096") -> str:
    draft = DRAFT.format(verified=verified) if verified else ""
    return f"{SGLANG}{draft}--mem-fraction-static {share} {more}"


@pytest.mark.slow
def test_the_draft_of_sglang_has_to_fit_beside_the_share() -> None:
    [problem] = found(sglang(0.9))
    assert problem.level == "warning" and "draft weights" in problem.message
    assert "the draft's cache" in problem.message
    advised = float(problem.remedy.split()[-1])
    assert 0.5 < advised < 0.9
    assert not found(sglang(advised)), "what is advised is accepted"
    assert found(sglang(round(advised + 0.02, 2)))
    assert not found(sglang(0.9, verified=0)), "without a draft the rest is enough"
    assert not found(sglang(0.9), device=None)


def test_a_share_below_the_weights_holds_no_request() -> None:
    [problem] = found(sglang(0.4))
    assert problem.level == "error" and "not one request of 4,096 tokens" in problem.message
    assert not found(sglang(float(problem.remedy.split()[-1])))


@pytest.mark.slow
def test_every_row_that_is_verified_has_logits() -> None:
    few, many = (
        float(re.search(r"([\d.]+) GB logits", found(sglang(0.9, verified))[0].message)[1])  # type: ignore[index]
        for verified in (5, 50)
    )
    assert many == pytest.approx(48 * 50 * 128256 * 4 / 1e9, abs=0.06) and few < many / 5
    more = "--context-length 4096 --max-running-requests 480"
    assert "2,400 rows" in found(sglang(0.9, 5, more))[0].message


def test_what_loads_with_no_share_is_an_error_of_its_own() -> None:
    text = sglang(0.9).replace("--tp 4", "--tp 1")
    assert [one.check for one in found(text, count=1)] == ["kv_budget"]


def test_the_share_of_tensorrt_is_of_what_weights_leave() -> None:
    flag = "--kv_cache_free_gpu_memory_fraction"
    [problem] = found(f"{TENSORRT}{flag} 0.01")
    assert problem.level == "error" and problem.where == flag
    assert "not one request of 131,072" in problem.message
    assert not found(f"{TENSORRT}{flag} {problem.remedy.split()[0]}")
    assert not found(f"{TENSORRT}{flag} 0.9")


@pytest.mark.parametrize(
    "text",
    [
        "from tensorrt_llm import LLM\nllm = LLM(model='meta-llama/Llama-3.1-70B-Instruct', "
        "tensor_parallel_size=4, max_seq_len=131072, "
        "kv_cache_config=KvCacheConfig(free_gpu_memory_fraction=0.01))",
        "model: meta-llama/Llama-3.1-70B-Instruct\ntensor_parallel_size: 4\n"
        "max_seq_len: 131072\nspeculative_config:\n  decoding_type: NGram\n"
        "  max_draft_len: 3\nkv_cache_config:\n  free_gpu_memory_fraction: 0.01\n",
    ],
)
def test_settings_and_scripts_of_tensorrt_are_read(text: str) -> None:
    [problem] = found(text)
    assert problem.where == "kv_cache_config.free_gpu_memory_fraction"
    assert not found(text.replace("0.01", "0.9"))
