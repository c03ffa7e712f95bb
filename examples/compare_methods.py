"""The promise, checked by hand: three ways to draft, one output."""

from typing import Any

from foretoken import LLM, SamplingParams

METHODS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft_model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 4},
}


def main() -> None:
    """Write the same prompt with each method and compare token ids."""
    params = SamplingParams(temperature=0.8, seed=11, max_tokens=48)
    outputs = {}
    for name, config in METHODS.items():
        settings: dict[str, Any] = {"batch_invariant": True, "speculative_config": config}
        # Each method drafts in every step, also where it would not pay.
        with LLM("demo", adaptive_speculation=False, **settings) as llm:
            [result] = llm.generate("def merge(left, right):\n", params, use_tqdm=False)
            outputs[name] = result.outputs[0]
    for name, output in outputs.items():
        same = output.token_ids == outputs["plain"].token_ids
        length = output.metrics.acceptance_length if output.metrics else 1.0
        print(f"{name:12} {length:.2f} tokens a step  same tokens: {same}")


if __name__ == "__main__":
    main()
