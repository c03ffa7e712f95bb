"""GET /internal/replica: how a replica is, for the front that sends requests to it.

Answers without asking the engine's thread, so also during a long step. Knows no other replica.
"""

from typing import final

from pydantic import BaseModel, ConfigDict
from starlette.requests import Request
from starlette.responses import Response

from foretoken.router.view import ReplicaView
from foretoken.server.problems import Problem
from foretoken.server.replica_protocol.pace import Backlog, Paces
from foretoken.server.state import state_of
from foretoken.types.fingerprint import Fingerprint

PATH = "/internal/replica"


@final
class Report(BaseModel):
    """A replica at a moment."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    fingerprint: tuple[str, str, str]
    draining: bool
    backlog: Backlog
    paces: Paces
    alive: bool
    """Whether its engine can still run anything."""
    stalled_s: float
    """Seconds since its engine last ended a step; 0 while it has nothing to do."""
    speculation: str
    """Drafters and their lengths, in words."""

    def view(self, replica_id: str, paces: Paces, ended: int) -> ReplicaView:
        """As the router sees it, at these paces, where so many of its requests have ended since;
        one whose engine is lost takes nothing more."""
        return ReplicaView(
            replica_id=replica_id,
            fingerprint=Fingerprint(*self.fingerprint),
            queue_s=self.backlog.without(ended).seconds(paces),
            prefill_token_s=paces.prefill_token_s,
            draining=self.draining or not self.alive,
        )


async def replica(request: Request) -> Response:
    """The report, for whoever has the internal key."""
    if not request.scope["foretoken.internal"]:
        raise Problem(404, f"GET {PATH}: Not Found")
    state, engine = state_of(request), state_of(request).engine
    report = Report(
        fingerprint=(*state.fingerprint,),
        backlog=state.pace.backlog,
        paces=state.pace.paces,
        draining=state.draining(),
        alive=engine.alive,
        stalled_s=engine.stalled_s,
        speculation=state.speculation,
    )
    return Response(report.model_dump_json(), media_type="application/json")
