"""An engine in a process of its own, in its own virtual environment, as `peers.py` asks it.

    python workers/run.py ENGINE JOB

One JSON document per line. The worker is given a Job, answers with its versions once loaded, then
answers every {"prompts": lists of ids, "tokens": n, "k": drafts or null} with the seconds it took,
those up to the last prompt's first token, and the new ids of each. Whatever the engine prints goes
to standard error. Imports an engine only where it is loaded.
"""

import atexit
import ctypes
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

SIGNAL_AT_PARENTS_DEATH = 1
"""PR_SET_PDEATHSIG of Linux's prctl."""
SCHEMES = {"16 bit": None, "int8": "int8", "int4": "int4"}
START_S = 120.0


@dataclass(frozen=True)
class Job:
    """What to load: a target, a draft if it is to speculate, and how it is tuned."""

    target: str
    draft: str | None
    max_model_len: int
    weights: str = "16 bit"
    """Of the target: "16 bit", "int8" or "int4"; peers are given files that have them already."""
    batch: int = 1
    """Most prompts at once; OpenVINO, llama.cpp and ONNX Runtime are asked one at a time."""
    setting: dict[str, Any] = field(default_factory=dict)
    """A value for each axis that `peer_cases.py` has for the engine."""

    @property
    def k(self) -> int:
        """Drafts at a time; 0 without."""
        return int(self.setting.get("k", 0))

    @property
    def threads(self) -> int:
        return int(self.setting["threads"])


Generated = tuple[list[list[int]], float]
"""New greedy ids of each prompt, and seconds to the first token of the prompt that got it last."""
Generate = Callable[[list[list[int]], int, int], Generated]
"""Of prompts, so many new tokens, so many drafts at a time."""
Loaded = tuple[dict[str, str], Generate]
"""Versions, and an engine ready to work."""


def one_by_one(generate: Callable[[list[int], int, int], tuple[list[int], float]]) -> Generate:
    """Of an engine that takes a prompt at a time, and there is only one."""

    def generate_one(prompts: list[list[int]], tokens: int, k: int) -> Generated:
        [prompt] = prompts
        ids, first_s = generate(prompt, tokens, k)
        return [ids], first_s

    return generate_one


def foretoken(job: Job) -> Loaded:
    """In bfloat16 or with the job's quantization, no prefix cache."""
    import torch

    from foretoken import LLM, SamplingParams, __version__

    torch.set_num_threads(job.threads)
    speculative = {"method": "draft_model", "model": job.draft, "num_speculative_tokens": job.k}
    if job.draft:
        speculative["quantization"] = SCHEMES[job.setting["draft"]]
    llm = LLM(
        job.target,
        dtype="bfloat16",
        max_model_len=job.max_model_len,
        max_num_seqs=job.batch,
        quantization=SCHEMES[job.weights],
        activations=job.setting.get("activations", "auto"),
        enable_prefix_caching=False,
        speculative_config=speculative if job.draft else None,
        adaptive_speculation=False,
    )

    def generate(prompts: list[list[int]], tokens: int, k: int) -> Generated:
        limit = {"num_speculative_tokens": k} if job.draft else None
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True,
                                detokenize=False, speculation=limit)  # fmt: skip
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        outputs = [one.outputs[0] for one in llm.generate(asked, params, use_tqdm=False)]
        first_s = max(output.metrics.first_token_s for output in outputs if output.metrics)
        return [list(output.token_ids) for output in outputs], first_s

    return {"foretoken": __version__, "torch": torch.__version__}, generate


def vllm(job: Job) -> Loaded:
    """Its offline engine on a CPU in bfloat16, no prefix cache."""
    import torch
    import vllm

    speculative = {"method": "draft_model", "model": job.draft, "num_speculative_tokens": job.k}
    llm = vllm.LLM(
        model=job.target,
        dtype="bfloat16",
        max_model_len=job.max_model_len,
        max_num_seqs=job.batch,
        enforce_eager=job.setting["eager"] == "on",
        enable_prefix_caching=False,
        disable_log_stats=False,  # It tells when first tokens came.
        speculative_config=speculative if job.draft else None,
    )

    def generate(prompts: list[list[int]], tokens: int, k: int) -> Generated:
        assert k == job.k, (k, job.k)
        params = vllm.SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(asked, params, use_tqdm=False)
        first_s = max(result.metrics.first_token_latency for result in results)
        return [list(result.outputs[0].token_ids) for result in results], first_s

    return {"vllm": vllm.__version__, "torch": torch.__version__}, generate


