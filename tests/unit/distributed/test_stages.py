"""Layers on several ranks: each is run once, in order, and rank 0 sees what it asked for.

The guarded bugs: a stage that works on another's buffer, a run that begins at the wrong layer, a
point that nobody shows.
"""

import pytest

from foretoken.distributed.processes import Followers, meet
from tests.unit.distributed import working


@pytest.mark.slow
@pytest.mark.parametrize("size", [2, 3])
def test_every_layer_is_run_once_and_in_order(size: int) -> None:
    cases = [(size, ()), (7, ()), (7, (0, 3, 4, 6)), (8, (7, 5, 1)), (8, tuple(range(8)))]
    with Followers(meet(size, 60.0), working.stages, cases) as followers:
        working.stages(followers.joined, cases)
