"""From the word in `speculative_config["method"]` to a proposer. Heavy imports stay inside."""

from collections.abc import Callable

from foretoken.config import SpeculativeConfig
from foretoken.errors import ConfigError
from foretoken.proposers.base import Proposer


def create_proposer(
    config: SpeculativeConfig | None, draft_model: Callable[[], Proposer]
) -> Proposer:
    """The proposer that `config` names; `draft_model` builds the one that needs weights.

    Raises:
        ConfigError: an unknown method.
    """
    if config is None:
        from foretoken.proposers.none import NoProposer

        return NoProposer()
    if config.method == "ngram":
        from foretoken.proposers.ngram import NgramProposer

        return NgramProposer(
            prompt_lookup_min=config.prompt_lookup_min,
            prompt_lookup_max=config.prompt_lookup_max,
        )
    if config.method == "draft_model":
        return draft_model()
    raise ConfigError("speculative_config.method", config.method, "draft_model, ngram")
