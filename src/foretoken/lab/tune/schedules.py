"""Lengths by load as ranges of running requests, the way engines are told them."""

from collections.abc import Sequence

from foretoken.lab.launch.drafting import MOST_RUNNING, Ranges


def ranges_of(lengths: Sequence[int], loads: Sequence[int]) -> Ranges:
    """(first, last, length), from 1 on; a range ends half way to the next load, in ratios.

    Ranges beside each other with the same length are one.
    """
    assert len(lengths) == len(loads), (lengths, loads)
    found: list[tuple[int, int, int]] = []
    first = 1
    for place, length in enumerate(lengths):
        last = MOST_RUNNING
        if place + 1 < len(loads):
            last = max(int((loads[place] * loads[place + 1]) ** 0.5), loads[place])
        if found and found[-1][2] == length:
            found[-1] = (found[-1][0], last, length)
        else:
            found.append((first, last, length))
        first = last + 1
    return tuple(found)
