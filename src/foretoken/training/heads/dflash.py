"""Training of DFlash heads, and what all heads that fill in blocks share: many blocks in one pass.

The block of slot t begins with token t + 1, at its own position, and masks follow. Its rows see the
target's features of positions 0 to t and one another, and nothing of other blocks. So the blocks of
slots drawn at random can share a pass, and what is guessed in each is what serving computes. Files
are `speculators`, or the layout that SGLang reads: that of z-lab for DFlash and of DeepSpec for
DSpark, without copies of the target's tables. Layers are counted differently: `target_layer_ids`
are those whose outputs are read, `aux_hidden_state_layer_ids` those whose inputs are. Both say what
vLLM would have to guess.

Source: DFlash (arXiv 2602.06036). The loss is that of all heads here; the authors' is `tokens`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any, final

import torch
from torch import Tensor

from foretoken.errors import ConfigError
from foretoken.layers.embedding import Embedding
from foretoken.proposers.heads.dflash.formats import usual_points
from foretoken.proposers.heads.dflash.network import BlockHead, DFlash
from foretoken.proposers.heads.dflash.shape import BlockShape, BlockView
from foretoken.shape import RopeShape
from foretoken.training.heads.guesses import Guess, Guesser, ahead, rotary_of
from foretoken.training.heads.kind import (
    FreshHead,
    HeadKind,
    Layout,
    proposing,
    require_mask,
    usual_vocabulary,
    usual_width,
    with_both_ways,
)
from foretoken.training.heads.target import Captured, TargetParts
from foretoken.training.settings import Settings

SMALL_VOCABULARY, DEEP = 32_000, 28
MOST_POINTS = 5
"""Layers of the target that are read, as in published heads, where it has enough."""


def block_points(target: TargetParts) -> tuple[int, ...]:
    """Layers spread over the target, whose inputs a block head reads."""
    count = min(MOST_POINTS, max(1, target.layers - 3))
    return tuple(min(point, target.layers - 1) for point in usual_points(target.layers, count))


def require_blocks_fit(target: TargetParts, settings: Settings) -> None:
    """Raise ConfigError for an unknown mask token, or rows that have no room for a block."""
    require_mask(target, settings)
    drafts = settings.of_head.depth
    for stage in settings.stages:
        if stage.length < drafts + 2:
            allowed = f"at least {drafts + 2}: a token, the newest one and {drafts} drafts"
            raise ConfigError("stages.length", stage.length, allowed)


def block_shape(target: TargetParts, settings: Settings, *, first_row: int) -> BlockShape:
    """The sizes that `settings.head` asks for; its rows see all of the context and of their block.

    Args:
        target: what it is for.
        settings: with a head of `depth` drafts.
        first_row: the row that predicts the first of them.
    """
    head = settings.of_head
    drafted = head.draft_vocab_size or target.vocab_size
    return BlockShape(
        layer=target.layer_shape(head.inner_size, head.num_layers),
        rope=RopeShape(theta=target.rope_theta, rotary_dim=target.head_dim),
        views=(BlockView(),) * head.num_layers,
        block_size=head.depth + first_row,
        first_row=first_row,
        mask_token_id=head.mask_token_id,
        target_hidden_size=target.hidden_size,
        target_layers=target.layers,
        points=block_points(target),
        draft_vocab_size=drafted,
        own_head=drafted < target.vocab_size,
    )


def usual_blocks(target: TargetParts) -> dict[str, Any]:
    """The keys of `[head]` for a target on which nobody has tried any; more layers for a deep one.

    With a large vocabulary they draft some of its tokens, since else most of the work is in the
    target's output head.
    """
    small = target.vocab_size <= SMALL_VOCABULARY
    return {
        "depth": 7,
        "depth_decay": 0.78,
        "num_layers": 2 if target.layers < DEEP else 3,
        "inner_size": usual_width(target),
        "draft_vocab_size": None if small else usual_vocabulary(target),
        "mask_token_id": target.vocab_size - 1,
    }


@torch.no_grad()
def begin_blocks(net: BlockHead, target: TargetParts, frequent_ids: Tensor) -> None:
    """Give a new network the target's embedding, last norm and, for a reduced vocabulary, rows of
    its output head.

    Args:
        net: with random weights.
        target: frozen.
        frequent_ids: all token ids, most frequent first, int64 [V].
    """
    if net.is_reduced:
        count = net.shape.draft_vocab_size
        ids = frequent_ids[:count].sort().values
        net.d2t.copy_(ids - torch.arange(count))
        net.lm_head.weight.copy_(target.head_VD[ids])
    if target.norm_D is not None:
        net.norm.weight.copy_(target.norm_D)
    net.to(target.embedding_VD.device)
    net.use_embedding(Embedding(target.embedding_VD))


class BlockGuesser(Guesser, ABC):
    """All depths by one pass over blocks: at some slots in training, at all of them else."""

    def __init__(self, net: BlockHead, target_head_VD: Tensor, share: float) -> None:
        """Train `net`, whose embedding must be in place.

        Args:
            net: the network.
            target_head_VD: makes logits where it has no output head of its own.
            share: of the slots that could begin a whole block, how many do in training.
        """
        assert set(net.shape.views) == {BlockView()}, f"{net.shape.views}, not all seen"
        self.net, self._target_head, self._share = net, target_head_VD.detach(), share
        self._rotary = rotary_of(net.shape.layer, net.fc.weight.device)

    @property
    def head_VD(self) -> Tensor:
        """What makes logits of the network's outputs."""
        return self.net.lm_head.weight if self.net.shape.own_head else self._target_head

    @abstractmethod
    def guess(self, outputs_BND: Tensor, previous_BN: Tensor) -> Guess:
        """The guesses of one depth from the network's outputs and the true tokens before them."""

    def guesses(self, captured: Captured, depth: int) -> Iterator[Guess]:
        """One pass, then its rows one after the other."""
        shape, tokens_BT = self.net.shape, captured.tokens_BT
        assert depth <= shape.max_drafts, f"{depth} guesses of blocks for {shape.max_drafts}"
        slots_N = self._slots(captured)
        outputs_BNRD = self._outputs(captured, slots_N)
        for step in range(depth):
            previous_BN = ahead(tokens_BT, 1 + step)[:, slots_N]
            found = self.guess(outputs_BNRD[:, :, shape.first_row + step], previous_BN)
            yield replace(found, slots_N=slots_N) if self.net.training else found

    def _slots(self, captured: Captured) -> Tensor:
        """Where blocks begin, ascending, int64; in training drawn by the number of the part."""
        length, device = captured.tokens_BT.shape[1], captured.tokens_BT.device
        if not self.net.training:
            return torch.arange(length, device=device)
        whole = length - 1 - self.net.shape.max_drafts
        assert whole > 0, f"rows of {length} for blocks of {self.net.shape.max_drafts} drafts"
        dice = torch.Generator().manual_seed(captured.part)
        drawn = torch.randperm(whole, generator=dice)[: max(1, round(self._share * whole))]
        return drawn.sort().values.to(device)

    def _outputs(self, captured: Captured, slots_N: Tensor) -> Tensor:
        """Outputs of the blocks of these slots, [B, N, R, D]; outside training, where every slot
        has one, a row of tokens at a time."""
        size = len(captured.tokens_BT) if self.net.training else 1
        rows = zip(captured.tokens_BT.split(size), captured.features_BTF.split(size), strict=True)
        return torch.cat([self._pass(tokens, features, slots_N) for tokens, features in rows])

    def _pass(self, tokens_BT: Tensor, features_BTF: Tensor, slots_N: Tensor) -> Tensor:
        """One pass over the blocks of these slots in all rows, [B, N, R, D]."""
        net, rows, device = self.net, self.net.shape.block_size, tokens_BT.device
        context_BTD = net.context(features_BTF)
        places_T = torch.arange(tokens_BT.shape[1], device=device)
        before = self._rotary.at(places_T)
        attends = [
            BlocksAttention(*layer.self_attn.keys_values(context_BTD, before), slots_N, rows)
            for layer in net.decoder_layers
        ]
        masks = (len(tokens_BT), len(slots_N), rows)
        given_BNR = tokens_BT.new_full(masks, net.shape.mask_token_id)
        given_BNR[:, :, 0] = ahead(tokens_BT, 1)[:, slots_N]
        places_NR = slots_N[:, None] + 1 + torch.arange(rows, device=device)
        rotation = self._rotary.at(places_NR.flatten())
        outputs_BSD: Tensor = net(given_BNR.flatten(1), rotation, attends)
        return torch.unflatten(outputs_BSD, 1, (len(slots_N), rows))


