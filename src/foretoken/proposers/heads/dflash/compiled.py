"""Block heads on the compiled kernels: what is new of the context and whole blocks in one call into
C (native/block.h), or in one recording of a GPU's launches.

The network in PyTorch is the twin, which trains and serves wherever some part has no kernel; a test
compares them. Owns the packed layers and the buffers of a call, kept between calls.
"""

import ctypes
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, final

import torch
from torch import Tensor, nn

from foretoken.backend import backend_for
from foretoken.kernels.linear import TYPES
from foretoken.kernels.structures import (
    UNIT_INTS,
    FtBlockCall,
    FtBlockKind,
    FtBlockLayer,
    FtBlockModel,
    address_of,
)
from foretoken.kv.store import KVStore
from foretoken.layers.decoder_layer import Layer, LayerKind
from foretoken.layers.norm import RMSNorm
from foretoken.models.gpu.captured import CapturedSteps, capture
from foretoken.models.gpu.decoder import BlockParts, DecoderParts
from foretoken.models.rollout import MOST_ROWS, DraftCall
from foretoken.models.tensors import RolledOut, RolloutPlan, SpanLayout
from foretoken.ops.attention import Attention, Geometry
from foretoken.ops.attention.gpu import GpuAttention
from foretoken.ops.attention.native import NativeAttention
from foretoken.ops.linear import KernelLinear, Linear
from foretoken.ops.linear.gpu import GpuLinear, WholeLinear, pack_for_gpu
from foretoken.proposers.heads.dflash.network import BlockHead
from foretoken.proposers.heads.dflash.shape import BlockPass, BlockView
from foretoken.proposers.heads.layer_builder import LayerBuilder
from foretoken.proposers.heads.linears import (
    HeadLinears,
    kernel_of,
    serve_linears,
    served_by,
)
from foretoken.proposers.heads.paged_head import RunnerParts
from foretoken.proposers.heads.parts import HeadAttention, HeadLayer, group_major
from foretoken.runtime.runner import slots_of

_I64, _PTR = ctypes.c_int64, ctypes.c_void_p


def compile_blocks(net: BlockHead, site: RunnerParts) -> "CompiledBlocks | RecordedBlocks | None":
    """The network on kernels, or None if some part has none."""
    like, kinds = site.features.slots_SF, _kinds(net, site)
    if kinds is None:
        return None  # Before any matrix is packed.
    native = {view: one for view, one in kinds.items() if isinstance(one, NativeAttention)}
    if not native:
        return _record_blocks(net, site, kinds)
    if like.dtype not in TYPES:
        return None
    serve_linears(net, net.tops, site.linears, tops_only=True)
    packed = _Packed(net, site.linears, list(native))
    if not packed.all_kernels(like.dtype):
        return None
    return CompiledBlocks(net, site, native, packed)


def _kinds(net: BlockHead, site: RunnerParts) -> dict[BlockView, Attention] | None:
    """The attention of each kind of layer; None: some have no kernel, or windows that end inside of
    a block on both sides."""
    found = dict[BlockView, Attention]()
    for view in net.shape.views:
        attention = site.attention(view.window)
        inside = 0 < (view.window or 0) < net.shape.block_size
        if inside or not isinstance(attention, NativeAttention | GpuAttention):
            return None
        found.setdefault(view, attention)
    return found


def _layer(
    module: HeadLayer,
    view: BlockView,
    build: LayerBuilder,
    around: tuple[Geometry, list[BlockView]],
) -> Layer:
    geometry, kinds = around
    return Layer(
        kind=kinds.index(view),
        attention_norm=build.norm(module.input_layernorm),
        attention=build.attention(module.self_attn, replace(geometry, window=view.window)),
        mlp_norm=build.norm(module.post_attention_layernorm),
        mlp=build.mlp(module.mlp),
    )