def openvino(job: Job) -> Loaded:
    """A GenAI pipeline on the CPU with its draft, its prefix cache off; what the setting
    leaves at "default" its plugin decides."""
    import numpy as np
    import openvino
    import openvino_genai as genai

    device: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": job.threads,
        "ENABLE_CPU_PINNING": job.setting["pinning"] == "on",
        "KV_CACHE_PRECISION": job.setting["kv_cache"],
    }
    group = job.setting.get("dynamic_quantization", "default")
    if group != "default":
        device["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
    settings = {**device, "ATTENTION_BACKEND": job.setting.get("backend", "PA")}
    if settings["ATTENTION_BACKEND"] == "PA":
        scheduler = genai.SchedulerConfig()
        scheduler.enable_prefix_caching, scheduler.cache_size = False, 1
        scheduler.max_num_batched_tokens = job.max_model_len
        scheduler.dynamic_split_fuse = job.setting["split_fuse"] == "on"
        settings["scheduler_config"] = scheduler
    if job.draft:
        settings["draft_model"] = genai.draft_model(job.draft, "CPU", **device)
    pipeline = genai.LLMPipeline(job.target, "CPU", **settings)

    class FirstToken(genai.StreamerBase):
        """Keeps the moment of the first token."""

        at_s: float | None = None

        def write(self, token: object) -> Any:
            self.at_s = self.at_s or time.perf_counter()
            return genai.StreamingStatus.RUNNING

        def end(self) -> None:
            """Nothing is kept back."""

    def generate(prompt: list[int], tokens: int, k: int) -> tuple[list[int], float]:
        config = genai.GenerationConfig()
        config.max_new_tokens, config.do_sample, config.ignore_eos = tokens, False, True
        config.apply_chat_template = False
        if job.draft:
            config.num_assistant_tokens = k
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        first, began = FirstToken(), time.perf_counter()
        found = list(pipeline.generate(ids, config, first).tokens[0])
        return found, (first.at_s or time.perf_counter()) - began

    versions = {"openvino": openvino.__version__, "openvino_genai": genai.__version__}
    return versions, one_by_one(generate)


def onnxruntime(job: Job) -> Loaded:
    """ONNX Runtime GenAI, which drafts nothing; models are folders that its builder has made."""
    import onnxruntime_genai as genai

    assert job.draft is None, job.draft
    config = genai.Config(job.target)
    options = {"session_options": {"intra_op_num_threads": job.threads}}
    config.overlay(json.dumps({"model": {"decoder": options}}))
    model = genai.Model(config)

    def generate(prompt: list[int], tokens: int, k: int) -> tuple[list[int], float]:
        params = genai.GeneratorParams(model)
        length = len(prompt) + tokens
        params.set_search_options(max_length=length, min_length=length, do_sample=False)
        began = time.perf_counter()
        generator = genai.Generator(model, params)
        generator.append_tokens(prompt)
        generator.generate_next_token()
        first_s = time.perf_counter() - began
        for _ in range(tokens - 1):
            generator.generate_next_token()
        return [int(i) for i in generator.get_sequence(0)[len(prompt) :]], first_s

    return {"onnxruntime_genai": genai.__version__}, one_by_one(generate)


def llama_cpp(job: Job) -> Loaded:
    """Its server, asked over loopback, nothing cached; LLAMA_SERVER is its program. A build keeps
    back the end of a stream whose bytes are no text, so fewer ids may come than were made."""
    program = os.environ["LLAMA_SERVER"]
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    words = [program, "-m", job.target, "--port", str(port), "-t", str(job.threads)]
    words += ["-c", str(job.max_model_len), "-np", "1", "--device", "none", "--no-webui"]
    words += ["--poll", str(job.setting["poll"])]
    if job.draft:
        words += ["--spec-type", "draft-simple", "--spec-draft-n-max", str(job.k)]
        if job.setting["draft_poll"] != "as poll":
            words += ["--spec-draft-poll", str(job.setting["draft_poll"])]
        words += ["--spec-draft-device", "none", "--spec-draft-model", job.draft]
    process = subprocess.Popen(words, preexec_fn=end_with_parent)
    atexit.register(process.kill)
    url, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    while not _answers(f"{url}/health"):
        if process.poll() is not None or time.monotonic() > until:
            raise SystemExit("llama.cpp's server did not start")
        time.sleep(0.02)

    def generate(prompt: list[int], tokens: int, k: int) -> tuple[list[int], float]:
        assert k == job.k, (k, job.k)
        body = {"prompt": prompt, "n_predict": tokens, "temperature": 0.0, "ignore_eos": True,
                "cache_prompt": False, "stream": True, "return_tokens": True}  # fmt: skip
        request = urllib.request.Request(f"{url}/completion", json.dumps(body).encode())
        found: list[int] = []
        first_s = 0.0
        with urllib.request.urlopen(request, timeout=600) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    event = json.loads(line[6:])
                    found += event.get("tokens") or []
                    # Its own clock: a first token that is half a character is not streamed.
                    first_s = event.get("timings", {}).get("prompt_ms", 0.0) / 1e3 or first_s
        return found, first_s

    version = subprocess.run([program, "--version"], capture_output=True, text=True).stderr
    return {"llama.cpp": " ".join(version.split("\n")[0].split())}, one_by_one(generate)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def end_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends: a killed benchmark would leave
    engines that finish what they were asked, and take the processor from what is measured next."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(SIGNAL_AT_PARENTS_DEATH, signal.SIGKILL)


ENGINES: dict[str, Callable[[Job], Loaded]] = {
    "foretoken": foretoken,
    "vllm": vllm,
    "openvino": openvino,
    "onnxruntime": onnxruntime,
    "llama-cpp": llama_cpp,
}


def main(engine: str, job: str) -> None:
    """Load the engine of the command line and answer until standard input ends."""
    end_with_parent()
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    own = Job(**json.loads(job))
    versions, generate = ENGINES[engine](own)
    print(json.dumps(versions), file=answers)
    for line in sys.stdin:
        request = json.loads(line)
        k = own.k if request["k"] is None else request["k"]
        began = time.perf_counter()
        found, first_s = generate(request["prompts"], request["tokens"], k)
        seconds = time.perf_counter() - began
        ids = [[int(i) for i in one] for one in found]
        answer = {"seconds": seconds, "first_s": first_s, "token_ids": ids}
        print(json.dumps(answer), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:])
