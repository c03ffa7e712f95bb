"""Which part of a number of equal things is a rank's: heads, outputs of a matrix, ids.

Parts are neighbours in the order of ranks, so that gathered parts stand where they belong.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Share:
    """A rank among `size`; alone it has everything."""

    rank: int = 0
    size: int = 1

    def of(self, total: int) -> range:
        """This rank's part of `range(total)`: as large as the others' or one larger or smaller.

        `total` is at least the number of ranks, so that nobody is left without.
        """
        assert total >= self.size, (total, self.size)
        return range(total * self.rank // self.size, total * (self.rank + 1) // self.size)
