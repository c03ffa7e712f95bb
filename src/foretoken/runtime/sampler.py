"""From raw logits to tokens, for targets and drafters alike: one path, whatever the rows.

Owns the order of processing and the per-request state it needs; the arithmetic is in `ops`.
Knows nothing of verification. Invariants: what is chosen at a row depends on its logits, its
history (committed tokens and the drafts before it), its request and its position, never on other
rows; raw logits are not changed.
"""

from collections.abc import Sequence
from itertools import islice

import torch
from torch import Tensor

from foretoken.backend import backend_for
from foretoken.ops.drawing import PLAIN, UNDECIDED, pack_rows
from foretoken.ops.logits import NEVER, Filters, Penalties, keep_filtered, penalise, scale
from foretoken.ops.noise import KeyedNoise, Stream, pack_keys
from foretoken.ops.sampling import draw, draw_filtered, greedy
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rows import Kind, Profile, RowGroup, Rows, banned_cells
from foretoken.runtime.sequence import Sequence as RunningSequence
from foretoken.types import Request


class PenaltyCounts:
    """Which ids each request with penalties has seen, and how often each is in its output.

    Only ids that were seen can be penalised, so a row costs the length of its history, not the
    vocabulary. A table lives on the device and grows by the newly committed tokens, the first
    `counted` of its sequence; the drafts before a row are added to a copy.
    """

    def __init__(self, device: torch.device) -> None:
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


