"""OpenVINO GenAI as a worker of `peers.py`.

Models are folders that `peers.py` has converted. Its prefix cache is turned off, since a repeated
prompt would skip its prefill. What the setting leaves at "default" its CPU plugin decides.
"""

import time
from typing import Any

import numpy as np
import openvino
import openvino_genai as genai
from protocol import Job, Loaded, one_by_one, serve


class FirstToken(genai.StreamerBase):
    """Sees tokens as they come and keeps the moment of the first."""

    def __init__(self) -> None:
        """None came yet."""
        super().__init__()
        self.at_s: float | None = None

    def write(self, token: object) -> genai.StreamingStatus:
        """One token, or those of a verification."""
        if self.at_s is None:
            self.at_s = time.perf_counter()
        return genai.StreamingStatus.RUNNING

    def end(self) -> None:
        """Nothing is kept back."""


def _scheduler(job: Job) -> genai.SchedulerConfig:
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = job.max_model_len
    scheduler.cache_size = 1
    scheduler.dynamic_split_fuse = job.setting["split_fuse"] == "on"
    return scheduler


def _device(job: Job) -> dict[str, Any]:
    """Properties of the CPU plugin, for target and draft alike."""
    found: dict[str, Any] = {
        "INFERENCE_NUM_THREADS": job.threads,
        "ENABLE_CPU_PINNING": job.setting["pinning"] == "on",
        "KV_CACHE_PRECISION": job.setting["kv_cache"],
    }
    group = job.setting.get("dynamic_quantization", "default")
    if group != "default":
        found["DYNAMIC_QUANTIZATION_GROUP_SIZE"] = group
    return found


def load(job: Job) -> Loaded:
    """A pipeline on the CPU with its draft or look-up."""
    device = _device(job)
    backend = job.setting.get("backend", "PA")
    settings: dict[str, Any] = {**device, "ATTENTION_BACKEND": backend}
    if backend == "PA":
        settings["scheduler_config"] = _scheduler(job)
    if job.method == "draft_model":
        settings["draft_model"] = genai.draft_model(job.draft, "CPU", **device)
    elif job.method == "ngram":
        settings["prompt_lookup"] = True
    pipeline = genai.LLMPipeline(job.target, "CPU", **settings)

    def generate(prompt: list[int], tokens: int, k: int) -> tuple[list[int], float]:
        config = genai.GenerationConfig()
        config.max_new_tokens = tokens
        config.do_sample = False
        config.ignore_eos = True
        config.apply_chat_template = False
        if job.method:
            config.num_assistant_tokens = k
        if job.method == "ngram":
            config.max_ngram_size = 3
        ids = openvino.Tensor(np.array([prompt], dtype=np.int64))
        first, began = FirstToken(), time.perf_counter()
        found = list(pipeline.generate(ids, config, first).tokens[0])
        return found, (first.at_s or time.perf_counter()) - began

    versions = {"openvino": openvino.__version__, "openvino_genai": genai.__version__}
    return Loaded(versions, one_by_one(generate))


if __name__ == "__main__":
    serve(load)
