"""From the words in `speculative_config` to drafters. Heavy imports stay inside."""

from collections.abc import Callable

from foretoken.config import SpeculativeConfig
from foretoken.config.methods import find_method
from foretoken.errors import ConfigError
from foretoken.proposers.base import Proposer, ProposerSettings
from foretoken.proposers.checked import DraftCheck
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.choose.offers import Member
from foretoken.proposers.policy import FirstPolicy, Policy
from foretoken.runtime.grammar import Grammars

ModelLoader = Callable[[SpeculativeConfig], Proposer]


def create_drafters(
    config: SpeculativeConfig | None,
    with_weights: ModelLoader,
    *,
    vocab_size: int,
    max_model_len: int,
    grammars: Grammars | None = None,
) -> Drafters:
    """Everything that `config` names; with None only what requests bring is drafted from.

    Args:
        config: what the user set.
        with_weights: builds a drafter that needs weights.
        vocab_size: drafts are ids below this.
        max_model_len: most tokens of a sequence.
        grammars: the verifier's; what they force is drafted first.

    Raises:
        ConfigError: an unknown method, or a user's class that cannot be loaded.
    """

    def create(one: SpeculativeConfig) -> Proposer:
        settings = ProposerSettings(
            vocab_size=vocab_size,
            max_model_len=max_model_len,
            num_speculative_tokens=one.num_speculative_tokens,
        )
        return _create(one, with_weights, settings)

    each = () if config is None else config.each
    members = {
        one.label: Member(
            proposer=create(one),
            most=one.num_speculative_tokens,
            least=one.min_speculative_tokens,
            check=DraftCheck(one.label, vocab_size) if one.method == "custom_class" else None,
        )
        for one in each
    }
    policy = create_policy("first" if config is None else config.policy)
    return Drafters(members, policy, grammars)


def create_policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name == "first":
        return FirstPolicy()
    if name == "best":
        from foretoken.proposers.best import BestPolicy

        return BestPolicy()
    raise ConfigError("speculative_config.policy", name, "first, best")


def _create(
    config: SpeculativeConfig, with_weights: ModelLoader, settings: ProposerSettings
) -> Proposer:
    if config.method == "ngram":
        from foretoken.proposers.lookup.ngram import NgramProposer

        return NgramProposer(
            prompt_lookup_min=config.prompt_lookup_min,
            prompt_lookup_max=config.prompt_lookup_max,
        )
    if config.method == "suffix":
        from foretoken.proposers.lookup.suffix.proposer import SuffixProposer

        return SuffixProposer(
            max_tree_depth=config.suffix_decoding_max_tree_depth,
            max_cached_requests=config.suffix_decoding_max_cached_requests,
            max_spec_factor=config.suffix_decoding_max_spec_factor,
            min_token_prob=config.suffix_decoding_min_token_prob,
        )
    if config.method == "custom_class":
        from foretoken.proposers.custom import load_custom

        assert config.model is not None, "checked by SpeculativeConfig"
        return load_custom(config.model, settings)
    assert find_method(config.method).has_weights, config.method
    return with_weights(config)
