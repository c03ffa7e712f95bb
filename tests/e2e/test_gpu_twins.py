"""Promise 1 over a GPU's steps, with twins in the place of its kernels: the same tokens with and
without speculation, recorded and padded as on a device.

`make test-gpu-twins` runs the whole suites so; these few are in every run.
"""

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import SamplingParams
from foretoken.models.gpu.captured import CapturedSteps
from foretoken.models.tensors import SpanLayout
from foretoken.ops.gpu.twin_kernels import TwinKernels
from foretoken.runtime.ahead import ChainAhead, StepAhead
from foretoken.runtime.runner import Runner
from foretoken.runtime.scheduling.scheduler import Scheduler
from foretoken.v1.metrics.reader import Histogram
from tests.drafters import TreeProposer
from tests.e2e.heads import HEADS
from tests.e2e.lossless import (
    METHODS,
    PARAMETERS,
    PRESSURES,
    VOCAB,
    Result,
    counted,
    generate,
    is_idle,
    make_prompts,
    open_exact,
    with_model,
)
from tests.gpu_twins import asked, twins
from tests.marks import slow_but

COUNT, TOKENS = 6, 14
NAMES = ("greedy", "seeded", "filters", "greedy penalties")


@pytest.fixture(scope="module", autouse=True)
def kernels() -> Iterator[TwinKernels]:
    with twins() as found:
        yield found


def run(llm: Any, name: str) -> list[Result]:
    chosen = {"max_tokens": TOKENS, **PARAMETERS[name]}
    return generate(llm, make_prompts(COUNT, 3), chosen)


@pytest.fixture(scope="module")
def plain(model: Path, kernels: TwinKernels) -> dict[str, list[Result]]:
    """Without drafts, one request at a time."""
    with open_exact(model, None, **PRESSURES["one at a time"]) as llm:
        return {name: run(llm, name) for name in NAMES}


def _config(method: str, folders: dict[str, Path]) -> dict[str, Any]:
    if method in METHODS:
        return with_model(METHODS[method], folders["draft_model"])
    return {**HEADS[method], "model": str(folders[method])}


@pytest.mark.parametrize("method", slow_but([*METHODS, *HEADS], "ngram", "draft auto", "eagle3"))
def test_drafts_change_nothing(
    method: str,
    model: Path,
    folders: dict[str, Path],
    plain: dict[str, list[Result]],
    kernels: TwinKernels,
) -> None:
    kernels.launched.clear()
    with open_exact(model, _config(method, folders), max_num_seqs=4) as llm:
        for name in NAMES:
            assert run(llm, name) == plain[name], name
        assert counted(llm, "num_accepted_tokens") > 0
    assert kernels.launched["attend"] > 0


CHAINS_OF_ALL = ("draft auto", "eagle3", "dspark", "peagle", "anchored", "dflash")
CHAINS = slow_but([*CHAINS_OF_ALL], *CHAINS_OF_ALL[:3])