@final
class BlocksAttention:
    """One layer's attention of many blocks, each over the context before it and over itself."""

    def __init__(self, k_BTKh: Tensor, v_BTKh: Tensor, slots_N: Tensor, rows: int) -> None:
        """Of blocks of `rows` rows that begin behind `slots_N`, over a context of T slots."""
        self._keys, self._values = k_BTKh.transpose(1, 2), v_BTKh.transpose(1, 2)
        slots_T = torch.arange(k_BTKh.shape[1], device=slots_N.device)
        self._unseen = (slots_T > slots_N[:, None])[:, None]
        self._blocks = (len(slots_N), rows)

    def __call__(self, q_BSHh: Tensor, k_BSKh: Tensor, v_BSKh: Tensor) -> Tensor:
        """Mix of the values that each of the S = N * R rows sees, [B, S, H * h]."""
        blocks, rows = self._blocks
        kv_heads, scale = k_BSKh.shape[2], q_BSHh.shape[-1] ** -0.5
        q = (q_BSHh * scale).unflatten(2, (kv_heads, -1)).unflatten(1, self._blocks)
        q = q.permute(0, 3, 1, 4, 2, 5).flatten(3, 4)  # [B, K, N, G * R, h], G heads to a key
        own_k, own_v = (
            x.unflatten(1, self._blocks).permute(0, 3, 1, 2, 4) for x in (k_BSKh, v_BSKh)
        )
        seen = (q.flatten(2, 3) @ self._keys.transpose(2, 3)).unflatten(2, (blocks, -1))
        seen = seen.float().masked_fill(self._unseen, float("-inf"))
        own = (q @ own_k.transpose(3, 4)).float()
        weights = torch.softmax(torch.cat((seen, own), dim=-1), dim=-1).to(v_BSKh.dtype)
        of_seen, of_own = weights.split((seen.shape[-1], rows), dim=-1)
        mixed = (of_seen.flatten(2, 3) @ self._values).unflatten(2, (blocks, -1))
        mixed = torch.unflatten(mixed + of_own @ own_v, 3, (-1, rows))
        return mixed.permute(0, 2, 4, 1, 3, 5).flatten(3).flatten(1, 2)