def _record_blocks(
    net: BlockHead, site: RunnerParts, kinds: dict[BlockView, Attention]
) -> "RecordedBlocks | None":
    """The network as a GPU's launches, or None if some part has none."""
    kernels, shape = backend_for(site.geometry.device).gpu, net.shape
    if kernels is None or net.follow is None or net.table.is_packed:
        return None
    build, like = LayerBuilder(shape.layer, site.linears), site.features.slots_SF
    serve_linears(net, net.tops, site.linears, tops_only=True)
    head = served_by(net.lm_head) if shape.own_head else site.target_head
    follow = net.follow  # With what serves by now.
    assert follow is not None, "asked before"
    mixer, added = site.linears.of([net.fc]), served_by(follow.linear)
    if not isinstance(head, GpuLinear) or not isinstance(mixer, GpuLinear):
        return None
    if added is not None and not isinstance(added, GpuLinear):
        return None
    if follow.linear is not None and added is None:
        return None
    judge = None
    if follow.judge is not None:
        weights_1K = follow.judge[:-1].to(like.dtype)[None]
        judge = WholeLinear(kernels, pack_for_gpu(kernels, weights_1K, in_one=True))
    norm = build.norm(net.norm)
    if shape.output_multiplier != 1.0:
        norm = RMSNorm(norm.weight_D.float() * shape.output_multiplier, norm.eps)
    parts = DecoderParts(
        embedding=net.table,
        scale=float(torch.tensor(shape.embedding_scale, dtype=like.dtype)),
        layers=tuple(
            _layer(one, view, build, (site.geometry, list(kinds)))
            for one, view in net.viewed_layers
        ),
        kinds=tuple(LayerKind(one, site.rotary) for one in kinds.values()),
        norm=norm,
        head=head,
        softcap=None,
        blocks=BlockParts(
            mixer=mixer,
            context_norm=build.norm(net.hidden_norm),
            features=site.features,
            whole=tuple(not view.causal for view in kinds),
            ids_N=None if net.target_ids is None else net.target_ids.contiguous(),
            vocab_size=site.vocab_size,
            shorts_VR=follow.shorts_VR,
            follow=added,
            judge=judge,
            judge_bias=0.0 if follow.judge is None else float(follow.judge[-1]),
        ),
    )
    steps = capture(parts, kernels, kernels.recorder())
    return None if steps is None else RecordedBlocks(steps, site.store, shape.first_row)


@final
@dataclass(frozen=True, slots=True)
class RecordedBlocks:
    """A network as a GPU's launches; `compile_blocks` makes it. Calls are those of
    `CompiledBlocks`."""

    steps: CapturedSteps
    store: KVStore
    first_row: int
    drafts: bool = True

    def feed(self, context: Sequence[SpanLayout]) -> None:
        self.steps.feed(context, self.store)

    def run(self, rows: BlockPass) -> Tensor:
        return self.steps.block_outputs(*rows, self.store)

    def draft(self, rows: BlockPass, plan: RolloutPlan) -> RolledOut | None:
        return self.steps.draft_blocks(*rows, plan, self.store, self.first_row)


class _Packed:
    """The layers of a network in C's memory, query heads in the order that attention wants."""

    def __init__(self, net: BlockHead, make: HeadLinears, kinds: list[BlockView]) -> None:
        self._layer, self._make = net.shape.layer, make
        self._kept: list[Any] = []
        self.layers = [self._pack(one, kinds.index(view)) for one, view in net.viewed_layers]
        self.mixer = make.of([net.fc])
        self._kept.append(self.mixer)

    def all_kernels(self, dtype: torch.dtype) -> bool:
        """Whether everything that was packed is a kernel from `dtype` to `dtype`."""
        linears = [one for one in self._kept if isinstance(one, Linear)]
        return all(
            isinstance(one, KernelLinear) and (one.dtype, one.out_dtype) == (dtype, dtype)
            for one in linears
        )

    def _pack(self, layer: HeadLayer, kind: int) -> FtBlockLayer:
        attention, mlp, make = layer.self_attn, layer.mlp, self._make
        q, k, v = attention.q_proj, attention.k_proj, attention.v_proj
        kv_bias_N = None if k.bias is None else torch.cat([k.bias, v.bias]).detach()
        return FtBlockLayer(
            q=self._keep(make.of([q], self._query_bias(attention), first=self._group_major)),
            kv=self._keep(make.of([k, v], kv_bias_N)),
            out=self._keep(make.back(attention.o_proj, self._group_major, self._layer.head_dim)),
            gate_up=self._keep(make.of([mlp.gate_proj, mlp.up_proj])),
            down=self._keep(make.of([mlp.down_proj], adds_residual=True)),
            attention_norm=self._norm(layer.input_layernorm),
            mlp_norm=self._norm(layer.post_attention_layernorm),
            query_norm=self._norm(attention.q_norm),
            key_norm=self._norm(attention.k_norm),
            kind=kind,
        )

    def _keep(self, linear: Linear) -> int | None:
        self._kept.append(linear)
        return linear.address if isinstance(linear, KernelLinear) else None

    def _norm(self, norm: nn.Module) -> int:
        weight = norm.get_parameter("weight")
        self._kept.append(weight)
        return weight.data_ptr()

    def _query_bias(self, attention: HeadAttention) -> Tensor | None:
        bias_N: Tensor | None = attention.q_proj.bias
        if bias_N is None:
            return None
        return self._group_major(bias_N.detach()[:, None])[:, 0].contiguous()

    def _group_major(self, rows: Tensor) -> Tensor:
        return group_major(rows, self._layer)


