"""Which ids each request with penalties has seen, and how often each is in its output.

Only ids that were seen can be penalised, so a row costs the length of its history, not the
vocabulary. The table of a request lives on the device and grows by the newly committed tokens;
the drafts before a row are added to a copy. Invariant: a table holds exactly the first `counted`
tokens of its sequence, and perhaps ids of count zero, which no penalty touches.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from foretoken.ops.logits import Penalties, penalise
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence as RunningSequence


class PenaltyCounts:
    """Tables by request id."""

    def __init__(self, device: torch.device) -> None:
        """Start empty."""
        self._device = device
        self._tables: dict[str, _Table] = {}

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self._tables.pop(request_id, None)

    def apply(self, logits_RV: Tensor, rows: Rows, penalties: Penalties) -> None:
        """Penalise in place; `rows` are all R rows."""
        table = self._table(rows.sequence)
        drafts = [max(token, 0) for token in rows.drafts]
        places = table.places(drafts)
        count = rows.num_rows
        counts_RU = table.counts_U.repeat(count, 1)
        cells = [(r, p) for r in range(count) for p in places[: rows.first + r]]
        if cells:
            at_N2 = torch.tensor(cells, device=self._device)
            one = counts_RU.new_ones(())
            counts_RU.index_put_((at_N2[:, 0], at_N2[:, 1]), one, accumulate=True)
        ids_U = table.ids_U
        seen_RU = logits_RV.index_select(1, ids_U)
        penalised_RU = penalise(seen_RU, counts_RU, table.prompt_U, penalties)
        logits_RV.index_copy_(1, ids_U, penalised_RU)

    def _table(self, sequence: RunningSequence) -> "_Table":
        """The table of a sequence, counting the tokens that were committed since."""
        request_id = sequence.request.request_id
        table = self._tables.get(request_id)
        if table is None:
            table = _Table(sequence.token_ids[: sequence.num_prompt], self._device)
            self._tables[request_id] = table
        assert table.counted <= sequence.num_tokens, (table.counted, sequence.num_tokens)
        table.count(sequence.token_ids[table.counted :])
        return table


class _Table:
    """Unique ids of one sequence with their counts in the output; those of the prompt first."""

    def __init__(self, prompt: list[int], device: torch.device) -> None:
        """Start with the prompt, each id of it once."""
        unique = list(dict.fromkeys(prompt))
        self.counted = len(prompt)
        self._place = {token: place for place, token in enumerate(unique)}
        room = 2 * len(unique) + 64
        with torch.inference_mode(False):
            self._ids = torch.zeros(room, dtype=torch.int64, device=device)
            self._counts = torch.zeros(room, dtype=torch.float32, device=device)
            self._prompt = torch.zeros(room, dtype=torch.bool, device=device)
        self._ids[: len(unique)] = torch.tensor(unique, dtype=torch.int64, device=device)
        self._prompt[: len(unique)] = True

    @property
    def ids_U(self) -> Tensor:
        """int64, no id twice."""
        return self._ids[: len(self._place)]

    @property
    def counts_U(self) -> Tensor:
        """float32, occurrences in the output."""
        return self._counts[: len(self._place)]

    @property
    def prompt_U(self) -> Tensor:
        """bool, whether the id occurs in the prompt."""
        return self._prompt[: len(self._place)]

    def places(self, tokens: Sequence[int]) -> list[int]:
        """Where tokens stand in the table; new ones are put at its end."""
        before = len(self._place)
        places = [self._place.setdefault(token, len(self._place)) for token in tokens]
        after = len(self._place)
        if after > before:
            if after > self._ids.numel():
                self._grow(2 * after)
            new = list(islice(reversed(self._place), after - before))[::-1]
            self._ids[before:after] = torch.tensor(new, device=self._ids.device)
        return places

    def count(self, tokens: Sequence[int]) -> None:
        """Add committed output tokens."""
        if tokens:
            at_N = torch.tensor(self.places(tokens), device=self._ids.device)
            self._counts.index_add_(0, at_N, self._counts.new_ones(len(tokens)))
            self.counted += len(tokens)

    def _grow(self, room: int) -> None:
        with torch.inference_mode(False):
            self._ids = _padded(self._ids, room)
            self._counts = _padded(self._counts, room)
            self._prompt = _padded(self._prompt, room)


def _padded(kept: Tensor, room: int) -> Tensor:
    wider = kept.new_zeros(room)
    wider[: kept.numel()] = kept
    return wider
