"""Deciding may fail, requests may not: after the first failure every step is plain.

Stands between the engine and whoever plans or learns from steps. Knows neither of them; what it
catches is logged once, with its traceback, and said to whoever shows what control does. Invariant:
nothing that it was given is asked again after a failure, since nobody knows what state that is in.
"""

import logging
from collections.abc import Callable, Collection
from collections.abc import Sequence as Seq
from typing import ParamSpec, final

from foretoken.control.plan import (
    DecodingSequence,
    DraftPlan,
    DraftPlanner,
    StepLoad,
    plan_no_drafts,
)

logger = logging.getLogger("foretoken")

_Given = ParamSpec("_Given")


@final
class Failsafe:
    """Asks a planner, and has plain steps where it failed. A `foretoken.control.plan.DraftPlanner`
    is its `plan`."""

    def __init__(
        self, plan: DraftPlanner, drafters: Collection[str], say: Callable[[str], None]
    ) -> None:
        """Nothing failed yet.

        Args:
            plan: decides until something fails.
            drafters: who rests from then on.
            say: is told what failed, at most once.
        """
        self._plan, self._drafters, self._say = plan, frozenset(drafters), say
        self._failed = False

    def plan(self, sequences: Seq[DecodingSequence], load: StepLoad) -> DraftPlan:
        """How far the decoding sequences of the next step draft."""
        if not self._failed:
            try:
                return self._plan(sequences, load)
            except Exception as error:  # noqa: BLE001 - logged, and nobody's request is to blame
                self._fail("planning a step", error)
        return plan_no_drafts(sequences, load, self._drafters)

    def guarded(self, learn: Callable[_Given, None]) -> Callable[_Given, None]:
        """The function, which does nothing once something failed, and fails for nobody."""

        def safely(*args: _Given.args, **kwargs: _Given.kwargs) -> None:
            if self._failed:
                return
            try:
                learn(*args, **kwargs)
            except Exception as error:  # noqa: BLE001 - the same
                self._fail("learning from a step", error)

        return safely

    def _fail(self, doing: str, error: Exception) -> None:
        self._failed = True
        why = f"control failed {doing}: {type(error).__name__}: {error}"
        logger.exception("%s; every step is plain from now on, requests go on", why)
        self._say(why.replace("\n", " "))
