"""Text as it comes, and how many tokens each step brought."""

from foretoken import LLM, SamplingParams

PROMPT = """class Queue:
    def __init__(self):
        self._items = []

    def __len__(self):"""


def main() -> None:
    """Stream one continuation; accepted drafts arrive several tokens at a time."""
    params = SamplingParams(temperature=0.6, seed=3, max_tokens=64)
    steps = []
    with LLM("demo", speculative_config={"method": "draft_model", "model": "demo-draft"}) as llm:
        print(PROMPT, end="")
        for output in llm.stream(PROMPT, params):
            print(output.text, end="", flush=True)
            steps.append(len(output.new_token_ids))
    print(f"\n{sum(steps)} tokens in {len(steps)} steps, so many each: {steps}")


if __name__ == "__main__":
    main()
