"""transformers' generate() as a worker of `peers.py`: assisted generation and prompt look-up.

The number of drafts is held constant and no draft is cut for lack of confidence, so that the
work is the same as everyone's; its default schedule is slower on these models.
"""

import torch
import transformers
from protocol import Job, Loaded, one_by_one, serve
from transformers import AutoModelForCausalLM


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

    def generate(prompt: list[int], tokens: int, k: int) -> list[int]:
        assert k == job.k, (k, job.k)
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = target.generate(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=tokens,
                do_sample=False,
                **options,
            )
        return out[0, len(prompt) :].tolist()

    versions = {"transformers": transformers.__version__, "torch": torch.__version__}
    return Loaded(versions, one_by_one(generate))


if __name__ == "__main__":
    serve(load)
