"""Which threads work during a step: the kernels' own pool, and none of PyTorch's beside it.

PyTorch's operations share their work among OpenMP's threads and wait at a barrier until the last is
done. On a machine with other work, a thread that is not running holds up every small operation by
a time slice of the scheduler, while the pool never waits for a worker that has not begun
(native/foretoken.h). With kernels all heavy work is the pool's, so PyTorch gets one thread for the
length of a step, and back what it had. Knows nothing of steps.
"""

from types import TracebackType
from typing import final

import torch

from foretoken.kernels.library import Library


@final
class StepThreads:
    """A context: inside, the pool has its threads and PyTorch one."""

    def __init__(self, library: Library | None, threads: int) -> None:
        """Give the pool `threads` threads inside; without a library nothing is changed."""
        self._library = library
        self._threads = threads
        self._outside = threads

    def __enter__(self) -> None:
        """Take PyTorch's threads away."""
        if self._library is None:
            return
        self._library.use_threads(self._threads)
        self._outside = torch.get_num_threads()
        if self._outside != 1:
            torch.set_num_threads(1)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Give them back."""
        if self._library is not None and self._outside != 1:
            torch.set_num_threads(self._outside)
