"""The GPU's kernels in PyTorch's operations: what Triton's are tested against, and what takes their
place on a CPU under FORETOKEN_KERNELS=twins, so that everything above them runs without a GPU.

Slow. Products are made in tiles of fixed shape, so that a row's bits are its own as far as the
matrix library below keeps them; a test asks it.
"""

from collections.abc import Callable, Iterator
from functools import partial, wraps
from typing import Any, NamedTuple, final

import torch
from torch import Tensor
from torch.nn.functional import pad

from foretoken.kernels.gpu_kernels import (
    KEY_BLOCK,
    MASS_BITS,
    AddNorm,
    AttentionCall,
    Drafted,
    Draw,
    ExpertChoice,
    ExpertMatrices,
    ExpertPairs,
    GpuKernels,
    GpuWeights,
    Heads,
    Recorder,
)
from foretoken.ops.activation import ACTIVATIONS, COMPILED, clamped_swish, sigmoid
from foretoken.ops.block_verification import BlockTests, keep_blocks
from foretoken.ops.noise import KeyedNoise
from foretoken.ops.quantize_kv import numbers_and_scales, quantize_kv
from foretoken.ops.rejection import acceptable, leading, residual
from foretoken.ops.routing import route
from foretoken.ops.sampling import draw
from foretoken.shape.mixtures.experts import Experts

_TILE = 16
_ACTIVATIONS = {number: function for function, number in COMPILED.items()}


