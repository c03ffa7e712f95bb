"""Foretoken as a worker of `peers.py`; `option` is batch_invariant: auto, on or off."""

import torch
from protocol import Job, Loaded, serve

from foretoken import LLM, SamplingParams, __version__

INVARIANT: dict[str | None, bool | str] = {None: "auto", "auto": "auto", "on": True, "off": False}


def load(job: Job) -> Loaded:
    """An LLM in bfloat16 or with the job's quantization, no prefix cache."""
    torch.set_num_threads(job.threads)
    speculative = {"method": job.method, "num_speculative_tokens": job.num_drafts}
    if job.draft:
        speculative |= {"model": job.draft, "quantization": job.draft_quantization}
    llm = LLM(
        job.target,
        dtype="bfloat16",
        max_model_len=job.max_model_len,
        max_num_seqs=job.batch,
        quantization=job.quantization,
        enable_prefix_caching=False,
        batch_invariant=INVARIANT[job.option],
        speculative_config=speculative if job.method else None,
    )

    def generate(prompts: list[list[int]], tokens: int) -> list[list[int]]:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        results = llm.generate(asked, params, use_tqdm=False)
        return [list(result.outputs[0].token_ids) for result in results]

    return Loaded({"foretoken": __version__, "torch": torch.__version__}, generate)


if __name__ == "__main__":
    serve(load)
