"""Foretoken as a worker of `peers.py`."""

import torch
from protocol import Generated, Job, Loaded, serve

from foretoken import LLM, SamplingParams, __version__

SCHEMES = {"16 bit": None, "int8": "int8", "int4": "int4"}


def load(job: Job) -> Loaded:
    """An LLM in bfloat16 or with the job's quantization, no prefix cache."""
    torch.set_num_threads(job.threads)
    speculative = {"method": job.method, "num_speculative_tokens": job.k}
    if job.draft:
        scheme = SCHEMES[job.setting["draft"]]
        speculative |= {"model": job.draft, "quantization": scheme}
    # Named only where it is asked for: other versions have no such mode.
    activations = job.setting.get("activations")
    mode = {"activations": activations} if activations else {}
    llm = LLM(
        job.target,
        dtype="bfloat16",
        max_model_len=job.max_model_len,
        max_num_seqs=job.batch,
        quantization=SCHEMES[job.weights],
        enable_prefix_caching=False,
        speculative_config=speculative if job.method else None,
        adaptive_speculation=False,
        **mode,
    )

    def generate(prompts: list[list[int]], tokens: int, k: int) -> Generated:
        params = SamplingParams(
            temperature=0.0,
            max_tokens=tokens,
            ignore_eos=True,
            detokenize=False,
            speculation={"num_speculative_tokens": k} if job.method else None,
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(asked, params, use_tqdm=False)
        outputs = [result.outputs[0] for result in results]
        first_s = max(output.metrics.first_token_s for output in outputs if output.metrics)
        return Generated([list(output.token_ids) for output in outputs], first_s)

    return Loaded({"foretoken": __version__, "torch": torch.__version__}, generate)


if __name__ == "__main__":
    serve(load)
