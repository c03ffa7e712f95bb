"""The checks, in the order in which they are made. Each is one module with one sentence."""

from foretoken.lab.audit.check import AuditCheck
from foretoken.lab.audit.checks.grammars import GRAMMARS
from foretoken.lab.audit.checks.greedy import GREEDY
from foretoken.lab.audit.checks.logprobs import LOGPROBS
from foretoken.lab.audit.checks.placeholders import PLACEHOLDERS
from foretoken.lab.audit.checks.prefixes import PREFIXES
from foretoken.lab.audit.checks.seeds import SEEDS
from foretoken.lab.audit.checks.stops import STOPS
from foretoken.lab.audit.checks.streams import STREAMS
from foretoken.lab.audit.checks.tools import TOOLS
from foretoken.lab.audit.checks.usage import USAGE
from foretoken.lab.audit.checks.verification import VERIFICATION

CHECKS: tuple[AuditCheck, ...] = (
    GREEDY,
    VERIFICATION,
    LOGPROBS,
    SEEDS,
    STREAMS,
    STOPS,
    GRAMMARS,
    TOOLS,
    PREFIXES,
    USAGE,
    PLACEHOLDERS,
)
