"""An output as far as another engine has written it, for a request that goes on from there.

Knows no vocabulary and no parameters; whether an output can go on is checked where requests are
made.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Self

from foretoken.errors import ParameterError
from foretoken.types.scalars import plain, record_of

_IDS = "a list of integers >= 0"


@dataclass(frozen=True, slots=True, kw_only=True)
class Resume:
    """One output of a request that broke off elsewhere; a request has `n` of them. Raises
    ParameterError: a value is of the wrong type or out of range."""

    output_ids: Sequence[int] = ()
    """Token ids that were written, in order; none if it had not begun."""
    ended: bool = False
    """Whether it came to its end there: then nothing of it is computed here."""

    @classmethod
    def list_of(cls, given: object) -> tuple[Self, ...] | None:
        """Read what a user wrote: None, or one entry per output, each a dictionary with these keys
        or an object of this class.

        Raises:
            ParameterError: something else, an unknown key, or no output that goes on.
        """
        if given is None:
            return None
        if not isinstance(given, Sequence) or isinstance(given, str | bytes):
            raise ParameterError("resume", given, "None or a list with one entry per output")
        found = tuple(record_of(cls, one, "resume") for one in given)
        if found and all(one.ended for one in found):
            given = f"{len(found)} outputs, all ended"
            raise ParameterError("resume.ended", given, "at least one output that goes on")
        return found

    def __post_init__(self) -> None:
        """Check types; turn the ids into a tuple."""
        given = self.output_ids
        if not hasattr(given, "__iter__") or isinstance(given, str | bytes | Mapping):
            raise ParameterError("resume.output_ids", given, _IDS)
        ids = tuple(map(plain, given))
        for one in ids:
            if not isinstance(one, int) or isinstance(one, bool) or one < 0:
                raise ParameterError("resume.output_ids", one, _IDS)
        object.__setattr__(self, "output_ids", ids)
        object.__setattr__(self, "ended", plain(self.ended))
        if not isinstance(self.ended, bool):
            raise ParameterError("resume.ended", self.ended, "True or False")
