"""Layers of a model that lie on several processes, some consecutive ones on each: a pipeline.

Rank 0 has the first of them, and begins and ends every step; the hidden states go from rank to rank
and come back. Nothing is computed twice and no sum is cut, so the bits are those of one process.
Knows neither what layers are nor where hidden states are kept.
"""

from collections.abc import Callable, Collection, Iterator
from typing import final

from torch import Tensor

from foretoken.distributed import Group, Share


@final
class Stages:
    """Who computes which layers, and in how many runs: what rank 0 wants to keep ends a run."""

    def __init__(self, group: Group, num_layers: int, points: Collection[int]) -> None:
        """Share layers out.

        Args:
            group: the ranks.
            num_layers: of the model.
            points: layers before which rank 0 wants to see the hidden states.
        """
        self._group, self._first = group, Share(group.rank, group.size).of(num_layers).start
        parts = [Share(rank, group.size).of(num_layers) for rank in range(group.size)]
        self._runs = tuple(
            (rank, run)
            for rank, part in enumerate(parts)
            for run in _cut(part, points if rank else ())
        )

    def __call__(
        self,
        x_TD: Tensor,
        run: Callable[[Tensor, range], Tensor],
        pass_by: Callable[[Tensor, int], None],
    ) -> Tensor:
        """Hidden states after the last layer, on every rank; all of them must call it.

        Args:
            x_TD: hidden states before the first layer; read on rank 0.
            run: takes them through these of this rank's own layers, counted from 0.
            pass_by: is shown what another rank is about to take through the layers from this one.
        """
        group, nothing = self._group, x_TD.new_empty(0)
        for rank, layers in self._runs:
            own = rank == group.rank
            if own:
                x_TD = run(x_TD, range(layers.start - self._first, layers.stop - self._first))
            else:
                pass_by(x_TD, layers.start)
            parts = group.swap(x_TD if own else nothing, group.wait_s)
            if not own:
                # It lies in the other rank's buffer, and layers may work in place.
                x_TD = parts[rank].clone()
        return x_TD


def _cut(layers: range, points: Collection[int]) -> Iterator[range]:
    """These layers in runs that begin at the points among them."""
    starts = [layers.start, *sorted(set(points).intersection(layers[1:]))]
    for start, stop in zip(starts, [*starts[1:], layers.stop], strict=True):
        yield range(start, stop)
