"""Foretoken as a worker of `peers.py`; `option` is batch_invariant: auto, on or off."""

import torch
from protocol import Job, Loaded, serve

from foretoken import LLM, SamplingParams, __version__

INVARIANT: dict[str | None, bool | str] = {None: "auto", "auto": "auto", "on": True, "off": False}


def load(job: Job) -> Loaded:
    """An LLM for one sequence, bfloat16, no prefix cache."""
    torch.set_num_threads(job.threads)
    speculative = {"method": job.method, "num_speculative_tokens": job.num_drafts}
    if job.draft:
        speculative["model"] = job.draft
    llm = LLM(
        job.target,
        dtype="bfloat16",
        max_model_len=job.max_model_len,
        max_num_seqs=1,
        enable_prefix_caching=False,
        batch_invariant=INVARIANT[job.option],
        speculative_config=speculative if job.method else None,
    )

    def generate(prompt: list[int], tokens: int) -> list[int]:
        params = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        [result] = llm.generate([{"prompt_token_ids": prompt}], params, use_tqdm=False)
        return list(result.outputs[0].token_ids)

    return Loaded({"foretoken": __version__, "torch": torch.__version__}, generate)


if __name__ == "__main__":
    serve(load)