class Sampler:
    """Processes rows of logits and chooses tokens with keyed noise."""

    def __init__(
        self, vocab_size: int, device: torch.device | str = "cpu", grammars: Grammars | None = None
    ) -> None:
        """Serve rows of `vocab_size` logits on `device`; without `grammars` none is obeyed."""
        self.vocab_size = vocab_size
        self.grammars = grammars
        self.device = torch.device(device)
        self.backend = backend_for(self.device)
        self.noise = KeyedNoise(vocab_size, self.device, self.backend.noise_at_once)
        self._kernel = self.backend.draw
        self._counts = PenaltyCounts(self.device)
        self._profiles: dict[str, Profile] = {}

    def release(self, request_id: str) -> None:
        """Forget a request; unknown ids are fine."""
        self._profiles.pop(request_id, None)
        self._counts.release(request_id)
        if self.grammars is not None:
            self.grammars.release(request_id)

    def profile(self, request: Request) -> Profile:
        """What the request needs, worked out at its first row."""
        profile = self._profiles.get(request.request_id)
        if profile is None or profile.request is not request:
            self.release(request.request_id)
            profile = Profile.of(request, self.vocab_size, self.device)
            self._profiles[request.request_id] = profile
        return profile

    def choose(
        self, logits_RV: Tensor, rows: Sequence[Rows], stream: Stream = Stream.TARGET
    ) -> Tensor:
        """The token of every row, int64 [R]: the best for greedy requests, else a keyed draw.

        Args:
            logits_RV: raw float32 logits.
            rows: what the logits' rows are, in order.
            stream: which noise to draw with.
        """
        groups = self._groups(logits_RV, rows)
        edited_RV = self._edit(logits_RV, groups)
        if self._kernel is None:
            return self._choose_each(edited_RV, groups, stream)
        ids = self._kernel(edited_RV, b"".join(group.packed(stream) for group in groups))
        chosen_R = torch.tensor(ids)
        # The kernel leaves a row open where its arithmetic could round the other way than
        # PyTorch's: those few rows are chosen here, so that both give the same tokens.
        if UNDECIDED in ids:
            left = [row for row, token in enumerate(ids) if token == UNDECIDED]
            owners = [group for group in groups for _ in range(group.rows.num_rows)]
            part = [owners[row].single(row, at) for at, row in enumerate(left)]
            chosen_R[left] = self._choose_each(edited_RV[left], part, stream).cpu()
        return chosen_R

    def _choose_each(self, edited_RV: Tensor, groups: list[RowGroup], stream: Stream) -> Tensor:
        """`choose` by PyTorch's operations, from edited logits."""
        kinds = sorted({group.kind for group in groups})
        if len(kinds) == 1:
            return self._choose(edited_RV, groups, stream)
        chosen_R = torch.empty(edited_RV.shape[0], dtype=torch.int64, device=self.device)
        for kind in kinds:
            part = [group for group in groups if group.kind is kind]
            index_P = self._index(part)
            chosen_R[index_P] = self._choose(edited_RV[index_P], part, stream)
        return chosen_R

    def best(self, logits_RV: Tensor, rows: Sequence[Rows]) -> Tensor:
        """The most probable id of every row, whatever the temperature, int64 [R]."""
        return greedy(self.edited(logits_RV, rows))

    def edited(self, logits_RV: Tensor, rows: Sequence[Rows]) -> Tensor:
        """Logits before temperature, whatever that is, [R, V]; perhaps the given tensor."""
        return self._edit(logits_RV, self._groups(logits_RV, rows))

    def process(self, logits_RV: Tensor, rows: Sequence[Rows]) -> Tensor:
        """Logits whose softmax is the distribution of each row's token; a new tensor [R, V].

        Greedy requests have no such distribution and may not be among the rows.
        """
        groups = self._groups(logits_RV, rows)
        assert not any(g.profile.greedy for g in groups), "greedy rows have no distribution"
        edited_RV = self._edit(logits_RV, groups)
        scaled_RV = scale(edited_RV, self._temperatures(groups))
        part = [group for group in groups if group.kind is Kind.FILTERED]
        if len(part) == len(groups):
            return keep_filtered(scaled_RV, self._filters(part))
        if part:
            index_P = self._index(part)
            scaled_RV[index_P] = keep_filtered(scaled_RV[index_P], self._filters(part))
        return scaled_RV

    def distributions(self, logits_RV: Tensor, rows: Sequence[Rows]) -> Tensor:
        """The distribution of each row's token, float32 [R, V]; no row may be greedy."""
        kernel = self.backend.reject
        if kernel is not None:
            groups = self._groups(logits_RV, rows)
            assert not any(g.profile.greedy for g in groups), "greedy rows have no distribution"
            hows = b"".join(pack_rows((0,) * g.rows.num_rows, g.profile.drawing) for g in groups)
            probs_RV = kernel.distributions(self._edit(logits_RV, groups), hows)
            if probs_RV is not None:
                return probs_RV
        return self.process(logits_RV, rows).softmax(dim=-1)

    def keys(self, rows: Sequence[Rows], stream: Stream) -> list[int]:
        """Noise keys of the rows."""
        keys: list[int] = []
        for group in rows:
            keys.extend(self.profile(group.sequence.request).keys(group, stream))
        return keys

    def draw(self, processed_RV: Tensor, keys: Sequence[int]) -> list[int]:
        """One id per row of `process`, by the noise of the rows' keys."""
        ids = [UNDECIDED] * len(keys)
        if self._kernel is not None:
            ids = self._kernel(processed_RV, pack_rows(keys, PLAIN))
        left = [row for row, token in enumerate(ids) if token == UNDECIDED]
        if left:
            keys_L2 = pack_keys([keys[row] for row in left], self.device)
            drawn = draw(processed_RV[left], keys_L2, self.noise).tolist()
            for row, token in zip(left, drawn, strict=True):
                ids[row] = token
        return ids

    def _choose(self, edited_PV: Tensor, part: list[RowGroup], stream: Stream) -> Tensor:
        """Tokens of groups that are all of one kind."""
        kind = part[0].kind
        if kind is Kind.GREEDY:
            return greedy(edited_PV)
        scaled_PV = scale(edited_PV, self._temperatures(part))
        keys_P2 = pack_keys(self.keys([group.rows for group in part], stream), self.device)
        if kind is Kind.OPEN:
            return draw(scaled_PV, keys_P2, self.noise)
        return draw_filtered(scaled_PV, self._filters(part), keys_P2, self.noise)

    def _groups(self, logits_RV: Tensor, rows: Sequence[Rows]) -> list[RowGroup]:
        groups, start = [], 0
        for group in rows:
            groups.append(RowGroup(group, self.profile(group.sequence.request), start))
            start += group.num_rows
        assert logits_RV.shape == (start, self.vocab_size), (logits_RV.shape, start)
        assert logits_RV.dtype == torch.float32, logits_RV.dtype
        return groups

    def _edit(self, logits_RV: Tensor, groups: list[RowGroup]) -> Tensor:
        """Everything before temperature; the given tensor itself if there is nothing to do."""
        # Most requests edit nothing: then no copy is made. Otherwise raw logits stay as they are,
        # for logprobs are of raw logits.
        touched = [group for group in groups if group.profile.edits]
        if not touched:
            return logits_RV
        edited_RV = logits_RV.clone()
        banned: list[tuple[int, int]] = []
        for group in touched:
            if self.grammars is not None:
                self.grammars.forbid(edited_RV[group.start : group.end], group.rows)
            forbidden_V = group.profile.forbidden_V
            if forbidden_V is not None:
                edited_RV[group.start : group.end].masked_fill_(forbidden_V, NEVER)
            banned.extend((group.start + row, i) for row, i in banned_cells(group.rows))
        # Single bans of all rows are one assignment: one call on a device instead of one per ban.
        if banned:
            at_N2 = torch.tensor(banned, device=self.device)
            edited_RV[at_N2[:, 0], at_N2[:, 1]] = NEVER
        for group in touched:
            rows_RV = edited_RV[group.start : group.end]
            if group.profile.bias is not None:
                ids, values = group.profile.bias
                rows_RV.index_add_(1, ids, values.expand(group.rows.num_rows, -1))
            if group.profile.penalties is not None:
                self._counts.apply(rows_RV, group.rows, group.profile.penalties)
        return edited_RV

    def _index(self, part: list[RowGroup]) -> Tensor:
        """Rows of the groups, int64."""
        return torch.tensor([i for g in part for i in range(g.start, g.end)], device=self.device)

    def _temperatures(self, groups: list[RowGroup]) -> list[float]:
        return [g.profile.temperature for g in groups for _ in range(g.rows.num_rows)]

    def _filters(self, groups: list[RowGroup]) -> Filters:
        each = [
            (g.profile.filters or (0.0, 0, 1.0)) for g in groups for _ in range(g.rows.num_rows)
        ]
        return Filters.of(each, self.vocab_size, self.device)
