"""What a head network keeps in memory: counted before it is built, and taken out of its file.

Knows the kinds of networks, not how they are run. Counts are the formula's (`shape.memory`).
"""

from collections import Counter

from torch import nn

from foretoken.config.model_memory import HeadMemory
from foretoken.config.speculative import SpeculativeConfig
from foretoken.proposers.heads.eagle import Eagle
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.medusa import Medusa
from foretoken.proposers.heads.mlp import MLPSpeculator
from foretoken.shape.memory import KeptNumbers, WeightCounts


def tops_of(net: nn.Module) -> tuple[nn.Module, ...]:
    """The parts of a network that make logits."""
    if isinstance(net, Eagle3):
        return (net.lm_head,)
    if isinstance(net, MLPSpeculator):
        return (net.head,)
    return (net.lm_heads,) if isinstance(net, Medusa) else ()


def head_memory(net: nn.Module, config: SpeculativeConfig) -> HeadMemory:
    """What `net` will keep; tables that it shares with the target are not among its weights."""
    return HeadMemory(
        counts=_counts(net, config.quantization),
        quantization=config.quantization,
        kept=_kept(net, config.kv_cache_dtype),
    )


def _counts(net: nn.Module, quantization: str | None) -> WeightCounts:
    tops = {id(one) for top in tops_of(net) for one in top.modules()}
    found = Counter[str]()
    for module in net.modules():
        numbers = sum(one.numel() for one in module.parameters(recurse=False))
        if not isinstance(module, nn.Linear):
            found["table" if isinstance(module, nn.Embedding) else "rest"] += numbers
            continue
        top, matrix = id(module) in tops, module.weight.numel()
        found["head" if top else "matrices"] += matrix
        found["head_outputs" if top else "outputs"] += module.out_features
        found["rest"] += numbers - matrix
    if isinstance(net, Medusa) and net.shape.share_head and quantization is not None:
        found["head"] += net.shape.vocab_size * net.shape.hidden_size
        found["head_outputs"] += net.shape.vocab_size
    return WeightCounts(**{name: found[name] for name in WeightCounts._fields})


def _kept(net: nn.Module, kv_cache_dtype: str) -> KeptNumbers | None:
    """Keys and values that it keeps for a token, if it has any."""
    if not isinstance(net, Eagle | Eagle3):
        return None
    shape = net.shape.layer if isinstance(net, Eagle3) else net.shape
    heads = 2 * shape.num_hidden_layers * shape.num_key_value_heads
    return KeptNumbers(heads * shape.head_dim, shape.head_dim, kv_cache_dtype)


def own_memory(net: nn.Module) -> None:
    """Copy out of the file what is kept as it is; what is packed later is read from there."""
    for module in net.modules():
        for name, buffer in list(module.named_buffers(recurse=False)):
            setattr(module, name, buffer.clone())
        if not isinstance(module, nn.Linear):
            for parameter in module.parameters(recurse=False):
                parameter.data = parameter.data.clone()
