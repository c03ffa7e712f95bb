"""`speculative_config`: the list of drafters, who serves whom, and what holds for all of them.

The dictionary has vLLM's keys, flat for one drafter; several stand in `drafters`, each with its own
keys. Torch-free.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Any, Self

from foretoken.config.auto import AUTO, auto_drafters
from foretoken.config.drafter import MOST_DRAFTS, WHERE, DrafterConfig, drafter_keys
from foretoken.config.method_registry import find_method, method_names, reserve_keys
from foretoken.config.reader import (
    Allowed,
    at_least,
    check_fields,
    flat,
    grouped,
    keys_of,
    read,
    require,
    words,
)
from foretoken.config.translate import SPECULATIVE_KEYS, key_names, translate
from foretoken.errors import ConfigError

RULES = ("auto", "matching", "standard", "block", "traversal", "typical", "synthetic")
THRESHOLD, ALPHA = 0.09, 0.3
_SHARE = Allowed("a number in (0, 1]", lambda share: 0 < share <= 1)
_LIST = "a list of at least one dictionary, each with its method"

Schedule = tuple[tuple[int, int, int], ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class RuleConfig:
    """How drafts are checked."""

    rejection_sample_method: Annotated[str, words(*RULES, later=("fly",))] = "auto"
    """`matching`: a draft is accepted if it is the token that the target itself draws: identical
    output with and without speculation. `standard`: the rejection rule of Leviathan et al. and
    Chen et al.: the same distribution. `block`: the same distribution, tested for all drafts
    together (Sun et al.), never fewer accepted on average. `traversal`: the same for trees
    (Weng et al.). `auto`: matching for greedy and seeded requests and for one-hot
    drafts, else standard. Two change the output and are never chosen by `auto`: `typical`, LOSSY:
    accepts what the target finds probable enough (Medusa); `synthetic`, INVALID output: accepts
    at given rates, to measure an engine. docs/promise.md has the proofs."""
    posterior_threshold: Annotated[float, _SHARE] = THRESHOLD
    """`typical` only, LOSSY: highest bar for a draft's probability."""
    posterior_alpha: Annotated[float, _SHARE] = ALPHA
    """`typical` only, LOSSY: the bar is this times exp(-entropy) where that is lower."""
    synthetic_acceptance_rates: Sequence[float] | None = None
    """`synthetic` only: for each of num_speculative_tokens drafts, the share of verifications
    that accept it; in [0, 1], none above the one before it."""
    synthetic_acceptance_length: Annotated[float, Allowed("a number", math.isfinite)] | None = None
    """`synthetic` only, instead of rates: mean tokens per verification, the recovered or bonus
    token included; 1 to num_speculative_tokens + 1."""

    def __post_init__(self) -> None:
        """Check that settings of a rule are set for that rule only, and `synthetic` has one."""
        check_fields(self, WHERE)
        rule = self.rejection_sample_method
        for name, default in (("posterior_threshold", THRESHOLD), ("posterior_alpha", ALPHA)):
            value = getattr(self, name)
            allowed = f'{default}: only rejection_sample_method "typical" has thresholds'
            require(WHERE + name, value, rule == "typical" or value == default, allowed)
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if rule != "synthetic":
            allowed = 'None: only rejection_sample_method "synthetic" has rates'
            require(WHERE + "synthetic_acceptance_rates", rates, rates is None, allowed)
            require(WHERE + "synthetic_acceptance_length", length, length is None, allowed)
            return
        where = WHERE + "synthetic_acceptance_rates"
        both = rates is not None and length is not None
        require(where, rates, not both, "None beside synthetic_acceptance_length")
        missing = rates is None and length is None
        require(where, None, not missing, "rates, or a synthetic_acceptance_length")

    def synthetic_rates(self, num_drafts: int) -> tuple[float, ...]:
        """Share of verifications that keep draft 0, 1, ... under `synthetic`; else empty.

        A length counts the recovered or bonus token too and becomes the rates of least variance:
        1 as far as it goes, one fraction, then 0.

        Raises:
            ConfigError: they do not fit so many drafts.
        """
        rates, length = self.synthetic_acceptance_rates, self.synthetic_acceptance_length
        if rates is not None:
            fit = len(rates) == num_drafts and all(0 <= rate <= 1 for rate in rates)
            fit = fit and all(after <= rate for rate, after in zip(rates, rates[1:], strict=False))
            text = f"{num_drafts} numbers in [0, 1], one per draft, none above the one before it"
            require(WHERE + "synthetic_acceptance_rates", rates, fit, text)
            return tuple(rates)
        if length is None:
            return ()
        allowed = f"1 to num_speculative_tokens + 1 ({num_drafts + 1})"
        where = WHERE + "synthetic_acceptance_length"
        require(where, length, 1 <= length <= num_drafts + 1, allowed)
        return tuple(min(max(length - 1 - i, 0.0), 1.0) for i in range(num_drafts))


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadConfig:
    """How far to draft at which load, where the user says so."""

    num_speculative_tokens_per_batch_size: Schedule | None = None
    """Draft length by load: (first, last, drafts) for each range of running sequences, 0 drafts
    allowed; sizes between and beyond the ranges keep the drafts of the range before."""
    disable_by_batch_size: Annotated[int, at_least(2)] | None = None
    """No drafts while this many sequences or more run; >= 2. (vLLM's old flag of this name
    counted queued requests.)"""

    def __post_init__(self) -> None:
        """Check ranges, and that at most one of them is set."""
        schedule = self.num_speculative_tokens_per_batch_size
        if schedule is not None:
            read_as = _read_schedule(schedule, MOST_DRAFTS)
            object.__setattr__(self, "num_speculative_tokens_per_batch_size", read_as)
        check_fields(self, WHERE)
        off = self.disable_by_batch_size
        allowed = "nothing beside num_speculative_tokens_per_batch_size"
        require(WHERE + "disable_by_batch_size", off, schedule is None or off is None, allowed)

    @property
    def is_set(self) -> bool:
        """Whether the user said anything."""
        lengths, off = self.num_speculative_tokens_per_batch_size, self.disable_by_batch_size
        return lengths is not None or off is not None

    @property
    def longest(self) -> int | None:
        """Most drafts at any load, at least 1; None where no lengths are given."""
        schedule = self.num_speculative_tokens_per_batch_size
        return None if schedule is None else max(1, *(drafts for _, _, drafts in schedule))


