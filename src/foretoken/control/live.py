"""What an operator may change while the engine runs: a policy for all requests at once.

It only narrows what the engine was configured with, and holds from the next step on. The one
mutable object of its kind: budget and drafters read it, `Engine.set_speculation` writes it.
"""

from typing import final

from foretoken.types import Speculation


@final
class LivePolicy:
    """The operator's word, beside each request's own."""

    def __init__(self) -> None:
        """As configured."""
        self.speculation = Speculation()
