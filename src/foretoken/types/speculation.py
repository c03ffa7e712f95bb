"""What one request may say about speculation: whether, with which drafter, how far, at what risk.

Knows no drafters; whether a name exists is checked where requests are made. It never changes
which tokens come out, only how they are found.
"""

from dataclasses import dataclass, fields
from math import inf
from typing import Self

from foretoken.errors import ParameterError
from foretoken.types.scalars import plain, record_of

DEFAULT_GUARD = 0.02
"""Share of its time without speculation that drafts may cost a request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """One request's own policy, within what the engine was set up for. Raises ParameterError: a
    value is of the wrong type or out of range."""

    enabled: bool = True
    """False: plain decoding for this request."""
    drafter: str | None = None
    """Name of the only drafter to use; None: as the engine is configured."""
    num_speculative_tokens: int | None = None
    """Most drafts per verification, at most what the engine allows; 0 is plain decoding."""
    guard: float | None = None
    """Share of its time without speculation that drafts of its batch may cost this request, where
    lengths are decided by control; None: by its service tier, else what the operator says, else
    `DEFAULT_GUARD`."""

    @classmethod
    def of(cls, given: object) -> Self | None:
        """Read what a user wrote: None, a dictionary with these keys, or an object of this class.
        Raises ParameterError: something else, or an unknown key."""
        return None if given is None else record_of(cls, given, "speculation", "None or ")

    def __post_init__(self) -> None:
        """Check types and ranges; turn NumPy's scalars into Python's."""
        for spec in fields(self):
            object.__setattr__(self, spec.name, plain(getattr(self, spec.name)))
        _check("enabled", self.enabled, isinstance(self.enabled, bool), "True or False")
        name = self.drafter
        ok = name is None or (isinstance(name, str) and bool(name))
        _check("drafter", name, ok, "None or the name of a drafter")
        count = self.num_speculative_tokens
        ok = count is None or (isinstance(count, int) and not isinstance(count, bool))
        _check("num_speculative_tokens", count, ok and (count or 0) >= 0, "None or an integer >= 0")
        guard = self.guard
        ok = guard is None or (isinstance(guard, int | float) and not isinstance(guard, bool))
        _check("guard", guard, ok and 0.0 <= (guard or 0.0) < inf, "None or a number >= 0")


def _check(name: str, given: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ParameterError(f"speculation.{name}", given, allowed)
