"""A vLLM offline script with another import: several prompts, one call."""

from foretoken import LLM, SamplingParams

PROMPTS = ["def factorial(n):\n", "import re\n\n", "class Queue:\n"]


def main() -> None:
    """Generate and print."""
    params = SamplingParams(temperature=0.8, top_p=0.95, seed=7, max_tokens=32)
    speculative_config = {
        "method": "draft_model",
        "model": "demo-draft",
        "num_speculative_tokens": 5,
    }
    with LLM("demo", speculative_config=speculative_config) as llm:
        for output in llm.generate(PROMPTS, params, use_tqdm=False):
            print(f"--- {output.prompt!r}")
            print(output.outputs[0].text)


if __name__ == "__main__":
    main()
