"""A vLLM offline script with another import: several prompts, one call."""

from foretoken import LLM, SamplingParams

PROMPTS = [
    """class Counter:
    def __init__(self):
        self.count = 0

    def increment(self):""",
    """class Queue:
    def __init__(self):
        self.items = []

    def put(self, item):
        self.items.append(item)

    def get(self):""",
    """class Cache:
    def __init__(self):
        self.data = {}

    def get(self, key):""",
]


def main() -> None:
    """Generate and print."""
    params = SamplingParams(temperature=0.7, seed=3, max_tokens=48)
    speculative_config = {
        "method": "draft_model",
        "model": "demo-draft",
        "num_speculative_tokens": 5,
    }
    with LLM("demo", speculative_config=speculative_config) as llm:
        for number, output in enumerate(llm.generate(PROMPTS, params, use_tqdm=False), 1):
            print(f"--- prompt {number}, then what the model wrote:")
            print(f"{output.prompt}{output.outputs[0].text}\n")


if __name__ == "__main__":
    main()
