"""What the front of several replicas has settled about a request before it sends it to one.

It comes in one header, and is believed only beside the internal key: whoever could write it could
be any tenant. Attempts of one request on several replicas have the same origin, so that their
answers have one id and one noise.
"""

import random
from collections.abc import Mapping
from typing import Annotated, final

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from foretoken.server.problems import Problem

ORIGIN_HEADER = "x-foretoken-origin"
INTERNAL_HEADER = "x-foretoken-internal-key"


@final
class RequestOrigin(BaseModel):
    """A request as the front knows it."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    tenant: str | None = None
    """What stands for its API key; None: no key is asked for."""
    answer: Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
    """The end of its answer's id."""
    created: int
    """Unix time, as the answer has it."""
    noise: Annotated[int, Field(ge=0, lt=1 << 64)]
    """What the keys of its prompts are drawn from where it brings no seed. It stays without one:
    the rules for such requests do not change."""

    @classmethod
    def of(cls, headers: Mapping[str, str]) -> "RequestOrigin | None":
        """Read the header; None without it. Raises Problem: 400, it is not what a front sends."""
        given = headers.get(ORIGIN_HEADER)
        if given is None:
            return None
        try:
            return cls.model_validate_json(given)
        except ValidationError as error:
            what = error.errors(include_url=False, include_context=False, include_input=False)[0]
            raise Problem(400, f"{ORIGIN_HEADER}: {what['msg']}") from None

    def keys(self) -> random.Random:
        """Where the keys of its prompts come from, one after the other."""
        return random.Random(self.noise)
