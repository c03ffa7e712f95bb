"""Text as it comes, and how many tokens each step brought."""

from foretoken import LLM, SamplingParams


def main() -> None:
    """Stream one continuation; accepted drafts arrive several tokens at a time."""
    params = SamplingParams(temperature=0.0, max_tokens=48)
    steps = []
    with LLM("demo", speculative_config={"method": "draft_model", "model": "demo-draft"}) as llm:
        for output in llm.stream("def read_lines(path):\n", params):
            print(output.text, end="", flush=True)
            steps.append(len(output.new_token_ids))
    print(f"\n{sum(steps)} tokens in {len(steps)} steps: {steps}")


if __name__ == "__main__":
    main()
