"""vLLM's offline engine on a CPU as a worker of `peers.py`; `peers.py` sets its environment."""

import torch
import vllm
from protocol import Generated, Job, Loaded, serve
from vllm import LLM, SamplingParams


def load(job: Job) -> Loaded:
    """An LLM in bfloat16, no prefix cache."""
    speculative: dict[str, object] = {
        "method": job.method,
        "num_speculative_tokens": job.k,
    }
    if job.method == "ngram":
        speculative |= {"prompt_lookup_max": 3, "prompt_lookup_min": 2}
    if job.draft:
        speculative["model"] = job.draft
    llm = LLM(
        model=job.target,
        dtype="bfloat16",
        max_model_len=job.max_model_len,
        max_num_seqs=job.batch,
        enforce_eager=job.setting["eager"] == "on",
        enable_prefix_caching=False,
        disable_log_stats=False,  # It tells when first tokens came.
        speculative_config=speculative if job.method else None,
    )

    def generate(prompts: list[list[int]], tokens: int, k: int) -> Generated:
        assert k == job.k, (k, job.k)
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(asked, params, use_tqdm=False)
        first_s = max(result.metrics.first_token_latency for result in results)
        return Generated([list(result.outputs[0].token_ids) for result in results], first_s)

    return Loaded({"vllm": vllm.__version__, "torch": torch.__version__}, generate)


if __name__ == "__main__":
    serve(load)
