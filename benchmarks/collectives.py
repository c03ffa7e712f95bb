"""Microseconds of an all-gather between processes of this host, by size and backend.

    python benchmarks/collectives.py [--ranks 2] [--times 2000]

Bytes are those of one rank's part, in bfloat16 [1, N], gathered along N; a broadcast is of 1 KiB.
`gloo` is what `foretoken.distributed.gloo` does, `gloo, known sizes` gloo's own gather without
the labels that ours sends first. Each repeat starts fresh processes, in rotated order; numbers
are medians over repeats of a process's median (tenth percentile).
"""

import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from common import announce, finish, interleave, make_parser, ratio_of_medians
from gathering import gather_and_time

from foretoken.distributed.gloo import GlooRendezvous
from foretoken.distributed.processes import Followers
from foretoken.distributed.shared_memory import SharedMemoryRendezvous

ARMS = {
    "shared memory": (SharedMemoryRendezvous.make, False),
    "gloo": (GlooRendezvous.make, False),
    "gloo, known sizes": (GlooRendezvous.make, True),
}
WAIT_S = 60.0


def in_processes(arm: str, ranks: int, times: int) -> dict[str, dict[str, float]]:
    """What rank 0 of fresh processes measured."""
    make, known = ARMS[arm]
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "found.json"
        given = (known, times, str(file))
        with Followers(make(ranks, WAIT_S), gather_and_time, *given) as followers:
            assert followers.group is not None
            gather_and_time(followers.group, *given)
        found: dict[str, dict[str, float]] = json.loads(file.read_text(encoding="utf-8"))
        return found


def main() -> None:
    """Measure, report."""
    parser = make_parser(__doc__)
    parser.add_argument("--ranks", type=int, default=2, help="default: %(default)s")
    parser.add_argument("--times", type=int, default=2000, help="calls of small sizes")
    settings = parser.parse_args()
    if settings.quick:
        settings.repeats, settings.times = 1, 20
    where = announce(settings)
    arms = {
        arm: (lambda arm=arm: in_processes(arm, settings.ranks, settings.times)) for arm in ARMS
    }
    runs = interleave(arms, settings.repeats)
    results: dict[str, Any] = {}
    for arm, found in runs.items():
        for name in found[0]:
            medians, tenths = ([one[name][key] for one in found] for key in ("median", "tenth"))
            value = {"median": statistics.median(medians), "tenth": statistics.median(tenths)}
            results[f"{arm}, {name}, us"] = value
            print(f"{arm}, {name} B: {value['median']:.1f} ({value['tenth']:.1f}) us")
    for name in runs["shared memory"][0]:
        gloo, own = (
            [one[name]["median"] for one in runs[arm]] for arm in ("gloo", "shared memory")
        )
        results[f"gloo / shared memory, {name}"] = ratio = ratio_of_medians(gloo, own)
        print(f"gloo / shared memory, {name} B: {ratio}")
    finish("collectives", where, settings, results, [])


if __name__ == "__main__":
    main()
