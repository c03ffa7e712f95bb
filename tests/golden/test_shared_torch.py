"""A model that several processes share over PyTorch's operations gives the logits of one, nearly.

Sums of those operations may depend on the size of a matrix, so bits are not compared. The guarded
bugs are those of test_shared_layers, and parts that NCCL would gather in another order.
"""

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from foretoken.distributed.processes import Followers, meet
from tests.golden.families import OWN, VOCAB, write_checkpoint
from tests.golden.shared_forwards import Forwards, compute, compute_on_all, follow

EVEN = {"vocab_size": VOCAB + 1}
"""What NCCL gathers has one size on all ranks."""
CASES = [
    ("llama biases", {}, False),
    ("llama one key head, odd sizes", {}, False),
    ("qwen3 biases and window", {}, False),
    ("gemma2", {}, False),
    ("llama grouped tied", EVEN, True),
    ("qwen2 upper window tied", EVEN, True),
    ("phi3 window", EVEN, True),
    ("gemma2", EVEN, True),
    ("qwen3 wide heads", {**EVEN, "num_key_value_heads": 1}, True),
]


@pytest.fixture(scope="module")
def followers() -> Iterator[Followers]:
    with Followers(meet(2, 120.0), follow) as found:
        yield found


@pytest.mark.slow
@pytest.mark.parametrize(("case", "changes", "on_device"), CASES)
def test_logits_are_close_to_those_of_one_process(
    followers: Followers, case: str, changes: dict[str, int], on_device: bool, tmp_path: Path
) -> None:
    family, settings = OWN[case]
    write_checkpoint(tmp_path, family, {**settings, **changes})
    what = Forwards(tmp_path, torch.float32, VOCAB, on_torch=True, on_device=on_device)
    wanted, _ = compute(None, what)
    found, store = compute_on_all(followers.joined, what)
    assert len(store.kv_heads) == 1 or case == "phi3 window"
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_so_are_those_of_layers_on_several(followers: Followers, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, *OWN["mistral window"])
    what = Forwards(tmp_path, torch.float32, VOCAB, by_layers=True, on_torch=True)
    wanted, _ = compute(None, what)
    found, _ = compute_on_all(followers.joined, what)
    torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)