@final
class CompiledBlocks:
    """A network bound to C; `compile_blocks` makes it."""

    def __init__(
        self,
        net: BlockHead,
        site: RunnerParts,
        kinds: dict[BlockView, NativeAttention],
        packed: _Packed,
    ) -> None:
        """Bind the parts, which must stay as they are."""
        self._site, self._kinds, self._packed = site, kinds, packed
        self._norms = net.hidden_norm, net.norm
        self._first_row = net.shape.first_row
        self._table = net.table
        self._ids_N = None if net.target_ids is None else net.target_ids.contiguous()
        self._most_units = net.shape.layer.num_key_value_heads * len(kinds)
        self._stores = (_PTR * len(packed.layers))(*(one.data_ptr() for one in site.store.layers))
        self._layers = (FtBlockLayer * len(packed.layers))(*packed.layers)
        self._bound = (FtBlockKind * len(kinds))(
            *(
                FtBlockKind(shape=one.address, causal=int(view.causal))
                for view, one in kinds.items()
            )
        )
        self._model = self._bind(net)
        self.drafts = self._bind_drafts(net)
        """Whether `draft` may be asked."""
        self._call, self._rooms = FtBlockCall(), dict[str, Tensor]()
        library = next(iter(kinds.values())).library
        self._run: Any = library.function("ft_block_draft", (_PTR, _PTR), _I64)

    def _bind(self, net: BlockHead) -> FtBlockModel:
        shape, cos = net.shape, self._site.rotary.cos
        layer, store, mixer = shape.layer, self._site.store.layers[0], self._packed.mixer
        assert isinstance(mixer, KernelLinear), "all of it has kernels"
        return FtBlockModel(
            layers=ctypes.addressof(self._layers),
            kinds=ctypes.addressof(self._bound),
            mixer=mixer.address,
            context_norm=net.hidden_norm.weight.data_ptr(),
            embedding=self._table.address,
            norm=net.norm.weight.data_ptr(),
            cos=cos.data_ptr(),
            sin=self._site.rotary.sin.data_ptr(),
            kv=ctypes.addressof(self._stores),
            hidden=layer.hidden_size,
            inner=layer.intermediate_size,
            vocabulary=self._site.vocab_size,
            width=cos.shape[-1],
            kv_stride=store.stride(0),
            num_layers=len(self._packed.layers),
            num_kinds=len(self._kinds),
            num_heads=layer.num_attention_heads,
            num_kv_heads=layer.num_key_value_heads,
            head_dim=layer.head_dim,
            type=TYPES[self._table.dtype],
            norm_type=TYPES[net.norm.weight.dtype],
            eps=layer.rms_norm_eps,
            embedding_scale=shape.embedding_scale,
            output_scale=shape.output_multiplier,
        )

    def _bind_drafts(self, net: BlockHead) -> bool:
        """Bind what makes tokens of a block's rows, if all of it has kernels."""
        site, follow, model = self._site, net.follow, self._model
        features, dtype = site.features, self._table.dtype
        own = net.lm_head if net.shape.own_head else None
        head = site.target_head if own is None else kernel_of(own, dtype, torch.float32)
        if follow is None or not isinstance(head, KernelLinear):
            return False
        if (head.dtype, head.out_dtype) != (dtype, torch.float32):
            return False
        assert features.dtype == dtype, (features.dtype, dtype)
        model.features = features.in_c
        model.head, self._head = head.address, head
        model.ids = None if self._ids_N is None else self._ids_N.data_ptr()
        self._follow = follow
        if follow.shorts_VR is not None:
            added = kernel_of(follow.linear, dtype, torch.float32)
            if added is None:
                return False
            model.shorts, model.follow = follow.shorts_VR.data_ptr(), added.address
            model.rank = follow.shorts_VR.shape[1]
        model.judge = None if follow.judge is None else follow.judge.data_ptr()
        return True

    def feed(self, context: Sequence[SpanLayout]) -> None:
        """Keep keys and values of these places, whose features are known."""
        self.run(BlockPass(context))

    def _context(self, layouts: Sequence[SpanLayout]) -> Tensor:
        """Context rows of places, [T, D]."""
        features = self._site.features
        if not layouts:
            return features.slots_SF.new_empty(0, self._table.shape[1])
        slots = slots_of(layouts, self._site.geometry.page_size, features.slots_SF.device)
        mixed: Tensor = self._norms[0](self._packed.mixer(features.read(slots).contiguous()))
        return mixed

    def run(self, rows: BlockPass) -> Tensor:
        """Feed places and run blocks; the blocks' outputs [T, D], valid until the next call."""
        context_TD = self._context(rows.context)
        call, kept = self._begin(rows, 0)
        joined_TD = self._rooms["joined"].view(-1, self._table.shape[1])
        joined_TD[: context_TD.shape[0]] = context_TD
        call.gathered = call.stop = None
        self._run(ctypes.addressof(self._model), ctypes.addressof(call))
        del kept
        return self._rooms["outputs"].view(-1, self._table.shape[1])[: len(rows.token_ids)]

    def draft(self, rows: BlockPass, plan: RolloutPlan) -> RolledOut:
        """Feed places, at most MOST_ROWS, run blocks and draft up to `plan.steps` tokens of each,
        chosen as the plan says."""
        fed = rows.num_fed
        assert fed <= MOST_ROWS, fed
        steps, count = plan.steps, len(rows.blocks)
        call, kept = self._begin(rows, steps)
        model, head = self._model, self._head
        call.gathered = self._room("gathered", fed * self._site.features.width)
        reduced = self._ids_N is not None and not plan.best
        width = head.columns if self._ids_N is not None and plan.best else model.vocabulary
        logits_KV = torch.empty(steps * count, width)
        call.logits = logits_KV.data_ptr()
        call.own = (
            self._room("own", steps * count * head.columns, torch.float32) if reduced else None
        )
        call.before = self._room("before", count * model.rank)
        call.added = self._room("added", count * head.columns, torch.float32)
        call.first_row = self._first_row
        drafts = DraftCall(call, plan, count)
        done = self._run(ctypes.addressof(model), ctypes.addressof(call))
        del kept
        return drafts.drafted(done, logits_KV, of_all=True)

    def _begin(self, given: BlockPass, steps: int) -> tuple[FtBlockCall, tuple[Any, ...]]:
        """The call with its rows; the second result is to be kept until it is over."""
        context, blocks, token_ids = given
        pages, call, wide = array("i"), self._call, self._table.shape[1]
        spans = [_spans(layouts, pages) for layouts in (context, blocks)]
        fed, rows = given.num_fed, sum(layout.num_tokens for layout in blocks)
        assert rows == len(token_ids), (rows, len(token_ids))
        tokens = array("q", token_ids)
        call.context, call.blocks = map(address_of, spans)
        call.pages, call.fed = address_of(pages), address_of(tokens)
        call.num_context, call.num_blocks = len(context), len(blocks)
        call.num_fed, call.rows, call.steps = fed, rows, steps
        ints = 2 * (fed + rows) + -(-rows * self._most_units * UNIT_INTS // 2)
        call.positions = self._room("ints", ints, torch.int64)
        call.slots = call.positions + 8 * (fed + rows)
        call.units = call.slots + 8 * (fed + rows)
        call.joined = self._room("joined", (fed + rows) * wide)
        call.x = self._room("x", rows * wide)
        call.outputs = self._room("outputs", max(rows, steps * len(blocks)) * wide)
        return call, (spans, pages, tokens)

    def _room(self, name: str, count: int, dtype: torch.dtype | None = None) -> int:
        """Address of a buffer that only grows."""
        found = self._rooms.get(name)
        if found is None or found.shape[0] < count:
            size = -(-count // self._table.shape[1]) * self._table.shape[1]
            found = torch.empty(size, dtype=dtype or self._table.dtype)
            self._rooms[name] = found
        return found.data_ptr()


def _spans(layouts: Sequence[SpanLayout], pages: "array[int]") -> "array[int]":
    """ft_span of each; their page tables are added to `pages`."""
    found, row = array("i"), 0
    for layout in layouts:
        found.extend((row, layout.num_tokens, layout.start, len(pages), -1, 0))
        pages.extend(chain(layout.page_table))
        row += layout.num_tokens
    return found
