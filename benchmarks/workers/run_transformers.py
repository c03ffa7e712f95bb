"""transformers' generate() as a worker of `peers.py`: assisted generation and prompt look-up.

The number of drafts is held constant and no draft is cut for lack of confidence, so that the
work is the same as everyone's; its default schedule is slower on these models.
"""

import time

import torch
import transformers
from protocol import Job, Loaded, one_by_one, serve
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer


class FirstToken(BaseStreamer):
    """Keeps the moments at which the prompt and then new tokens are put."""

    def __init__(self) -> None:
        """Nothing was put yet."""
        self.times_s: list[float] = []

    def put(self, value: object) -> None:
        """The prompt first, then one token or those of a verification."""
        self.times_s.append(time.perf_counter())

    def end(self) -> None:
        """Nothing is kept back."""


def _model(folder: str) -> torch.nn.Module:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
    model.generation_config.eos_token_id = None
    model.generation_config.pad_token_id = 0
    return model


def load(job: Job) -> Loaded:
    """The target in bfloat16 and what it drafts with."""
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(job.threads)
    target = _model(job.target)
    options: dict[str, object] = {}
    if job.method == "draft_model":
        assert job.draft is not None, "draft_model without a draft"
        draft = _model(job.draft)
        draft.generation_config.num_assistant_tokens = job.k
        draft.generation_config.num_assistant_tokens_schedule = "constant"
        draft.generation_config.assistant_confidence_threshold = 0.0
        options["assistant_model"] = draft
    elif job.method == "ngram":
        options["prompt_lookup_num_tokens"] = job.k

    def generate(prompt: list[int], tokens: int, k: int) -> tuple[list[int], float]:
        assert k == job.k, (k, job.k)
        ids = torch.tensor([prompt])
        first, began = FirstToken(), time.perf_counter()
        with torch.inference_mode():
            out = target.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                streamer=first,
                **options,
            )
        return out[0, len(prompt) :].tolist(), first.times_s[1] - began

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return Loaded(versions, one_by_one(generate))


if __name__ == "__main__":
    serve(load)
