"""A drafter of your own in thirty lines, checked by the contract and put to work.

It drafts what followed the newest two tokens the last time, and so on from there. Drafters decide
nothing about the output: whatever this one proposes, the tokens stay those of plain decoding.
"""

from foretoken import LLM, SamplingParams
from foretoken.models.tensors import Draft
from foretoken.proposers import Context, Proposer, ProposerSettings
from foretoken.testing.contract import CONTRACT


class PairProposer(Proposer):
    """For each request a table from two tokens to the one that came next."""

    name = "pairs"
    looks_up = True  # drafts follow from the text alone, and making one costs nothing

    def __init__(self, settings: ProposerSettings) -> None:
        """`settings` has the vocabulary size and the most drafts per step; neither is needed."""
        self._tables: dict[str, dict[tuple[int, int], int]] = {}
        self._num_read: dict[str, int] = {}

    def propose(self, context: Context) -> Draft:
        """Up to draft_budget tokens for each span; spans with budget 0 are not looked at."""
        ids: list[tuple[int, ...]] = [()] * len(context.spans)
        for i in context.wanted:
            span = context.spans[i]
            name, text = span.sequence.request.request_id, span.sequence.token_ids
            table = self._tables.setdefault(name, {})
            for end in range(max(self._num_read.get(name, 2), 2), len(text)):
                table[text[end - 2], text[end - 1]] = text[end]
            self._num_read[name] = len(text)
            draft = list(text[-2:])
            while len(draft) < 2 + span.draft_budget and (draft[-2], draft[-1]) in table:
                draft.append(table[draft[-2], draft[-1]])
            ids[i] = tuple(draft[2:])
        return Draft(ids=tuple(ids), drafter=self.name)

    def release(self, request_id: str) -> None:
        """The request has ended."""
        self._tables.pop(request_id, None)
        self._num_read.pop(request_id, None)


def main() -> None:
    """Check the drafter, then compare with plain decoding."""
    for check in CONTRACT:
        check(PairProposer)
        print(f"{check.__name__}: kept")
    prompt = "def area(width, height):\n    return width * height\n\ndef volume("
    params = SamplingParams(temperature=0.0, max_tokens=48)
    config = {"method": "custom_class", "model": f"{__name__}.PairProposer", "name": "pairs"}
    with LLM("demo") as llm:
        [plain] = llm.generate(prompt, params, use_tqdm=False)
    with LLM("demo", speculative_config=config) as llm:
        [drafted] = llm.generate(prompt, params, use_tqdm=False)
    output = drafted.outputs[0]
    assert output.metrics is not None
    print(f"acceptance length {output.metrics.acceptance_length:.2f}")
    print(f"{sum(name == 'pairs' for name in output.drafters)} tokens drafted by pairs")
    print(f"same tokens: {output.token_ids == plain.outputs[0].token_ids}")


if __name__ == "__main__":
    main()
