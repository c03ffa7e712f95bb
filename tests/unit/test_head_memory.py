"""What heads keep in memory, as counted and as built.

The guarded bugs: matrices that stay beside their packed copies, a head read as float32, a file that
stays mapped, rounded heads that are planned as 16 bit.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from foretoken import LLM
from foretoken.checkpoint import packaged_model
from foretoken.config import SpeculativeConfig
from foretoken.config.memory import Drafting, HeadMemory
from foretoken.kernels.library import find_library
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.heads.base import DraftHead
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.method import Target
from foretoken.proposers.own_kv import KVProposer
from foretoken.proposers.registry import find_drafters
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import Packs
from tests.golden.heads import load_head

HEADS = {"eagle3": "demo-eagle3", "mlp": "demo-mlp", "medusa": "demo-medusa"}


def head_memory(method: str, quantization: str | None = None) -> HeadMemory:
    given = {"method": method, "model": HEADS[method], "quantization": quantization}
    config = SpeculativeConfig.from_dict(given)
    target = Target(shape=ModelShape.from_config(packaged_model("demo")), tokenizer=None)
    [found] = find_drafters(config, target).values()
    assert found.head is not None and found.model is None
    return found.head


@pytest.mark.parametrize("method", HEADS)
def test_weights_are_counted_as_they_lie_in_the_file(method: str) -> None:
    net: DraftHead = load_head(
        packaged_model(HEADS[method]), ModelShape.from_config(packaged_model("demo"))
    )
    numbers = sum(one.numel() for one in net.parameters())
    assert head_memory(method).weight_bytes(2) == 2 * numbers
    assert {one.dtype for one in net.parameters()} == {torch.bfloat16}
    assert not any(one.is_meta for one in (*net.parameters(), *net.buffers()))


@pytest.mark.parametrize("method", HEADS)
def test_rounded_heads_are_planned_rounded(method: str) -> None:
    plain, rounded = (head_memory(method, kind) for kind in (None, "int8"))
    counts = rounded.counts
    saved = counts.matrices + plain.counts.head - 4 * (counts.outputs + plain.counts.head_outputs)
    borrowed = (counts.head - plain.counts.head) + 4 * (
        counts.head_outputs - plain.counts.head_outputs
    )
    assert plain.weight_bytes(2) - rounded.weight_bytes(2) == saved - borrowed
    assert (borrowed > 0) == (method == "medusa"), "a rounded copy of the target's head"
    assert rounded.weight_bytes(2, packs=Packs.NONE) >= plain.weight_bytes(2)
    assert Drafting(heads=(plain,)).has_weights


@pytest.mark.skipif(find_library() is None, reason="without kernels nothing is packed")
@pytest.mark.parametrize("model", ["demo-eagle3", "demo-parallel"])
@pytest.mark.parametrize("quantization", [None, "int8"])
def test_matrices_are_there_once(model: str, quantization: str | None) -> None:
    config = {"method": "eagle3", "model": model, "quantization": quantization}
    with LLM("demo", max_num_seqs=2, speculative_config=config) as llm:
        drafters = llm._engine.parts.proposer
        assert isinstance(drafters, Drafters)
        proposer = drafters.members["eagle3"].proposer
        assert isinstance(proposer, KVProposer)
        steps: Any = proposer.make_steps([])
        net = steps.runner.net
        assert isinstance(net, Eagle3)
        assert not [one for one in net.modules() if isinstance(one, nn.Linear)]
        mapped = Path("/proc/self/maps")
        if mapped.is_file():
            assert f"{model}/model.safetensors" not in mapped.read_text("utf-8")
