"""How often each id occurs in the output of each request that has penalties.

Counts are kept per request on the device and only ever grow by the newly committed tokens; the
drafts before a row are added to a copy. Knows nothing of logits beyond handing rows of counts to
`ops.logits.penalise`. Invariant: a slot's counts equal the first `counted` tokens of its sequence.
"""

from collections.abc import Sequence as Seq
from itertools import repeat

import torch
from torch import Tensor

from foretoken.ops.logits import Penalties, penalise
from foretoken.runtime.rows import Rows
from foretoken.runtime.sequence import Sequence


class PenaltyCounts:
    """Count tensors by request id, in slots that are reused."""

    def __init__(self, vocab_size: int, device: torch.device) -> None:
        """Start empty; memory grows with the number of live requests that have penalties."""
        self._vocab_size = vocab_size
        self._device = device
        self._slots: dict[str, int] = {}
        self._counted: dict[str, int] = {}
        self._free: list[int] = []
        self._counts_SV = torch.empty(0, vocab_size, dtype=torch.float32, device=device)
        self._prompts_SV = torch.empty(0, vocab_size, dtype=torch.bool, device=device)

    def release(self, request_id: str) -> None:
        """Free the slot of a request; unknown ids are fine."""
        slot = self._slots.pop(request_id, None)
        if slot is not None:
            self._free.append(slot)
            del self._counted[request_id]

    def apply(self, logits_PV: Tensor, rows: Seq[Rows]) -> Tensor:
        """Penalised logits, a new tensor; `rows` describe the P rows in order."""
        slots: list[int] = []
        cells: list[tuple[int, int]] = []
        strengths: list[tuple[float, float, float]] = []
        for group in rows:
            params = group.sequence.request.params
            offset, count = len(slots), group.num_rows
            slots.extend(repeat(self._slot(group.sequence), count))
            strengths.extend(
                repeat(
                    (
                        params.repetition_penalty,
                        params.frequency_penalty,
                        params.presence_penalty,
                    ),
                    count,
                )
            )
            for row in range(count):
                cells.extend((offset + row, t) for t in group.drafts[: group.first + row] if t >= 0)
        slots_P = torch.tensor(slots, device=self._device)
        counts_PV = self._counts_SV.index_select(0, slots_P)
        _count(counts_PV, cells)
        how_3P1 = torch.tensor(strengths, device=self._device).T.unsqueeze(2)
        how = Penalties(repetition_P1=how_3P1[0], frequency_P1=how_3P1[1], presence_P1=how_3P1[2])
        return penalise(logits_PV, counts_PV, self._prompts_SV.index_select(0, slots_P), how)

    def _slot(self, sequence: Sequence) -> int:
        """The slot of a sequence, counting the tokens that were committed since."""
        request_id = sequence.request.request_id
        slot = self._slots.get(request_id)
        if slot is None:
            slot = self._open(sequence)
        start, end = self._counted[request_id], sequence.num_tokens
        assert start <= end, (start, end)
        if start < end:
            new = sequence.token_ids[start:end]
            _count(self._counts_SV, list(zip(repeat(slot), new)))
            self._counted[request_id] = end
        return slot

    def _open(self, sequence: Sequence) -> int:
        if not self._free:
            self._grow()
        slot = self._free.pop()
        request_id = sequence.request.request_id
        self._slots[request_id] = slot
        self._counted[request_id] = sequence.num_prompt
        prompt = torch.tensor(sequence.token_ids[: sequence.num_prompt], device=self._device)
        self._counts_SV[slot].zero_()
        self._prompts_SV[slot].zero_()
        self._prompts_SV[slot].index_fill_(0, prompt, True)
        return slot

    def _grow(self) -> None:
        have = self._counts_SV.shape[0]
        more = max(4, have)
        with torch.inference_mode(False):
            counts_SV = self._counts_SV.new_zeros(have + more, self._vocab_size)
            prompts_SV = self._prompts_SV.new_zeros(have + more, self._vocab_size)
        counts_SV[:have] = self._counts_SV
        prompts_SV[:have] = self._prompts_SV
        self._counts_SV, self._prompts_SV = counts_SV, prompts_SV
        self._free.extend(reversed(range(have, have + more)))


def _count(counts_SV: Tensor, cells: list[tuple[int, int]]) -> None:
    """Add one in place at each (row, id), repeats included."""
    if cells:
        at = torch.tensor(cells, device=counts_SV.device)
        one = counts_SV.new_ones(())
        counts_SV.index_put_((at[:, 0], at[:, 1]), one, accumulate=True)