@pytest.mark.parametrize("method", CHAINS)
def test_a_recorded_chain_drafts_what_single_passes_draft(
    method: str, model: Path, folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As many drafts, of which as many are right: they are the same."""
    found = []
    for recorded in (True, False):
        if not recorded:
            for name in ("__call__", "draft_blocks"):
                monkeypatch.setattr(CapturedSteps, name, lambda *_, **__: None)
        with open_exact(model, _config(method, folders), max_num_seqs=4) as llm:
            for name in ("greedy", "seeded"):
                run(llm, name)
            counts = ("num_drafts", "num_draft_tokens", "num_accepted_tokens")
            found.append([counted(llm, f":spec_decode_{one}") for one in counts])
    assert found[0] == found[1]


def test_a_pass_of_a_head_is_the_same_when_it_is_recorded(
    model: Path, folders: dict[str, Path]
) -> None:
    """Rows alone, together and in a pass that is too long to be recorded; first and again."""
    with open_exact(model, _config("eagle3", folders)) as llm:
        [member] = llm._engine.parts.proposer.members.values()  # type: ignore[attr-defined]
        runner = member.proposer.network
        runner.features.slots_SF.normal_(generator=torch.Generator().manual_seed(1))
        counts = (3, 14, 5, 200, 190)
        spans = [
            SpanLayout(start=0, num_tokens=n, page_table=list(range(20 * i, 20 * i + 20)))
            for i, n in enumerate(counts)
        ]
        ids = [7 * i % VOCAB for i in range(412)]
        with torch.inference_mode():
            mixed = runner.mixed_features(spans)
            whole = runner.forward(spans, ids, mixed)
            for _ in range(2):
                at = 0
                for span in spans:
                    part = slice(at, at + span.num_tokens)
                    own = runner.forward([span], ids[part], mixed[part])
                    assert torch.equal(own, whole[part]), span.num_tokens
                    at = part.stop


@pytest.mark.parametrize("method", CHAINS)
def test_a_chain_waits_once(method: str, model: Path, folders: dict[str, Path]) -> None:
    """The host copies numbers in and reads tokens, whatever the head; the masks of a head with some
    are copied, too."""
    name = "draft_blocks" if method in ("dflash", "dspark") else "__call__"
    found, chain = list[Any](), getattr(CapturedSteps, name)

    def counted_chain(*args: Any, **kwargs: Any) -> Any:
        with asked() as counts:
            rolled = chain(*args, **kwargs)
        found.append(counts)
        return rolled

    with (
        pytest.MonkeyPatch.context() as patch,
        open_exact(model, _config(method, folders), max_num_seqs=4) as llm,
    ):
        patch.setattr(CapturedSteps, name, counted_chain)
        patch.setattr(ChainAhead, "launched", lambda *_: None)
        run(llm, "greedy")
    copies = 3 if method in ("peagle", "anchored") else 2
    least = Counter({"copy_": copies, "read by the host": 1})
    assert all(counts["read by the host"] == 1 for counts in found)
    # Some were recorded in that call, which makes memory.
    assert least in found and all(least <= counts for counts in found)


@pytest.mark.parametrize("believed", [True, False])
@pytest.mark.parametrize("method", slow_but([*CHAINS_OF_ALL], "draft auto"))
def test_drafts_are_verified_before_they_are_read(
    method: str,
    believed: bool,
    model: Path,
    folders: dict[str, Path],
    plain: dict[str, list[Result]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where they are not what was thought, the step runs once more, and soon none is begun so."""
    if not believed:
        monkeypatch.setattr(ChainAhead, "read", lambda *_: None)
    with open_exact(model, _config(method, folders), max_num_seqs=4) as llm:
        for name in NAMES:
            assert run(llm, name) == plain[name], name
        chains, steps = llm._engine.parts.ahead.chains, counted(llm, ":engine_steps")
        assert (chains._right, chains._wrong) == (0, 5) or (believed and not chains._wrong)
        assert chains._right > steps / 4 or not believed


ENDS = {"temperature": 1.0, "seed": 11, "stop_token_ids": list(range(0, VOCAB, 9))}


@pytest.mark.parametrize("pressure", slow_but([*PRESSURES], "calm", "shortage"))
def test_a_step_that_is_begun_early_changes_nothing(
    pressure: str, model: Path, kernels: TwinKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not a token, nor what is counted, nor the pages that a prompt seen before is found on."""
    found, begun, resume = list[Any](), Counter[str](), Scheduler.resume

    def count(scheduler: Scheduler) -> None:
        begun["early"] += 1
        resume(scheduler)

    monkeypatch.setattr(Scheduler, "resume", count)
    several = [PARAMETERS["greedy"], ENDS, PARAMETERS["logprobs"], PARAMETERS["filters"]]
    names = (":prompt_tokens", ":generation_tokens", ":request_success", ":engine_steps")
    for early in (True, False):
        if not early:
            monkeypatch.setattr(StepAhead, "begin", lambda *_: None)
        with open_exact(model, None, **PRESSURES[pressure]) as llm:
            prompts = make_prompts(8, 3)
            results = [generate(llm, prompts, {"max_tokens": 20, **one}) for one in several * 2]
            [rows] = [one for one in llm.get_metrics() if "iteration_tokens" in one.name]
            assert is_idle(llm) and isinstance(rows, Histogram)
            found.append((results, rows.sum, [counted(llm, name) for name in names]))
    assert begun["early"] > found[0][2][3] / 3
    assert found[0] == found[1]


@pytest.mark.parametrize("how", ["aborted", "broken off"])
def test_a_step_that_is_begun_early_and_not_wanted_leaves_nothing(
    how: str, model: Path, kernels: TwinKernels, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Requests end between steps and come again by the same names, beside some that go on."""
    with open_exact(model, None, max_num_seqs=4) as llm:
        engine, found = llm._engine, dict[str, list[int]]()
        params = SamplingParams(temperature=0.9, seed=3, max_tokens=24, detokenize=False)

        def ask(*names: str) -> None:
            for name in names:
                prompt = [5, *map(ord, name)]
                [request] = engine.make_requests(name, [token % VOCAB for token in prompt], params)
                engine.add_request(request)
                found[name] = []

        def step() -> None:
            for output in engine.step():
                found[output.request_id] += output.new_token_ids
            engine.parts.scheduler.check_integrity()

        def finish() -> dict[str, list[int]]:
            while engine.has_unfinished:
                step()
            assert engine.parts.scheduler.pool.num_used == 0
            return dict(found)

        ask("a", "bb", "ccc")
        whole = finish()
        for count in (3, 4, 9):
            ask("a", "bb", "ccc")
            for _ in range(count):
                step()
            if how == "aborted":
                engine.abort("a")
                engine.abort("ccc")
                ask("ccc", "a")
            else:
                with monkeypatch.context() as patch:
                    patch.setattr(Runner, "run", lambda *_: 1 / 0)
                    with pytest.raises(ZeroDivisionError):
                        step()
                assert sorted(engine.cancelled) == ["a", "bb", "ccc"]
                for name in engine.cancelled:
                    engine.fail(name, "it was broken off")
                ask("ccc", "bb", "a")
            assert finish() == whole, count


def test_right_branches_of_trees(model: Path, plain: dict[str, list[Result]]) -> None:
    """Nodes stand where a chain would not have them, and have a chain's bits."""
    known = {str(i): list(result.token_ids) for i, result in enumerate(plain["greedy"])}
    config = {"method": "ngram", "num_speculative_tokens": 9}
    proposer = TreeProposer(VOCAB, outputs=known, seed=1)
    with open_exact(model, config, proposer=proposer, max_num_seqs=4) as llm:
        assert run(llm, "greedy") == plain["greedy"]
        assert counted(llm, "num_accepted_tokens") > COUNT * TOKENS / 3
