"""The kernels that a step on a GPU is made of, as one set: what each reads, writes and rounds.

`TritonKernels` has them for a device, `TwinKernels` in PyTorch's operations for any. Both write
into tensors that are given, allocate nothing that outlives a call, and read all that changes from
step to step out of tensors: so a step of them can be recorded and replayed. Rules for both:

- Products are summed in float32. A row's sums are made in an order that depends on the weights'
  shape and on the row's own place alone, never on other rows.
- Whoever reads parts [P, T, N] adds them in order, beginning with part 0.
- Numbers of the step are int32 and contiguous; rows of x, q, y and normed may be far apart. Rows
  that no unit covers are dead: what is computed for them is finite and read by nobody.

Shape letters: T rows of the step, D hidden size, N outputs and K inputs of a matrix, P parts,
F inner size, E experts, H query heads, L key heads, h head size, S slots of a store, U units, R
rows of logits, V vocabulary, X numbers of any other kind.
"""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple, Protocol, Self

import torch
from torch import Tensor

from foretoken.shape.mixtures.experts import Experts

KEY_BLOCK: Final = 64
"""Keys that are weighed at once, from multiples of it on."""
UNIT_INTS: Final = 9
EXPERT_ACTIVATIONS: Final = {"silu": 0, "gelu_pytorch_tanh": 1, "clamped": 2}
"""By their names in `Experts`; the first are those of `GpuKernels.gate_up`."""
MASS_BITS: Final = 44
"""Of what the best id of a row weighs: 2 ** 19 ids fit into 64 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuWeights:
    """A matrix [N, K] on its device.

    Of integers in groups a weight is scale[n, g] * (value - zero[n, g]) in float32, rounded to x's
    type, and multiplied as a float is. Without groups the sum of a segment is
    made of values and scaled.
    """

    values_NK: Tensor
    """Floats [N, K]; 8 bits: int8 [N, K]; 4 bits: uint8 [N, K / 2], of each group the first half in
    the low bits of its bytes, the second in the high ones. Contiguous."""
    segment: int
    """Inputs of a segment, as `segment_of` gives them, or K; the last may be shorter."""
    inputs: int
    scale_NG: Tensor | None = None
    """Of integers: float16 or float32 (of groups of 128 float32, which is read ahead faster); G = 1
    of 8 bits per output."""
    zero_NG: Tensor | None = None
    """Of groups, in the scale's type; None: 8 of 4 bits, 0 of 8."""
    bits: int = 0
    """0: floats; else 8 or 4."""

    @property
    def outputs(self) -> int:
        """N."""
        return self.values_NK.shape[0]

    @property
    def segments(self) -> int:
        """How many partial sums there are."""
        return -(-self.inputs // self.segment)

    def part(self, rows: slice) -> "GpuWeights":
        """Some of its outputs."""
        scale_NG, zero_NG = (
            None if one is None else one[rows] for one in (self.scale_NG, self.zero_NG)
        )
        return replace(self, values_NK=self.values_NK[rows], scale_NG=scale_NG, zero_NG=zero_NG)

    @property
    def group(self) -> int:
        """Inputs that share a scale; 0: all, or floats."""
        groups = 1 if self.scale_NG is None else self.scale_NG.shape[1]
        return 0 if groups == 1 and self.bits != 4 else self.inputs // groups

    def cut(self, part: int, parts: int) -> "GpuWeights":
        """One of so many equal shares of the segments."""
        each = self.segments // parts * self.segment
        own = slice(part * each, min((part + 1) * each, self.inputs))
        groups = slice(own.start // self.group, own.stop // self.group) if self.group else slice(1)
        packed = 2 if self.bits == 4 else 1
        scale_NG, zero_NG = (
            None if numbers_NG is None else numbers_NG[:, groups].contiguous()
            for numbers_NG in (self.scale_NG, self.zero_NG)
        )
        return replace(
            self,
            values_NK=self.values_NK[:, own.start // packed : own.stop // packed].contiguous(),
            inputs=own.stop - own.start,
            scale_NG=scale_NG,
            zero_NG=zero_NG,
        )


class Kept(NamedTuple):
    """Where rows of hidden states are kept for a drafter."""

    slots_SD: Tensor
    """A view [S, D] of the store's columns; rows may be far apart."""
    slots_T: Tensor
    """Where each row goes."""


class AddNorm(NamedTuple):
    """A layer's part onto the residual stream, and the norm of that for the next layer."""

    parts_PTD: Tensor | None
    """float32."""
    bias_D: Tensor | None
    """Of the parts."""
    stream_TD: Tensor
    """Read, and changed in place."""
    weight_D: Tensor | None
    """Of the next norm."""
    normed_TD: Tensor
    """In the stream's type."""
    eps: float
    """Of both norms."""
    after_D: Tensor | None = None
    """Weights of a norm over the part itself."""
    kept: Kept | None = None
    """Where the new stream is kept, too."""
    kept_normed: Kept | None = None
    """Where the normed rows are kept, too."""
    weights_TP: Tensor | None = None
    """float32, of each row's parts."""


class QueryKeyNorm(NamedTuple):
    """RMS norms of queries and keys."""

    query: Tensor
    """Weights [h], or [H * h] where the norm is over all heads (`whole`)."""
    key: Tensor
    eps: float
    whole: bool = False


class Rotary(NamedTuple):
    """Tables of all positions, in the model's type."""

    cos_XW: Tensor
    """W dimensions of a head are turned, even; the second half repeats the first."""
    sin_XW: Tensor
    """The first half carries the minus sign."""
    query_scale_X: Tensor | None = None
    """What queries are multiplied by after they are turned and rounded."""


class KVLayer(NamedTuple):
    """One layer of a store. Both may be strided, the last dimension of numbers is dense."""

    numbers_SLh: Tensor
    """[S, 2 L, h], keys, then values: the model's type or int8."""
    scales_SL: Tensor | None = None
    """float32 [S, 2 L], of int8 alone."""


class Heads(NamedTuple):
    """Fused rows on their way to attention."""

    parts_PTA: Tensor
    """float32, A = (H + 2 L) * h: queries, keys, values."""
    bias_A: Tensor | None
    norm: QueryKeyNorm | None
    rotary: Rotary
    places_T: Tensor
    slots_T: Tensor
    """Where keys and values go."""
    q_THh: Tensor
    """Results, as keys and values in the store are."""
    layer: KVLayer


class AttentionShape(NamedTuple):
    """What attention is compiled for."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    page_size: int
    window: int
    """Positions that a row sees, its own included; 0: all."""
    softcap: float
    """Scores s become softcap * tanh(s / softcap); 0: they stay."""
    scale: float
    by_key: bool = False
    """As `ops.attention.base.Geometry`."""


class AttentionInts(NamedTuple):
    """The rows of a step as attention reads them; int32."""

    places_T: Tensor
    """Position of each row in its sequence; of a tree: of its branch."""
    runs_T: Tensor
    """Row of `tails` whose branch each row stands on; a chain's: -1."""
    bases_T: Tensor
    """Number of each row's first partial result; that of split s is bases + s."""
    units_U: Tensor
    """[U, UNIT_INTS]: first row, rows, start, end, table, split, lowest, first run, runs. A tile of
    a span's rows over the keys [split * SPLIT, (split + 1) * SPLIT) below `end`, the end of what
    its deepest row sees. `table`: where the pages of its sequence begin. `lowest`: of the places of
    its rows. `start`: where the branches of a tree begin; a chain's: `end`. 0 rows: nothing is
    done."""
    pages_P: Tensor
    """Page tables of all sequences, end to end."""
    tails_XJ: Tensor
    """Of each branch: place `start + j` of it is stored at place `start + tails[run, j]`."""
    trees: bool
    """Whether some unit has runs."""
    splits: bool
    """Whether some row sees beyond the first split; else `attend` gives finished rows."""
    lasts_T: Tensor | None = None
    """The last place that each row sees, where that is not its own."""


class Partials(NamedTuple):
    """Results of single splits, float32, by the numbers of `bases_T`."""

    sums_XHh: Tensor
    """Sum of weights times values, not divided."""
    top_mass_XH2: Tensor
    """Highest score, and sum of weights e ** (score - highest)."""

    @classmethod
    def empty(cls, count: int, shape: AttentionShape, device: torch.device) -> Self:
        """Room for so many."""
        sizes = ((count, shape.num_heads, width) for width in (shape.head_dim, 2))
        return cls(*(torch.zeros(size, dtype=torch.float32, device=device) for size in sizes))


class AttentionCall(NamedTuple):
    """Attention of a layer."""

    q_THh: Tensor
    layer: KVLayer
    shape: AttentionShape
    step: AttentionInts
    partials: Partials
    """Room for results of splits."""
    out_TD: Tensor
    """Results."""
    sinks_H: Tensor | None = None
    """Score of each head's sink."""


class ExpertChoice(NamedTuple):
    """How a layer gives rows their experts."""

    experts: Experts
    dtype: torch.dtype
    """What products are rounded to."""
    bias_E: Tensor | None
    """Added to them."""
    choice_bias_E: Tensor | None
    """float32, added to scores for the choice alone."""


class ExpertMatrices(NamedTuple):
    """One matrix [N, K] of each expert."""

    weights: GpuWeights
    """[E * N, K], one over the other, in one segment."""
    bias_X: Tensor | None
    """[E * N]."""


class ExpertPairs(NamedTuple):
    """The rows of a pass and the experts that each has: pair row * used + slot."""

    weights_TS: Tensor
    """float32, by slots, heaviest first, then by number; a shared expert's is behind them."""
    experts_TU: Tensor
    """int32, [T, used]; of rows that are padding E."""
    order_P: Tensor
    """int32 pairs by expert."""
    blocks_B3: Tensor
    """int32: expert, first place in the order, pairs; without pairs nothing is done."""
    tile: int
    """Most pairs of a block."""

    @classmethod
    def empty(cls, rows: int, experts: Experts, device: torch.device) -> Self:
        """Room for so many rows, in blocks of any size."""
        ints_PX = torch.zeros(5, rows * experts.used, dtype=torch.int32, device=device)
        return cls(
            weights_TS=torch.zeros(rows, experts.results, device=device),
            experts_TU=ints_PX[0].view(rows, experts.used),
            order_P=ints_PX[1],
            blocks_B3=ints_PX[2:].view(-1, 3),
            tile=1,
        )

    def of(self, rows: int, experts: int, tile: int) -> Self:
        """Those of the first rows, in blocks of `tile`; with room for the blocks of any choice."""
        pairs = rows * self.experts_TU.shape[1]
        touched = min(pairs, experts)
        return self._replace(
            weights_TS=self.weights_TS[:rows],
            experts_TU=self.experts_TU[:rows],
            order_P=self.order_P[:pairs],
            blocks_B3=self.blocks_B3[: touched + (pairs - touched) // tile],
            tile=tile,
        )


class Draw(NamedTuple):
    """Rows of logits to tokens."""

    logits_RV: Tensor
    """float32."""
    keys_R2: Tensor
    """int32, `ops.noise.pack_keys`."""
    how_R4: Tensor
    """As for `GpuKernels.keep`; of temperature 0: without noise."""
    tokens_R: Tensor
    """int32 results; may be strided, and may be the tokens of a next pass."""
    names_V: Tensor | None = None
    """int32, the token of each id where they are another vocabulary's; the noise is that of the
    token."""
    kept_R3: Tensor | None = None
    """Of `keep`; None: nothing is left out."""


class Drafted(NamedTuple):
    """Chains of drafts, S of them with K drafts in all, end to end; their own rows of logits, each
    chain's one more than drafts, chain after chain."""

    logits_PV: Tensor
    """float32; temperature and filters are not applied."""
    how_P4: Tensor
    """As for `GpuKernels.keep`; temperatures are above 0."""
    keys_P2: Tensor
    """int32 noise of the token that stands there, in place of a draft or behind the last."""
    probs_XV: Tensor | None
    """float32 that drafts were drawn from; None: they are one-hot."""
    spans_S4: Tensor
    """int32: the first draft of each chain, how many there are, its first row of logits, and of
    `probs_XV`."""
    ids_K: Tensor
    """int32; -1 is never kept."""
    uniforms_K: Tensor
    """float64 in (0, 1)."""
    most: int
    """Drafts of the longest chain."""


class Devices(Protocol):
    """Devices that compute together, of which each asks for the same in the same order."""

    size: int

    def gather_into(self, x: Tensor, found_RX: Tensor) -> None:
        """Everybody's x, in the order of ranks."""

    def exchange_into(self, x_RX: Tensor, found_RX: Tensor) -> None:
        """Row r is for rank r; found is everybody's row for this one."""


class Recorder(Protocol):
    """Remembers launches."""

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        """What launches all that `run` does once more, over the same memory."""


class GpuKernels(ABC):
    """One set of kernels. Every launch is counted by its name in `launched`."""

    split: int
    """Keys of a split: a row's splits begin at multiples of it. A multiple of KEY_BLOCK."""
    tile: int
    """Rows times queries of a key head in an attention unit."""
    types: frozenset[torch.dtype] = frozenset((torch.bfloat16, torch.float16))
    """Types of rows."""
    on_gpu = True
    """Whether what is launched goes on by itself."""
    few_rows: int
    """Up to so many rows `linear_splits` is faster, beyond them `linear_long`."""
    recording = False
    """Whether what is launched runs once more. Ranks exchange nothing meanwhile: which steps are
    recorded is each one's own affair."""

    def __init__(self) -> None:
        """Nothing was launched."""
        self.launched: Counter[str] = Counter()

    def launch(self, name: str) -> None:
        """Every launch goes through here, before it is made."""
        self.launched[name] += 1

    @abstractmethod
    def recorder(self) -> Recorder | None:
        """Remembers what is launched, for one model; None: everything is launched each time."""

    @abstractmethod
    def segment_of(self, outputs: int, inputs: int, bits: int) -> int:
        """`GpuWeights.segment` of matrices of this shape on this device: from a table, else by a
        formula; never by timing.

        Args:
            outputs: N.
            inputs: K.
            bits: 0: floats.
        """

    def gather(self, ranks: Devices, x: Tensor, found_RX: Tensor) -> None:
        """`Devices.gather_into`, of contiguous tensors."""
        self.launch("gather")
        if not self.recording:
            ranks.gather_into(x, found_RX)

    def exchange(self, ranks: Devices, x_RX: Tensor, found_RX: Tensor) -> None:
        """`Devices.exchange_into`, of contiguous tensors."""
        self.launch("exchange")
        if not self.recording:
            ranks.exchange_into(x_RX, found_RX)

    @abstractmethod
    def linear_splits(self, x_TK: Tensor, w: GpuWeights, parts_PTN: Tensor) -> None:
        """parts[p] = x W^T over segment p, float32 [w.segments, T, N]; x may be strided by rows."""

    @abstractmethod
    def linear_long(self, x_TK: Tensor, w: GpuWeights, parts_1TN: Tensor) -> None:
        """The segments' sums added in order, float32 [1, T, N]: the bits of adding the parts of
        `linear_splits`."""

    @abstractmethod
    def gate_up(
        self, x_TK: Tensor, w: GpuWeights, bias_N: Tensor | None, activation: int, y_TF: Tensor
    ) -> None:
        """act(gate) * up in x's type; w [2 F, K] holds gate, then up.

        Both sums (segments in order, then the bias) are rounded to x's type, so is act(gate), so is
        the product. Activations: `ops.activation.COMPILED`.
        """

    @abstractmethod
    def add_parts(
        self,
        parts_PTN: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
        y_TN: Tensor,
        weights_TP: Tensor | None = None,
    ) -> None:
        """y = parts, times weights if there are some, in order + bias + residual in float32,
        rounded once to y's type. One part alone may be of another type, and is copied."""

    @abstractmethod
    def embed(self, tokens_T: Tensor, table_VD: Tensor, scale: float, stream_TD: Tensor) -> None:
        """Rows of the table; times scale (1.0: as they are), rounded. `scale` is in their type."""

    @abstractmethod
    def add_norm(self, on: AddNorm) -> None:
        """y = parts, times weights if there are some, in order + bias in float32. Without `after_D`
        stream = round(y + stream); with it y is rounded, then stream = round(round(y / rms(y) *
        after) + stream). No parts: the stream stays. normed = round(stream / rms(stream) * weight);
        no weight: `normed_TD` is not written. rms(y) = sqrt(mean(y ** 2) + eps), in float32;
        weights are in any float type.
        """

    @abstractmethod
    def pair_tile(self, pairs: int, experts: int, bits: int) -> int:
        """Pairs of a block, of so many of a pass; `bits` of gates and ups, 0: floats."""

    @abstractmethod
    def choose_experts(
        self, parts_PTX: Tensor, choice: ExpertChoice, live_1: Tensor, pairs: ExpertPairs
    ) -> None:
        """The experts of each row, as `ops.routing` chooses and weighs them.

        Args:
            parts_PTX: the router's, of E experts and, if there is one, the shared expert's gate,
                whose sigmoid is its weight; without a gate that is 1.
            choice: what is made of their sum.
            live_1: int32; rows from this number on are padding and have no expert.
            pairs: `weights_TS` and `experts_TU` are written.
        """

    @abstractmethod
    def sort_pairs(self, pairs: ExpertPairs, experts: int, read_1: Tensor) -> None:
        """Order and blocks of the pairs; `read_1`: int32, how many experts have some."""

    @abstractmethod
    def experts_gate_up(
        self, x_TK: Tensor, of: ExpertMatrices, experts: Experts, pairs: ExpertPairs, y_PF: Tensor
    ) -> None:
        """`gate_up` of each pair by its expert. `clamped`: (up + 1) * gate * sigmoid(1.702 * gate)
        of both clamped, rounded once. Experts without pairs are not read."""

    @abstractmethod
    def experts_down(
        self, x_PF: Tensor, of: ExpertMatrices, experts: Experts, pairs: ExpertPairs, y_STN: Tensor
    ) -> None:
        """Sums and biases of each pair by its expert, float32, by slot and row."""

    @abstractmethod
    def turn_and_write(self, on: Heads) -> None:
        """x = round(parts in order + bias). Queries and keys: x / rms(x) * weight if there is a
        norm, then turned by place (x * cos + swapped * sin), in float32, rounded once. Then queries
        are multiplied by their scale and rounded. Values are x. In int8 a head is rounded as
        `ops.quantize_kv` does.
        """

    @abstractmethod
    def attend(self, on: AttentionCall) -> None:
        """Causal attention of the units. Query g of key head k is head g * L + k, or, `by_key`,
        head k * H / L + g.

        Blocks of KEY_BLOCK keys from multiples of it on are weighed in order by the online softmax:
        scores, masks and exponents in float32, weights rounded to q's type before they are summed
        and multiplied with values. Keys a row does not see change nothing of it, not a bit. Of a
        tree, blocks below that of `start` are shared; from there on each branch has blocks of its
        own, over its logical places. `step.splits` unset: `out_TD` is written, else `partials`,
        but of a row none of splits beyond its own place, whose numbers are another row's.
        """

    @abstractmethod
    def combine(self, on: AttentionCall) -> None:
        """Each row's partial results added in order of their keys, from the first split that it
        sees on, then its sink, and divided; rounded once."""

    @abstractmethod
    def take_rows(self, x_TD: Tensor, rows_R: Tensor, y_RD: Tensor) -> None:
        """y = x[rows]."""

    @abstractmethod
    def keep(self, logits_RV: Tensor, how_R4: Tensor, kept_R3: Tensor) -> None:
        """What min_p, top_k and top_p leave of each row, as `ops.logits.narrow` has it.

        An id weighs whole units of 2 ** -MASS_BITS of the best, so that sums have one value in any
        order: which id is the last within top_p is not left to rounding, but for that of exp.

        Args:
            logits_RV: float32.
            how_R4: float32: temperature (0: nothing is left out), log of min_p, top_p, top_k, as in
                `ops.drawing.Drawing`.
            kept_R3: float32 results: the best of l / temperature, the sum of e ** (l / temperature
                - best) of all that are kept, the least that is kept.
        """

    @abstractmethod
    def draw(self, on: Draw) -> None:
        """The token of each row: the best id, the lowest of equals, of l / temperature + noise."""

    @abstractmethod
    def accept(self, drafted: Drafted, found_S2: Tensor, *, block: bool) -> None:
        """Weigh drafts one by one, or as blocks (`ops.block_verification`): how many of each chain
        stay, and the token after them, drawn from what a rejected draft leaves; int32.

        Where two sides of a test are within rounding of each other, and where nothing is left, the
        token is UNDECIDED.
        """

    @abstractmethod
    def cap(self, logits_RV: Tensor, softcap: float) -> None:
        """In place: softcap * tanh(logits / softcap), float32."""

    @abstractmethod
    def chance(self, logits_RV: Tensor, chance_R: Tensor) -> None:
        """float32 probability of each row's best id."""