@dataclass(frozen=True, slots=True, kw_only=True)
class SpeculativeConfig:
    """How drafts are made and checked. Raises ConfigError: a value is out of range or two values
    contradict each other; NotYetError: a method, a rule or a key of vLLM that is not built yet."""

    drafters: tuple[DrafterConfig, ...]
    """Several drafters: a list of dictionaries with the keys of one drafter each. Left out where
    the keys of a single drafter stand beside the others. Adaptive control chooses among them in
    each step; without it the first in the list that has a draft serves a sequence."""
    rule: RuleConfig = flat(RuleConfig)
    """How drafts are checked."""
    load: LoadConfig = flat(LoadConfig)
    """How far to draft at which load."""

    @classmethod
    def from_dict(cls, given: Mapping[str, Any], target: str | None = None) -> Self:
        """Check a dictionary written as for vLLM.

        Args:
            given: the dictionary.
            target: the name of the target; a drafter without a model is the one shipped for it.

        Raises:
            ConfigError: an unknown or removed key, or a value out of range.
            NotYetError: a key whose part is not built, at other than its neutral value.
        """
        return cls.from_keys(translate(given), target)

    @classmethod
    def from_keys(cls, given: Mapping[str, Any], target: str | None = None) -> Self:
        """The same from keys in our words."""
        method = given.get("method")
        if given.get("drafters") is None and method not in (None, AUTO):
            find_method(method)  # before its keys: they may be unknown for that reason
        common, own = keys_of(cls), drafter_keys()
        kept = _accepted(given, (*common, *own))
        shared = grouped(cls, {key: value for key, value in kept.items() if key in common})
        longest = shared["load"].longest
        if "drafters" in kept:
            shared["drafters"] = _several(kept, target)
        elif method == AUTO:
            allowed = "nothing beside auto: give a method, or name the drafters in `drafters`"
            _refuse_keys_of_drafters(kept, allowed)
            max_drafts = kept.get("num_speculative_tokens") or longest
            shared["drafters"] = auto_drafters(target, max_drafts)
        else:
            single = {key: value for key, value in kept.items() if key in own}
            said = "method" in single or "model" in single
            allowed = f"{AUTO} for what suits the model, or {', '.join(method_names())}"
            require(WHERE + "method", None, said, allowed)
            shared["drafters"] = (
                DrafterConfig.from_keys(single, target=target, max_drafts=longest),
            )
        return cls(**shared)

    def __post_init__(self) -> None:
        check_fields(self, WHERE)
        require(WHERE + "drafters", self.drafters, len(self.drafters) > 0, _LIST)
        names = [drafter.label for drafter in self.drafters]
        for index, name in enumerate(names):
            where = f"{WHERE}drafters[{index}].name"
            require(where, name, name not in names[:index], "a name that no other drafter has")
        schedule = self.load.num_speculative_tokens_per_batch_size
        if schedule is not None:
            _read_schedule(schedule, self.num_speculative_tokens)
        assert self.synthetic_rates is not None, "checked by being read"

    @property
    def num_speculative_tokens(self) -> int:
        """Most draft tokens per verification, of any drafter."""
        return max(drafter.num_speculative_tokens for drafter in self.drafters)

    @property
    def drafts_trees(self) -> bool:
        """Whether a drafter drafts trees."""
        return any(drafter.tree.num_nodes is not None for drafter in self.drafters)

    @property
    def synthetic_rates(self) -> tuple[float, ...]:
        """Share of verifications that keep each draft under `synthetic`; else empty."""
        return self.rule.synthetic_rates(max(drafter.depth for drafter in self.drafters))


