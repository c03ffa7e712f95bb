"""From the words in `speculative_config` to drafters: each method's own module is asked."""

import importlib
from collections.abc import Mapping

from foretoken.config import DrafterConfig, SpeculativeConfig
from foretoken.config.method_registry import find_method
from foretoken.control.floor import AcceptanceFloor
from foretoken.errors import ConfigError
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.choose.offers import Member
from foretoken.proposers.choose.policy import Policy
from foretoken.proposers.custom import DraftCheck
from foretoken.proposers.method import BuildContext, DrafterSpec, LoadSpec, Target


def find_drafters(config: SpeculativeConfig | None, target: Target) -> dict[str, DrafterSpec]:
    """All drafters that `config` names, by name; nothing is built yet.

    Raises:
        ConfigError: a drafter does not fit the target.
        ModelError: a drafter's folder is missing, broken or not supported.
    """
    each = () if config is None else config.drafters
    return {one.label: _load_spec(one, target) for one in each}


def _load_spec(config: DrafterConfig, target: Target) -> DrafterSpec:
    """Ask the module of the drafter's method, imported now."""
    where, method = "speculative_config.method", find_method(config.method)
    assert method.code is not None, f"{method.name} is not built"
    try:
        module = importlib.import_module(method.code)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{method.code}.".startswith(f"{error.name}."):
            raise
        allowed = f"an importable module as the code of {method.name}, not {method.code!r}"
        raise ConfigError(where, method.name, allowed) from error
    load_spec: LoadSpec | None = getattr(module, "load_spec", None)
    if load_spec is None:
        has = f"({module.__name__}) has a function load_spec(config, target)"
        raise ConfigError(where, config.method, f"a method whose module {has}")
    return load_spec(config, target)


def feature_points(found: Mapping[str, DrafterSpec]) -> tuple[int, ...]:
    """Every point at which some drafter reads the target's hidden states, once each."""
    return tuple(dict.fromkeys(point for one in found.values() for point in one.points))


def create_drafters(
    config: SpeculativeConfig | None,
    found: Mapping[str, DrafterSpec],
    context: BuildContext,
    policy: Policy,
) -> Drafters:
    """Build everything that was found; with nothing found only what requests bring is drafted from.

    Args:
        config: the settings.
        found: what the drafters of the settings need, by label.
        context: what they are built from.
        policy: who of them drafts.

    Raises:
        ConfigError: settings that a drafter cannot follow, or a user's class that cannot be loaded.
        ModelError: a drafter's weights cannot be loaded.
    """
    members = {}
    for one in () if config is None else config.drafters:
        drafter = found[one.label]
        least = one.stop.min_acceptance
        members[one.label] = Member(
            proposer=drafter.build(context),
            max_drafts=one.num_speculative_tokens,
            least=one.stop.min_speculative_tokens,
            floor=AcceptanceFloor(least) if least else None,
            check=DraftCheck(one.label, context.vocab_size) if drafter.checked else None,
        )
    return Drafters(members, policy, context.verifier.sampler.grammars)
