"""Who may have outputs continued that broke off elsewhere, and which choices those are.

A client that could say what the model wrote could put words into its mouth, count tokens that were
never generated, and pass by whoever waits: only what brings the server's internal key may. Whether
ids can be gone on with is checked where requests are made.
"""

from starlette.requests import Request

from foretoken.errors import ParameterError
from foretoken.server.problems import Problem
from foretoken.server.schemas import GenerationBody
from foretoken.server.state import is_internal, state_of
from foretoken.types import Resume


def resume_of(
    request: Request, body: GenerationBody, num_choices: int
) -> tuple[Resume, ...] | None:
    """What the body's `resume` has of each choice; None without one.

    Raises:
        Problem: 400, the server was started without an internal key; 403, it was not given.
        ParameterError: the answer is no stream, or there are more or fewer choices.
    """
    if body.resume is None:
        return None
    given = f"{len(body.resume)} outputs"
    if state_of(request).config.internal_key is None:
        allowed = "nothing: the server was started without --internal-key"
        raise ParameterError("resume", given, allowed)
    if not is_internal(request):
        needed = "nothing without the internal key, in the header x-foretoken-internal-key"
        raise Problem(403, f"resume: got {given!r}; allowed: {needed}", "resume")
    if not body.stream:
        raise ParameterError("resume", given, "nothing without stream: true")
    if len(body.resume) != num_choices:
        allowed = f"one entry per choice: {num_choices}, n of each prompt"
        raise ParameterError("resume", given, allowed)
    return Resume.list_of([one.model_dump() for one in body.resume])