_KEYS = (*keys_of(SpeculativeConfig), *keys_of(DrafterConfig), *SPECULATIVE_KEYS.neutral)
GENERAL_KEYS = key_names().union(_KEYS)
"""What `speculative_config` knows or answers beside the keys of single methods."""
reserve_keys(GENERAL_KEYS)


def _accepted(given: Mapping[str, Any], known: Iterable[str]) -> dict[str, Any]:
    """What is given of the keys that are known."""
    kept = SPECULATIVE_KEYS.accept(given, known)
    return {key: value for key, value in kept.items() if value is not None}


def _several(kept: Mapping[str, Any], target: str | None) -> tuple[DrafterConfig, ...]:
    """The drafters of `drafters`, each completed with the common number of drafts. Raises
    ConfigError: `drafters` is not a list of dictionaries, or a key stands where it cannot."""
    where, entries = WHERE + "drafters", kept["drafters"]
    method, allowed = kept.get("method", "drafters"), "auto, drafters, or left out beside them"
    require(WHERE + "method", method, method in ("drafters", AUTO), allowed)
    _refuse_keys_of_drafters(kept, "nothing here: it goes inside one of the drafters")
    common = {key: kept[key] for key in ("num_speculative_tokens",) if key in kept}
    listed = isinstance(entries, Sequence) and not isinstance(entries, str) and len(entries) > 0
    require(where, entries, listed, _LIST)
    found = []
    for index, entry in enumerate(entries):
        place = f"{where}[{index}]"
        require(place, entry, isinstance(entry, Mapping), _LIST)
        try:
            for key in keys_of(SpeculativeConfig):
                allowed = "outside of drafters: it holds for all"
                require(WHERE + key, entry.get(key), key not in entry, allowed)
            keys = {**common, **_accepted(entry, drafter_keys())}
            found.append(DrafterConfig.from_keys(keys, target=target))
        except ConfigError as error:
            raise type(error)(
                error.field.replace(WHERE, place + ".", 1), error.given, error.allowed
            ) from None
    return tuple(found)


def _refuse_keys_of_drafters(kept: Mapping[str, Any], allowed: str) -> None:
    """Raise a ConfigError for the first key of one drafter that stands outside of `drafters`."""
    for key, default in drafter_keys().items():
        if key in ("method", "num_speculative_tokens"):
            continue
        if key in kept and kept[key] != default:
            raise ConfigError(WHERE + key, kept[key], allowed)


def _read_schedule(given: object, max_drafts: int) -> Schedule:
    """num_speculative_tokens_per_batch_size as (first, last, drafts) triples. Raises ConfigError:
    not triples, sizes that do not start at 1 or do not ascend, or more drafts than `max_drafts`."""
    where = WHERE + "num_speculative_tokens_per_batch_size"
    allowed = f"[[first, last, drafts], ...], sizes from 1 upwards, 0 to {max_drafts} drafts each"
    try:
        ranges: Schedule = read(Schedule, given, where)
    except ConfigError:
        ranges = ()
    ends = 0, *(last for _, last, _ in ranges)
    fits = len(ranges) > 0 and ranges[0][0] == 1
    for (first, last, drafts), end in zip(ranges, ends, strict=False):
        fits = fits and end < first <= last and 0 <= drafts <= max_drafts
    require(where, given, fits, allowed)
    return ranges
