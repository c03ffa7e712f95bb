"""A head runner over scattered pages whose store holds given features."""

import torch

from foretoken.kv.features import FINAL, FeatureStore, FeatureView
from foretoken.models.tensors import SpanLayout
from foretoken.proposers.heads.chain_head import ChainHead, ChainRunner
from foretoken.proposers.heads.eagle3.compiled import compile_eagle3
from foretoken.proposers.heads.eagle3.network import Eagle3
from foretoken.proposers.heads.paged_head import PagedContext

PAGE, PAGES = 8, 6
TABLE = [4, 1, 5, 0, 2, 3]


def make(net: ChainHead, features_TF: torch.Tensor) -> ChainRunner:
    """Run `net` over a store that holds these features at positions 0, 1, ..."""
    count, width = features_TF.shape
    store = FeatureStore(
        [FINAL], width, PAGE * PAGES, dtype=torch.float32, device=torch.device("cpu")
    )
    slots = torch.tensor([TABLE[i // PAGE] * PAGE + i % PAGE for i in range(count)])
    store.write(FINAL, slots, features_TF)
    context = PagedContext(
        features=FeatureView(store, [FINAL]),
        target_logits=lambda x: x,
        vocab_size=61,
        num_pages=PAGES,
        page_size=PAGE,
    )
    return ChainRunner(net, context, compile_eagle3 if isinstance(net, Eagle3) else None)


@torch.inference_mode()
def feed(
    runner: ChainRunner, features_TF: torch.Tensor, tokens: list[int], pieces: list[int]
) -> torch.Tensor:
    """Outputs of all slots, fed in `pieces`."""
    outputs, at = [], 0
    assert sum(pieces) == len(tokens) == features_TF.shape[0]
    for piece in pieces:
        layouts = [SpanLayout(start=at, num_tokens=piece, page_table=TABLE)]
        hidden = runner.mixed_features(layouts)
        outputs.append(runner.forward(layouts, tokens[at : at + piece], hidden))
        at += piece
    return torch.cat(outputs)