SPECULATORS_VERSION = "0.9.0"
_NAMES = {"dflash": "DFlashSpeculator", "dspark": "DSparkSpeculator"}


def block_layout(
    method: str,
    state: Mapping[str, Any],
    verifier: str,
    form: str | None,
    more: Mapping[str, Any] | None = None,
) -> Layout:
    """Tensors and config.json of a checkpoint's block head.

    Args:
        method: dflash or dspark.
        state: the checkpoint's.
        verifier: the target's name.
        form: `sglang`, or any other for the layout of `speculators`.
        more: keys that only this method has.

    Raises:
        ConfigError: `sglang` for a reduced vocabulary.
    """
    shape, keys = state["shape"], more or {}
    if form == "sglang":
        return Layout(dict(state["model"]), _authors_config(method, shape, keys))
    tensors = with_both_ways(state["model"], shape["layer"]["vocab_size"])
    return Layout(tensors, _speculators_config(method, shape, verifier, keys))


def _layers(shape: Mapping[str, Any]) -> dict[str, Any]:
    """The decoder layers as a Qwen3 config."""
    layer = shape["layer"]
    return {
        "model_type": "qwen3",
        **layer,
        "hidden_act": "silu",
        "attention_bias": False,
        "layer_types": ["full_attention"] * layer["num_hidden_layers"],
        "rope_parameters": {"rope_type": "default", "rope_theta": layer["rope_theta"]},
        "tie_word_embeddings": False,
    }


def _speculators_config(
    method: str, shape: Mapping[str, Any], verifier: str, more: Mapping[str, Any]
) -> dict[str, Any]:
    first_row = shape["first_row"]
    return {
        "architectures": [_NAMES[method]],
        "speculators_model_type": method,
        "speculators_version": SPECULATORS_VERSION,
        "block_size": shape["block_size"],
        "mask_token_id": shape["mask_token_id"],
        "sample_from_anchor": first_row == 0,
        "sliding_window_non_causal": True,
        "aux_hidden_state_layer_ids": list(shape["points"]),
        "draft_vocab_size": shape["draft_vocab_size"],
        "target_hidden_size": shape["target_hidden_size"],
        **more,
        "transformer_layer_config": _layers(shape),
        "speculators_config": proposing(method, shape["block_size"] - first_row, verifier),
    }


def _authors_config(
    method: str, shape: Mapping[str, Any], more: Mapping[str, Any]
) -> dict[str, Any]:
    drafted, known = shape["draft_vocab_size"], shape["layer"]["vocab_size"]
    if drafted < known:
        given = f"sglang, of a head that drafts {drafted} of {known} tokens"
        raise ConfigError("--format", given, "own, speculators, vllm")
    blocks = {
        "mask_token_id": shape["mask_token_id"],
        "target_layer_ids": [point - 1 for point in shape["points"]],
    }
    flat = {
        **_layers(shape),
        "block_size": shape["block_size"],
        "num_target_layers": shape["target_layers"],
    }
    if method == "dflash":
        return {"architectures": ["DFlashDraftModel"], **flat, "dflash_config": {**blocks, **more}}
    return {"architectures": ["Qwen3DSparkModel"], **flat, **blocks, **more}


@final
class DFlashGuesser(BlockGuesser):
    """What the rows of blocks say, as it is."""

    def guess(self, outputs_BND: Tensor, previous_BN: Tensor) -> Guess:
        """The same whichever tokens come before."""
        return Guess(states_BTD=outputs_BND, weight_VD=self.head_VD, ids_V=self.net.target_ids)


def _fresh(target: TargetParts, settings: Settings, frequent_ids: Tensor) -> FreshHead:
    head = settings.of_head
    net = DFlash(block_shape(target, settings, first_row=1))
    begin_blocks(net, target, frequent_ids)
    return FreshHead(net, DFlashGuesser(net, target.head_VD, head.block_share), net.points)


def _layout(state: Mapping[str, Any], verifier: str, form: str | None) -> Layout:
    return block_layout("dflash", state, verifier, form)


KIND = HeadKind(
    fresh=_fresh,
    layout=_layout,
    points=block_points,
    require_fit=require_blocks_fit,
    usual=usual_blocks,
)
