"""Which part of a number of equal things is a rank's: heads, outputs of a matrix, ids, layers.

Parts are neighbours in the order of ranks, so that gathered parts stand where they belong.
"""

from dataclasses import dataclass

from foretoken.shape.memory_formula import copies_of


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

    def key_heads(self, total: int) -> range:
        """This rank's part of so many key heads; neighbours have the same one where there are
        fewer than ranks."""
        copies = copies_of(total, self.size)
        return Share(self.rank // copies, self.size // copies).of(total)

    def queries(self, key_heads: int, queries: int) -> range:
        """Which of the `queries` query heads of each of its key heads are this rank's; those who
        have the same key head share them out."""
        copies = copies_of(key_heads, self.size)
        return Share(self.rank % copies, copies).of(queries)
