"""A whole search on a server under test: ask what is next, visit, write it down, until enough.

Knows neither statistics nor servers; both are handed in.
"""

from collections.abc import Callable
from dataclasses import replace

from foretoken.lab.tune.journal import Journal
from foretoken.lab.tune.search import NextVisit, Search, next_visit
from foretoken.lab.tune.visits import ServerUnderTest, Visit

Begins = Callable[[NextVisit], None]
Ended = Callable[[Visit], None]


def run_search(
    search: Search, server: ServerUnderTest, journal: Journal, begins: Begins, ended: Ended
) -> None:
    """Visit until the search has ended; what is in the journal is not measured again.

    Raises:
        EndpointError: the server does not start without speculation.
        ConfigError: the disk is full.
    """
    while (wanted := next_visit(search, journal.visits)) is not None:
        begins(wanted)
        seen = server.visit(wanted.setting, wanted.turn, wanted.sizes)
        visit = replace(seen, check=wanted.check)
        journal.add(visit)
        ended(visit)
