"""Asks a device whether rows keep their bits there: the last word on what kernels promise.

The order of sums is fixed by construction, and tests read what a compiler makes of the kernels.
What matrix instructions really add, and in which order, only the device knows: random rows alone,
in spans, in batches and as nodes of a tree must have the same bits, else the promise is not made.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import GpuKernels, GpuWeights
from foretoken.ops.attention.base import Geometry, SpanWindow
from foretoken.ops.attention.gpu import GpuAttention
from foretoken.ops.attention.torch_sdpa import AttentionProbe
from foretoken.ops.linear.gpu import WholeLinear, pack_for_gpu

_ROWS, _OUTPUTS, _INPUTS = 200, 384, 1024
_MIXED = 24
_CUTS = (1, 2, 6, 16, 17, 64, 100)
_TREE = ((0,), (0, 1), (0, 1, 2), (0, 3), (0, 3, 4), (0, 1, 5))


def why_bits_differ(
    kernels: GpuKernels, device: torch.device, dtype: torch.dtype = torch.bfloat16
) -> str | None:
    """What gave a row other bits beside other rows; None: nothing did."""
    generator = torch.Generator().manual_seed(0)

    def randn(*size: int) -> Tensor:
        return torch.randn(*size, generator=generator).to(device, dtype)

    x_TK = randn(_ROWS, _INPUTS)
    linear = WholeLinear(kernels, pack_for_gpu(kernels, randn(_OUTPUTS, _INPUTS)))
    gate = pack_for_gpu(kernels, randn(_OUTPUTS, _INPUTS), in_one=True)
    for name, run in (
        ("products", linear),
        ("gated products", lambda x: _gated(kernels, gate, x)),
    ):
        whole_TN = run(x_TK)
        for count in _CUTS:
            if not torch.equal(torch.cat([run(x) for x in x_TK.split(count)]), whole_TN):
                return f"{name} of {count} rows"
    geometry = Geometry(
        num_heads=8,
        num_kv_heads=2,
        head_dim=64,
        page_size=16,
        dtype=dtype,
        device=device,
    )
    attention = GpuAttention(geometry, kernels)
    if not AttentionProbe(geometry).is_invariant(attention):
        return "attention of spans"
    return None if _nodes_are_chains(attention, randn) else "attention of trees"


def _gated(kernels: GpuKernels, weights: GpuWeights, x_TK: Tensor) -> Tensor:
    y_TF = x_TK.new_empty(len(x_TK), weights.outputs // 2)
    kernels.gate_up(x_TK, weights, None, 0, y_TF)
    return y_TF


def _nodes_are_chains(attention: GpuAttention, randn: Callable[..., Tensor]) -> bool:
    """Whether each node of a tree has the bits of the chain that it ends."""
    geometry, start = attention.geometry, 3 * attention.kernels.split // 2
    pages = list(range(-(-(start + len(_TREE)) // geometry.page_size)))
    slots = len(pages) * geometry.page_size
    kv_SKh = randn(slots, 2 * geometry.num_kv_heads, geometry.head_dim)
    q_THh = randn(len(_TREE), geometry.num_heads, geometry.head_dim)
    tree = SpanWindow(start, len(_TREE), pages, _TREE)
    nodes_TD = attention.plan([tree])(q_THh, kv_SKh)
    for node, path in enumerate(_TREE):
        chain_SKh = kv_SKh.clone()
        chain_SKh[start : start + len(path)] = kv_SKh[[start + one for one in path]]
        window = SpanWindow(start + len(path) - 1, 1, pages)
        alone_TD = attention.plan([window])(q_THh[node : node + 1], chain_SKh)
        if not torch.equal(alone_TD, nodes_TD[node : node + 1]):
            return False
    return True


def wrong_companies(
    give: Callable[[Tensor, int, int], Tensor], like_XD: Tensor, most: int
) -> Tensor:
    """Whether a row has other bits in other company: alone, beside others that share its experts,
    or some, or none, at other places of blocks, and beside padding.

    Args:
        give: float32 results of rows, beside so much padding, in blocks of so many pairs; 0: as
            usual.
        like_XD: of the type and width of rows, on their device.
        most: pairs of the largest block.

    Returns:
        int32, of each company 0, or its rows if one of them has other bits; all are tried.
    """
    generator = torch.Generator().manual_seed(0)
    x_TD = torch.randn(_MIXED, like_XD.shape[1], generator=generator).to(like_XD)
    whole, order = give(x_TD, 0, 0).view(torch.int32), range(_MIXED)
    companies = [([row], 3) for row in order[:8]] + [([*order[5:12]], 0), ([*order[::-1]] * 3, 5)]
    wrong = []
    for which, padding in companies:
        each = [give(x_TD[which], padding, tile).view(torch.int32) for tile in (0, most)]
        same = all(torch.equal(found, whole[which]) for found in each)
        wrong.append(0 if same else len(which))
    return x_TD.new_tensor(wrong, dtype=torch.int32)
