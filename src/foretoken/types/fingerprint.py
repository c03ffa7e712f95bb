"""By what an engine's arithmetic is told from another's. Knows no engine: three words, compared."""

from typing import NamedTuple


class Fingerprint(NamedTuple):
    """Engines of one fingerprint give the same bits for the same request.

    The words mean nothing by themselves; they are equal or not.
    """

    build: str
    """Version and commit of the package."""
    precision: str
    """The model, and how weights, activations, keys and values are rounded: what decides the
    distribution of tokens."""
    kernels: str
    """What computes, and how it splits its work: instruction sets, threads where bits depend on
    them, devices."""
