"""A step runs on the kernels' pool, with one thread of PyTorch's."""

from collections.abc import Sequence

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.kernels.library import Library, find_library
from foretoken.kernels.threads import StepThreads
from foretoken.runtime.batch import Batch


@pytest.fixture
def library() -> Library:
    found = find_library()
    if found is None:
        pytest.skip("no compiled kernels")
    return found


def test_inside_pytorch_has_one_thread_and_the_pool_its_own(library: Library) -> None:
    outside, most = torch.get_num_threads(), library.cores
    library.use_threads(1)
    with StepThreads(library, most):
        assert torch.get_num_threads() == 1
        assert library.handle.ft_threads() == most
    assert torch.get_num_threads() == outside


def test_an_error_gives_threads_back(library: Library) -> None:
    outside = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.raises(ValueError), StepThreads(library, 2):
        raise ValueError
    assert torch.get_num_threads() == 2
    torch.set_num_threads(outside)


def test_without_kernels_nothing_changes() -> None:
    outside = torch.get_num_threads()
    torch.set_num_threads(2)
    with StepThreads(None, 1):
        assert torch.get_num_threads() == 2
    torch.set_num_threads(outside)


def test_one_thread_of_pytorch_in_every_step(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool keeps the number that PyTorch had when the engine was made."""
    outside = torch.get_num_threads()
    torch.set_num_threads(2)
    with LLM("demo", speculative_config={"method": "ngram"}) as llm:
        seen: list[tuple[int, int]] = []
        runner = llm._engine.parts.runner
        settle = runner.settle

        def watched(batch: Batch, accepted: Sequence[tuple[int, ...] | None]) -> None:
            seen.append((torch.get_num_threads(), library.handle.ft_threads()))
            settle(batch, accepted)

        monkeypatch.setattr(runner, "settle", watched)
        torch.set_num_threads(3)
        llm.generate("def f():\n", SamplingParams(max_tokens=4), use_tqdm=False)
        assert seen and set(seen) == {(1, min(2, library.cores))}
        assert torch.get_num_threads() == 3
    torch.set_num_threads(outside)
