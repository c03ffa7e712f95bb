"""A server with several NUMA nodes, on paper: which way of using them decodes fastest?

    python benchmarks/sockets_on_paper.py --model FOLDER --weights int8

Nothing is run. A step is the longer of reading the weights from where they lie and of making the
products, as in `peer_floor.py`; what a node reads and multiplies, and what the link between nodes
carries, are given by options, whose defaults are a server of two sockets with eight channels of
DDR5-4800 (307 GB/s each, four fifths of it reached) and cores as measured in benchmarks/LOG.md.
With weights on one node that node's memory is the limit, whoever reads it; with pages spread over
the nodes, the links are. Processes that share layers (tensor parallel) read their own node and
gather four times a layer.
"""

import argparse
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from common import announce, finish, make_parser
from peer_floor import SCHEMES, Limits, Work

from foretoken.shape import ModelShape

GATHERS = 4
"""A layer's, of several processes that share it (benchmarks/LOG.md)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Nodes that are alike."""

    nodes: int
    cores: int
    """Of one node."""
    read_gb_per_s: float
    """What a node's cores read of its own memory together."""
    core_gb_per_s: float
    """What one core can."""
    link_gb_per_s: float
    """What the link between two nodes carries to one of them."""
    products_per_ns: float
    """Of one core."""
    gather_us: float

    def limits(self, cores: int, read_gb_per_s: float) -> Limits:
        """Of so many cores that read so much together."""
        read = min(read_gb_per_s, cores * self.core_gb_per_s) * 1e9
        rate = cores * self.products_per_ns * 1e9
        return Limits(read_bytes_per_s=read, products_per_s={"bf16": rate, "int16": rate})


def step_seconds(
    machine: Machine, work: Work, *, rows: int, context: float
) -> Mapping[str, tuple[float, float]]:
    """Way of using the machine -> seconds of a step of one replica, replicas side by side."""
    nodes, cores = machine.nodes, machine.nodes * machine.cores

    def seconds(limits: Limits) -> float:
        return work.pass_s(limits, context, rows)

    one = seconds(machine.limits(machine.cores, machine.read_gb_per_s))
    # Tiles go to whoever is free, so that the node with the weights gives all it can.
    near = machine.cores * machine.core_gb_per_s
    far = min(machine.read_gb_per_s, near + (nodes - 1) * machine.link_gb_per_s)
    # Of n nodes, n - 1 parts in n of what a node's cores read come over its link.
    spread = nodes * machine.read_gb_per_s
    if nodes > 1:
        spread = min(spread, machine.link_gb_per_s * nodes**2 / (nodes - 1))
    gathers = GATHERS * work.shape.num_hidden_layers * machine.gather_us / 1e6
    shared = seconds(machine.limits(cores, nodes * machine.read_gb_per_s))
    return {
        "one process, all cores, memory on one node": (seconds(machine.limits(cores, far)), 1),
        "one process, all cores, memory spread": (seconds(machine.limits(cores, spread)), 1),
        "one process on one node (--cpus numa:0)": (one, 1),
        f"--tensor-parallel-size {nodes}, a node each": (shared + gathers, 1),
        f"{nodes} replicas, a node each": (one, nodes),
    }


def main() -> None:
    """Print the table."""
    parser = make_parser(__doc__)
    parser.add_argument("--model", type=Path, required=True, help="only its config.json is read")
    parser.add_argument("--weights", choices=list(SCHEMES), default="int8")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 6, 32])
    for name, value in (("nodes", 2), ("cores", 32)):
        parser.add_argument(f"--{name}", type=int, default=value)
    for name, number, meaning in (
        ("read-gb-per-s", 245.0, "what a node reads of its own memory"),
        ("core-gb-per-s", 37.0, "what a core can read"),
        ("link-gb-per-s", 60.0, "what comes from the other node"),
        ("products-per-ns", 7.0, "pairs of 16 bits, a core, in a kernel; times 32"),
        ("gather-us", 18.0, "one gather of a few KiB"),
    ):
        parser.add_argument(f"--{name}", type=float, default=number, help=meaning)
    given = parser.parse_args()
    machine = machine_of(given)
    work = Work(shape=ModelShape.from_config(given.model), weights=given.weights)
    where, found = announce(given, timed=False), {}
    print("on paper, nothing is run: ms of a step, and steps per second of all replicas together")
    for rows in given.rows:
        ways = step_seconds(machine, work, rows=rows, context=given.context)
        found[rows] = {way: {"seconds": s, "replicas": n} for way, (s, n) in ways.items()}
        for way, (seconds, replicas) in ways.items():
            print(f"{rows:3d} rows  {way:45s} {seconds * 1e3:8.2f} ms {replicas / seconds:8.1f} /s")
    finish("sockets_on_paper", where, given, {"rows": found}, [])


def machine_of(given: argparse.Namespace) -> Machine:
    """What the options describe."""
    return Machine(
        nodes=given.nodes,
        cores=given.cores,
        read_gb_per_s=given.read_gb_per_s,
        core_gb_per_s=given.core_gb_per_s,
        link_gb_per_s=given.link_gb_per_s,
        products_per_ns=given.products_per_ns * 32,
        gather_us=given.gather_us,
    )


if __name__ == "__main__":
    main()