@final
class TwinKernels(GpuKernels):
    """Everything by PyTorch, on any device."""

    split = 2 * KEY_BLOCK
    tile = _TILE
    few_rows, on_gpu = 16, False
    types = frozenset((torch.float32, torch.bfloat16, torch.float16))

    def __init__(self) -> None:
        """Nothing is recorded."""
        super().__init__()
        self.calls: list[Callable[[], None]] | None = None
        self.seen: dict[Any, _Seen] | None = None
        """What rows see, while calls are played: layers of a pass share it."""

    def recorder(self) -> Recorder:
        """A list of calls."""
        return _Calls(self)

    def segment_of(self, outputs: int, inputs: int, bits: int) -> int:
        """Several segments already of small matrices, so that tests have them."""
        return 2 * KEY_BLOCK if outputs < 4 * inputs and inputs % (2 * KEY_BLOCK) == 0 else inputs

    def linear_splits(self, x_TK: Tensor, w: GpuWeights, parts_PTN: Tensor) -> None:
        parts_PTN.copy_(_parts(x_TK, w))

    def linear_long(self, x_TK: Tensor, w: GpuWeights, parts_1TN: Tensor) -> None:
        parts_1TN.copy_(_sum(_parts(x_TK, w))[None])

    def gate_up(
        self, x_TK: Tensor, w: GpuWeights, bias_N: Tensor | None, activation: int, y_TF: Tensor
    ) -> None:
        both_TF = _sum(_parts(x_TK, w), bias_N).to(y_TF.dtype)
        gate_TF, up_TF = both_TF.chunk(2, -1)
        torch.mul(_ACTIVATIONS[activation](gate_TF), up_TF, out=y_TF)

    def add_parts(
        self,
        parts_PTN: Tensor,
        bias_N: Tensor | None,
        residual_TN: Tensor | None,
        y_TN: Tensor,
        weights_TP: Tensor | None = None,
    ) -> None:
        sum_TN = _sum(parts_PTN, bias_N, weights_TP)
        y_TN.copy_(sum_TN if residual_TN is None else sum_TN + residual_TN.float())

    def embed(self, tokens_T: Tensor, table_VD: Tensor, scale: float, stream_TD: Tensor) -> None:
        stream_TD.copy_(table_VD.index_select(0, tokens_T))
        if scale != 1.0:
            stream_TD.mul_(scale)

    def add_norm(self, on: AddNorm) -> None:
        parts_PTD, stream_TD = on.parts_PTD, on.stream_TD
        if parts_PTD is not None:
            y_TD = _sum(parts_PTD, on.bias_D, on.weights_TP)
            if on.after_D is not None:
                y_TD = _norm(y_TD.to(stream_TD.dtype).float(), on.after_D, on.eps)
                y_TD = y_TD.to(stream_TD.dtype).float()
            stream_TD.copy_(y_TD + stream_TD.float())
        if on.weight_D is not None:
            on.normed_TD.copy_(_norm(stream_TD.float(), on.weight_D, on.eps))
        for kept, rows_TD in ((on.kept, stream_TD), (on.kept_normed, on.normed_TD)):
            if kept is not None:
                kept.slots_SD.index_copy_(0, kept.slots_T.long(), rows_TD)

    def pair_tile(self, pairs: int, experts: int, bits: int) -> int:
        return _TILE

    def choose_experts(
        self, parts_PTX: Tensor, choice: ExpertChoice, live_1: Tensor, pairs: ExpertPairs
    ) -> None:
        experts = choice.experts
        products_TX, used = _sum(parts_PTX), experts.used
        if choice.bias_E is not None:
            products_TX = products_TX.clone()
            products_TX[:, : experts.count] += choice.bias_E.float()
        products_TX = products_TX.to(choice.dtype).float()
        found = route(
            products_TX[:, : experts.count].contiguous(), used, experts.routing,
            choice.choice_bias_E,
        )  # fmt: skip
        pairs.weights_TS[:, :used], pairs.experts_TU[:] = found
        pairs.experts_TU[int(live_1) :] = experts.count
        pairs.weights_TS[:, used:] = 1.0
        if products_TX.shape[1] > experts.count:
            pairs.weights_TS[:, used:] = sigmoid(products_TX[:, experts.count :])

    def sort_pairs(self, pairs: ExpertPairs, experts: int, read_1: Tensor) -> None:
        of_P, order_P = pairs.experts_TU.flatten().sort(stable=True)
        pairs.order_P.copy_(order_P)
        counts = of_P.bincount(minlength=experts)[:experts].cpu().numpy()
        blocks, first = [], 0
        for number, count in enumerate(counts):
            for at in range(0, count, pairs.tile):
                blocks.append((number, first + at, min(count - at, pairs.tile)))
            first += count
        pairs.blocks_B3[:, 2] = 0
        if blocks:
            pairs.blocks_B3[: len(blocks)] = torch.tensor(blocks, dtype=torch.int32)
        read_1.fill_(int((counts > 0).sum()))

    def experts_gate_up(
        self, x_TK: Tensor, of: ExpertMatrices, experts: Experts, pairs: ExpertPairs, y_PF: Tensor
    ) -> None:
        for pairs_N, own, bias_N in _blocks(of, experts.count, pairs):
            both_NF = _sum(_parts(x_TK[pairs_N // experts.used], own), bias_N).to(y_PF.dtype)
            if experts.activation == "clamped":
                y_PF[pairs_N] = clamped_swish(both_NF, experts.limit)
            else:
                gate_NF, up_NF = both_NF.chunk(2, -1)
                y_PF[pairs_N] = ACTIVATIONS[experts.activation](gate_NF) * up_NF

    def experts_down(
        self, x_PF: Tensor, of: ExpertMatrices, experts: Experts, pairs: ExpertPairs, y_STN: Tensor
    ) -> None:
        for pairs_N, own, bias_N in _blocks(of, experts.count, pairs):
            y_N = _sum(_parts(x_PF[pairs_N], own), bias_N)
            y_STN[pairs_N % experts.used, pairs_N // experts.used] = y_N

    def turn_and_write(self, on: Heads) -> None:
        parts_PTA, bias_A, norm, rotary, places_T, slots_T, q_THh, layer = on
        rows, heads, size = q_THh.shape
        both = layer.numbers_SLh.shape[1]
        x_TXh = _sum(parts_PTA, bias_A).to(q_THh.dtype).view(rows, heads + both, size)
        turned = x_TXh[:, : heads + both // 2].float()
        if norm is not None:
            normed = []
            for x, weight in ((turned[:, :heads], norm.query), (turned[:, heads:], norm.key)):
                whole = x.flatten(1) if norm.whole else x
                normed.append(_norm(whole, weight, norm.eps).view(rows, -1, size))
            turned = torch.cat(normed, 1)
        cos, sin = (
            table.index_select(0, places_T)[:, None].float()
            for table in (rotary.cos_XW, rotary.sin_XW)
        )
        width = cos.shape[-1]
        head = turned[..., :width]
        head = head * cos + head.roll(width // 2, -1) * sin
        turned = torch.cat((head, turned[..., width:]), -1).to(q_THh.dtype)
        q_THh.copy_(turned[:, :heads])
        if rotary.query_scale_X is not None:
            q_THh.mul_(rotary.query_scale_X.index_select(0, places_T)[:, None, None])
        stored = torch.cat((turned[:, heads:], x_TXh[:, heads + both // 2 :]), 1)
        slots = slots_T.long()
        if layer.scales_SL is not None:
            stored, scales = numbers_and_scales(quantize_kv(stored, torch.int8))
            scales_TL = scales.contiguous().view(torch.float32).squeeze(-1)
            layer.scales_SL.index_copy_(0, slots, scales_TL)
        layer.numbers_SLh.index_copy_(0, slots, stored)

    def attend(self, on: AttentionCall) -> None:
        key = on.step.units_U.data_ptr(), on.shape, on.step.lasts_T is None
        seen = None if self.seen is None else self.seen.get(key)
        if seen is None:
            seen = _Seen(on, self)
            if self.seen is not None:
                self.seen[key] = seen
        if len(seen.rows_UM):
            _attend(on, seen, self.tile)

    def combine(self, on: AttentionCall) -> None:
        _, _, shape, step, partials, out_TD, sinks_H = on
        heads, size = partials.sums_XHh.shape[1:]
        places_T, bases_T = step.places_T.long(), step.bases_T.long()
        lasts_T = places_T if step.lasts_T is None else step.lasts_T.long()
        lowest_T = (places_T - shape.window + 1).clamp(min=0) if shape.window else 0 * places_T
        rows = len(places_T)
        top = torch.full((rows, heads), -torch.inf, device=out_TD.device)
        mass, sums = torch.zeros_like(top), torch.zeros(rows, heads, size, device=out_TD.device)
        for split in range(int(lasts_T.max()) // self.split + 1):
            here = (lowest_T // self.split <= split) & (split <= lasts_T // self.split)
            at_T = torch.where(here, bases_T + split, 0)
            t, w = partials.top_mass_XH2[at_T].unbind(-1)
            new = torch.maximum(top, t)
            safe = torch.where(new == -torch.inf, 0.0, new)
            a, b = (top - safe).exp(), (t - safe).exp()
            here_1 = here[:, None]
            more = sums * a[..., None] + partials.sums_XHh[at_T] * b[..., None]
            sums = torch.where(here_1[..., None], more, sums)
            mass = torch.where(here_1, mass * a + w * b, mass)
            top = torch.where(here_1, new, top)
        out_TD.copy_(_divided(sums, mass, top, sinks_H).flatten(1))

    def take_rows(self, x_TD: Tensor, rows_R: Tensor, y_RD: Tensor) -> None:
        y_RD.copy_(x_TD.index_select(0, rows_R))

    def keep(self, logits_RV: Tensor, how_R4: Tensor, kept_R3: Tensor) -> None:
        heat, min_p, top_p, top_k = how_R4.unsqueeze(-1).unbind(1)
        x_RV = _scaled(logits_RV, heat).sort(dim=-1, descending=True).values
        best_R1 = x_RV[:, :1]
        weight_RV = (x_RV - best_R1.clamp(min=-1e38)).exp() * 2.0**MASS_BITS
        weight_RV = weight_RV.long()
        last = top_k.long().clamp(1, x_RV.shape[1]) - 1
        kth_R1 = x_RV.gather(1, last).masked_fill(
            (top_k < 1) | (top_k >= x_RV.shape[1]), -torch.inf
        )
        least_R1 = torch.maximum(best_R1 + min_p, kth_R1).masked_fill(heat == 0, -torch.inf)
        weighs_RV = weight_RV.masked_fill(x_RV < least_R1, 0)
        before_RV = weighs_RV.cumsum(-1) - weighs_RV
        bar_R1 = (top_p.double() * weighs_RV.sum(-1, keepdim=True).double()).long()
        last_R1 = (before_RV < bar_R1).sum(-1, keepdim=True).clamp(min=1) - 1
        cut_R1 = x_RV.gather(1, last_R1).masked_fill((top_p > 1) | (heat == 0), -torch.inf)
        least_R1 = torch.maximum(least_R1, cut_R1)
        mass_R1 = weight_RV.masked_fill(x_RV < least_R1, 0).sum(-1, keepdim=True)
        torch.cat((best_R1, mass_R1.float() * 0.5**MASS_BITS, least_R1), 1, out=kept_R3)

    def draw(self, on: Draw) -> None:
        logits_RV, keys_R2, how_R4, tokens_R, names_V, kept_R3 = on
        rows, count = logits_RV.shape
        noise = KeyedNoise(count, logits_RV.device, rows * count)
        ids = torch.arange(count, device=logits_RV.device) if names_V is None else names_V
        exponential_RV = noise.exponential_at(keys_R2, ids.expand(rows, -1)).log_()
        x_RV = _scaled(logits_RV, how_R4[:, :1])
        score_RV = torch.where(how_R4[:, :1] > 0, x_RV - exponential_RV, logits_RV)
        if kept_R3 is not None:
            score_RV = score_RV.masked_fill(x_RV < kept_R3[:, 2:], -torch.inf)
        best_R = score_RV.argmax(-1)
        self.launch("pick")
        tokens_R.copy_(best_R if names_V is None else names_V[best_R])

    def accept(self, drafted: Drafted, found_S2: Tensor, *, block: bool) -> None:
        kept_P3 = torch.empty_like(drafted.how_P4[:, :3])
        self.keep(drafted.logits_PV, drafted.how_P4, kept_P3)
        x_PV = _scaled(drafted.logits_PV, drafted.how_P4[:, :1])
        x_PV = x_PV.masked_fill(x_PV < kept_P3[:, 2:], -torch.inf)
        noise = KeyedNoise(x_PV.shape[1], x_PV.device, x_PV.shape[1])
        for found, (first, count, row, at) in zip(found_S2, drafted.spans_S4.numpy(), strict=True):
            own = slice(first, first + count)
            ids, uniforms = (x[own].numpy().tolist() for x in (drafted.ids_K, drafted.uniforms_K))
            p_CV = x_PV[row : row + count].softmax(-1)
            q_CV = None if drafted.probs_XV is None else drafted.probs_XV[at : at + count]
            kept, weight = leading(acceptable(p_CV, q_CV, ids, uniforms)), 1.0
            if block:
                blocks = keep_blocks(
                    BlockTests(
                        ids_K=ids, uniforms_K=uniforms, lengths_S=[count], target_KV=p_CV,
                        drafted_KV=q_CV,
                    )
                )  # fmt: skip
                kept, weight = blocks.kept_S[0], blocks.weight_S[0]
            last, that = slice(row + kept, row + kept + 1), slice(kept, kept + 1)
            x_1V = x_PV[last]
            if kept < count:
                q_1V = None if q_CV is None else q_CV[that]
                x_1V = residual(x_1V, p_CV[that], q_1V, ids[that], weights_S=[weight])
            found[0], found[1] = kept, draw(x_1V, drafted.keys_P2[last], noise)[0]

    def cap(self, logits_RV: Tensor, softcap: float) -> None:
        logits_RV.div_(softcap).tanh_().mul_(softcap)

    def chance(self, logits_RV: Tensor, chance_R: Tensor) -> None:
        chance_R.copy_((logits_RV.amax(-1) - logits_RV.logsumexp(-1)).exp())


def _recorded(function: Callable[..., None]) -> Callable[..., None]:
    """The call is kept, too, while calls are."""

    @wraps(function)
    def called(self: TwinKernels, *args: Any, **kwargs: Any) -> None:
        call = partial(compute, function, self, *args, **kwargs)
        if self.calls is not None:
            self.calls.append(call)
        call()

    return called


def compute(function: Callable[..., None], of: TwinKernels, *args: Any, **kwargs: Any) -> None:
    """Do what a kernel does; whatever PyTorch is asked in here is the kernel's affair."""
    if function.__name__ in _KERNELS:
        of.launch(function.__name__)
    function(of, *args, **kwargs)


_KERNELS = GpuKernels.__abstractmethods__ - {"recorder", "segment_of", "pair_tile"}
for _name in _KERNELS | {"gather", "exchange"}:
    setattr(TwinKernels, _name, _recorded(getattr(TwinKernels, _name)))


@final
class _Calls:
    """What a CUDA graph does: the same calls on the same tensors, whatever is in them by then."""

    def __init__(self, kernels: TwinKernels) -> None:
        self._kernels = kernels

    def record(self, run: Callable[[], None]) -> Callable[[], None]:
        assert self._kernels.calls is None, "one at a time"
        calls: list[Callable[[], None]] = []
        self._kernels.calls, self._kernels.recording = calls, True
        try:
            run()
        finally:
            self._kernels.calls, self._kernels.recording = None, False

        def play() -> None:
            self._kernels.seen = {}
            try:
                for call in calls:
                    call()
            finally:
                self._kernels.seen = None

        return play


class _KeyBlock(NamedTuple):
    """KEY_BLOCK keys of each unit."""

    slots_X: Tensor
    """Where there is none: of the first row, since those of others may hold what is no number."""
    sees_U1MN: Tensor
    """1.0 where rows times queries see them, else 0.0: PyTorch has no fast mask."""


class _Seen:
    """What U units of attention see, of M rows each, padded; numbers alone, the same in all layers
    of a shape."""

    def __init__(self, on: AttentionCall, kernels: GpuKernels) -> None:
        shape, step = on.shape, on.step
        self._shape, self._step = shape, step
        self._tile, self._split = kernels.tile, kernels.split
        self._group = shape.num_heads // shape.num_kv_heads
        units = step.units_U[step.units_U[:, 1] > 0].long()
        if step.trees:
            # Each branch of a tree has a unit of its own, over its logical places.
            branches_U = units[:, 8].clamp(min=1)
            numbers_U = torch.arange(len(units), device=units.device)
            numbers_U = numbers_U.repeat_interleave(branches_U)
            firsts_U = (branches_U.cumsum(0) - branches_U)[numbers_U]
            units = units[numbers_U]
            run_U = units[:, 7] + torch.arange(len(units), device=units.device) - firsts_U
            self._run_U1 = torch.where(units[:, 8] > 0, run_U, -1)[:, None]
        self._units = units
        at_M = torch.arange(kernels.tile // self._group, device=units.device)
        there_UM = at_M < units[:, 1:2]
        rows_UM = self.rows_UM = torch.where(there_UM, units[:, :1] + at_M, 0)
        if step.trees:
            there_UM &= (self._run_U1 < 0) | (step.runs_T[rows_UM] == self._run_U1)
        self._place_UM = torch.where(there_UM, step.places_T[rows_UM], -1)
        self._last_UM = self._place_UM
        if step.lasts_T is not None:
            self._last_UM = torch.where(there_UM, step.lasts_T[rows_UM], -1)
        if step.splits:
            there_UM = there_UM & (units[:, 5:6] * self._split <= self._last_UM)
        self.finished_X = there_UM.flatten().nonzero().squeeze(1)
        """The rows of units whose results are wanted, and where they go."""
        self.to_X = rows_UM[there_UM]
        if step.splits:
            self.to_X = (step.bases_T.long()[rows_UM] + units[:, 5:6])[there_UM]
        ends = range(0, self._split, KEY_BLOCK) if len(units) else ()
        self.blocks = [block for block in map(self._block, ends) if block is not None]

    def _block(self, at: int) -> _KeyBlock | None:
        """The block of keys that begins so far behind the beginning of each unit's split."""
        shape, units = self._shape, self._units
        size, start_U1 = shape.page_size, units[:, 2:3]
        block_N = at + torch.arange(KEY_BLOCK, device=units.device)
        places_UN = units[:, 5:6] * self._split + block_N
        begin_U1 = units[:, 6:7] - shape.window + 1 if shape.window else 0
        there_UN = (places_UN >= begin_U1) & (places_UN < units[:, 3:4])
        if not there_UN.any():
            return None
        stored_UN = places_UN
        if self._step.trees:
            inside_UN, tails_XJ = places_UN - start_U1, self._step.tails_XJ.long()
            depth = inside_UN.clamp(0, tails_XJ.shape[1] - 1)
            behind_UN = (self._run_U1 >= 0) & (inside_UN >= 0)
            tail_UN = start_U1 + tails_XJ[self._run_U1.clamp(min=0), depth]
            stored_UN = torch.where(behind_UN, tail_UN, places_UN)
        stored_UN = torch.where(there_UN, stored_UN, units[:, 6:7])
        page_UN = self._step.pages_P[units[:, 4:5] + stored_UN // size].long()
        seen_UMN = there_UN[:, None] & (places_UN[:, None] <= self._last_UM[..., None])
        if shape.window:
            seen_UMN &= places_UN[:, None] > self._place_UM[..., None] - shape.window
        slots_UN = page_UN * size + stored_UN % size
        sees_UMN = seen_UMN.float().repeat_interleave(self._group, 1)
        if (left := self._tile - sees_UMN.shape[1]) > 0:
            sees_UMN = pad(sees_UMN, (0, 0, 0, left))
        return _KeyBlock(slots_UN.flatten(), sees_UMN[:, None])


def _attend(on: AttentionCall, seen: _Seen, tile: int) -> None:
    """Units over their blocks of keys, in order."""
    q_THh, layer, shape, step, partials, out_TD, sinks_H = on
    heads, kv, dtype = shape.num_heads, shape.num_kv_heads, q_THh.dtype
    (count, rows), group = seen.rows_UM.shape, heads // kv
    q = q_THh.index_select(0, seen.rows_UM.flatten()).float()
    if shape.by_key:
        q = q.view(count, rows, kv, group, -1).permute(0, 2, 1, 3, 4)
    else:
        q = q.view(count, rows, group, kv, -1).permute(0, 3, 1, 2, 4)
    q_ULMh, full, size = q.flatten(2, 3), rows * group, q.shape[-1]
    if full < tile:
        q_ULMh = pad(q_ULMh, (0, 0, 0, tile - full))
    top_ULM = q_ULMh.new_full(q_ULMh.shape[:3], -torch.inf)
    # As many columns of ones as fill a tile of the library: at its edges a row's place counts.
    ones = q_ULMh.new_ones(count, kv, KEY_BLOCK, _TILE - size % _TILE)
    sums_ULMh = q_ULMh.new_zeros(*q_ULMh.shape[:3], size + ones.shape[-1])
    for slots_X, sees_U1MN in seen.blocks:
        kv_XLh = layer.numbers_SLh.index_select(0, slots_X)
        if layer.scales_SL is not None:
            kv_XLh = kv_XLh.float() * layer.scales_SL.index_select(0, slots_X)[..., None]
        kv_UNLh = kv_XLh.to(dtype).float().view(count, KEY_BLOCK, 2 * kv, size)
        keys, values = kv_UNLh.transpose(1, 2).split(kv, 1)
        s = _products(q_ULMh, keys.mT).mul_(shape.scale)
        if shape.softcap:
            t = (-2.0 * (s / shape.softcap).abs()).exp()
            t = (1.0 - t) / (1.0 + t)
            s = shape.softcap * torch.where(s < 0, -t, t)
        new = torch.maximum(top_ULM, (s + (1.0 - 1.0 / sees_U1MN)).amax(-1))
        safe = new.clamp(min=torch.finfo(torch.float32).min)
        alpha = (top_ULM - safe).exp_()[..., None]
        # What is not seen weighs 0 and adds it: a row that sees nothing of the block stays.
        p = s.sub_(safe[..., None]).clamp_(max=0.0).exp_().mul_(sees_U1MN).to(dtype).float()
        more = _products(p, torch.cat((values, ones), -1))
        sums_ULMh, top_ULM = more.add_(sums_ULMh.mul_(alpha)), new

    def wanted(x: Tensor) -> Tensor:
        """[U, L, M * G, ...] by row: [X, H, ...]."""
        x = x[:, :, :full].unflatten(2, (rows, group)).movedim(1, 2 if shape.by_key else 3)
        return x.flatten(0, 1).index_select(0, seen.finished_X).flatten(1, 2)

    top_XH, sums_XHh = wanted(top_ULM), wanted(sums_ULMh)
    mass_XH, sums_XHh = sums_XHh[..., size], sums_XHh[..., :size]
    if step.splits:
        partials.sums_XHh.index_copy_(0, seen.to_X, sums_XHh)
        partials.top_mass_XH2.index_copy_(0, seen.to_X, torch.stack((top_XH, mass_XH), -1))
    else:
        y_XHh = _divided(sums_XHh, mass_XH, top_XH, sinks_H)
        out_TD.index_copy_(0, seen.to_X, y_XHh.flatten(1).to(out_TD.dtype))


def _scaled(logits_RV: Tensor, heat_R1: Tensor) -> Tensor:
    """Logits over the temperature; over 1 where that is 0."""
    return logits_RV / torch.where(heat_R1 > 0, heat_R1, 1.0)


def _divided(sums: Tensor, mass: Tensor, top: Tensor, sinks_H: Tensor | None) -> Tensor:
    """Sums [..., H, h] over the mass; a sink is one more key, whose value is 0."""
    if sinks_H is not None:
        higher = torch.maximum(top, sinks_H)
        shrink = (top - higher).exp()
        sums, mass = sums * shrink[..., None], mass * shrink + (sinks_H - higher).exp()
    return sums / torch.where(mass == 0, 1.0, mass)[..., None]


def _products(a: Tensor, b: Tensor) -> Tensor:
    """Products [..., M, K] [..., K, N] of matrices of one shape each, however many."""
    found = torch.bmm(a.flatten(0, 1).contiguous(), b.flatten(0, 1).contiguous())
    return found.view(*a.shape[:2], *found.shape[1:])


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / rms(x) * weight, float32."""
    r = x.square().mean(-1, keepdim=True).add_(eps).sqrt_().reciprocal_()
    return (x * r).mul_(weight.float())


def _sum(
    parts_PTN: Tensor, bias_N: Tensor | None = None, weights_TP: Tensor | None = None
) -> Tensor:
    """Parts in order, times weights if there are some, and the bias."""
    if weights_TP is not None:
        parts_PTN = parts_PTN * weights_TP.T[..., None]
    total, *others = parts_PTN.unbind()
    for part in others:
        total = total + part
    return total if bias_N is None else total + bias_N.float()


def _parts(x_TK: Tensor, w: GpuWeights) -> Tensor:
    """float32 [P, T, N], tile by tile."""
    rows, tiles = len(x_TK), -(-len(x_TK) // _TILE)
    padded = x_TK.new_zeros((tiles * _TILE, w.inputs), dtype=torch.float32)
    padded[:rows] = x_TK
    columns_XKT = padded.view(tiles, _TILE, -1).transpose(1, 2).contiguous()
    found_PXNT = padded.new_empty(w.segments, tiles, w.outputs, _TILE)
    for part, at in enumerate(range(0, w.inputs, w.segment)):
        stop = min(at + w.segment, w.inputs)
        matrix = _segment(w, at, stop)
        if w.group:
            matrix = matrix.to(x_TK.dtype).float()
        for columns_KT, found_NT in zip(columns_XKT[:, at:stop], found_PXNT[part], strict=True):
            torch.mm(matrix, columns_KT, out=found_NT)
    return found_PXNT.transpose(2, 3).flatten(1, 2)[:, :rows]


def _blocks(
    of: ExpertMatrices, experts: int, pairs: ExpertPairs
) -> Iterator[tuple[Tensor, GpuWeights, Tensor | None]]:
    """Of each block its pairs, and its expert's matrix and bias."""
    w = of.weights
    for expert, first, count in pairs.blocks_B3.cpu().numpy():
        if not count:
            continue
        rows = slice(*(w.outputs // experts * number for number in (expert, expert + 1)))
        bias_N = None if of.bias_X is None else of.bias_X[rows]
        yield pairs.order_P[first : first + count].long(), w.part(rows), bias_N


def _segment(w: GpuWeights, first: int, stop: int) -> Tensor:
    """Columns of the matrix in float32, integers multiplied out."""
    if not w.bits:
        return w.values_NK[:, first:stop].float()
    assert w.scale_NG is not None, "integers have scales"
    group = w.group or w.inputs
    scale_NK = w.scale_NG.float().repeat_interleave(group, 1)[:, first:stop]
    values_NK, zero = w.values_NK, 0.0
    if w.bits == 4:
        bytes_NGH, zero = values_NK.unflatten(1, (-1, group // 2)), 8.0
        values_NK = torch.stack((bytes_NGH & 15, bytes_NGH >> 4), 2).flatten(1)
    values_NK = values_NK[:, first:stop].float()
    if w.zero_NG is not None:
        zeros_NK = w.zero_NG.float().repeat_interleave(group, 1)[:, first:stop]
        return (values_NK - zeros_NK) * scale_NK
    return (values_NK - zero) * scale_NK
