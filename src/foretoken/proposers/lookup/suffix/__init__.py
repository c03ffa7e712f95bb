"""Suffix decoding: drafts by frequency from what was written before."""

from foretoken.config import DrafterConfig
from foretoken.proposers.lookup.suffix.proposer import SuffixProposer
from foretoken.proposers.method import DrafterSpec, Target


def load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """The drafter of these settings; it needs nothing of the engine."""
    return DrafterSpec(
        build=lambda _: SuffixProposer(
            max_tree_depth=config.own.suffix_decoding_max_tree_depth,
            max_cached_requests=config.own.suffix_decoding_max_cached_requests,
            max_spec_factor=config.own.suffix_decoding_max_spec_factor,
            min_token_prob=config.own.suffix_decoding_min_token_prob,
        )
    )
