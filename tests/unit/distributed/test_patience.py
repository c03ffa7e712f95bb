"""How long ranks wait for each other in a step."""

import pytest

from foretoken.runtime.rank0_driver import Patience


def test_ranks_wait_by_the_slowest_of_the_last_steps() -> None:
    patience = Patience()
    assert patience.seconds(1) == 600.0, "nothing is known yet"
    patience.passed(0, 99.0)
    assert patience.seconds(1) == 600.0, "what only moves things says nothing"
    patience.passed(1, 2.0)
    patience.passed(8, 1.0)
    assert patience.seconds(1) == patience.seconds(8) == patience.seconds(0) == 45.0
    assert patience.seconds(640) == pytest.approx(405.0), "prompts take their time"
    for _ in range(64):
        patience.passed(4, 0.1)
    assert patience.seconds(1) == pytest.approx(7.0), "what was slow long ago is forgotten"
