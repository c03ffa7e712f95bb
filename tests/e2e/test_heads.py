"""Heads in the engine: the same tokens as plain decoding, and KV that is never stale."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file
from torch import nn

from foretoken import LLM, SamplingParams
from foretoken.config import SpeculativeConfig
from foretoken.control.plan import DraftPlan
from foretoken.errors import CheckpointError, ConfigError
from foretoken.kernels.library import find_library
from foretoken.models.builder import Builder
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.kv_proposer import KVProposer
from foretoken.testing import TINY
from foretoken.text.tokenizer import Tokenizer
from tests.drafters import ReplayProposer
from tests.e2e.heads import HEADS
from tests.e2e.lossless import (
    PARAMETERS,
    PRESSURES,
    asking,
    counted,
    drawn,
    generate,
    make_prompts,
    open_exact,
    open_llm,
)
from tests.golden.test_gguf import Kind
from tests.golden.test_gguf import write_both as write_gguf
from tests.marks import slow, slow_but
from tests.property.exact import assert_alike

TOKENS, COUNT = 32, 12
WITH_KV = ("eagle", "eagle3", "peagle", "anchored", "dflash", "dflash reduced", "dspark")
IN_BLOCKS = {"peagle", "anchored", "dflash", "dflash reduced", "dspark", "pard"}
UNSURE = {
    "dflash": 0.05, "dflash reduced": 0.06, "dspark": 0.5, "eagle": 0.05, "eagle3": 0.07,
    "peagle": 0.073, "anchored": 0.07, "mlp": 0.035, "medusa": 0.25, "pard": 0.35,
}  # fmt: skip
"""About the third of the probabilities that these random heads give their best tokens."""


run, plain = asking(COUNT, TOKENS)
run_long, plain_long = asking(320, TOKENS)


def _open(model: Path, config: dict[str, Any], folder: Path, **pressure: Any) -> LLM:
    return open_exact(model, {**config, "model": str(folder)}, **pressure)


@pytest.mark.parametrize("pressure", slow_but(["calm", "shortage"], "shortage"))
@pytest.mark.parametrize("name", HEADS)
def test_heads_change_no_token(
    name: str, pressure: str, model: Path, folders: dict[str, Path], plain: Any
) -> None:
    """Greedy, seeded with filters, and with penalties, in one batch, also short of pages."""
    with _open(model, HEADS[name], folders[name], **PRESSURES[pressure]) as llm:
        for parameters in ("greedy", "filters", "greedy penalties"):
            assert run(llm, parameters) == plain(parameters)
        # Short of pages the target's come first, and drafters have what is left.
        least = 5 if pressure == "shortage" else 100
        assert counted(llm, "num_draft_tokens") > least
        assert bool(llm.block_drafters) == (name in IN_BLOCKS)


@pytest.mark.skipif(find_library() is None, reason="multiplied out without kernels")
@pytest.mark.parametrize("name", slow_but(HEADS, "eagle", "eagle3", "dflash", "medusa"))
def test_heads_read_a_table_of_few_bits(
    name: str, folders: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A GGUF file's table stays packed; heads that borrow it read the rows that its floats have:
    what they draft is accepted as often."""
    monkeypatch.setattr(Tokenizer, "of_folder", lambda folder: None)
    sizes: dict[str, Any] = {**TINY, "tie_word_embeddings": True}
    target, _ = write_gguf(tmp_path, {"": Kind.Q8_0}, **sizes)
    counts = []
    for packs in (True, False):
        if not packs:
            monkeypatch.setattr(Builder, "_packs_tables", False)
        with _open(target, HEADS[name], folders[name]) as llm:
            assert llm._engine.parts.runner.model.embedding.is_packed == packs
            found = generate(llm, make_prompts(COUNT, 3), {"max_tokens": TOKENS})
            counts.append((found, counted(llm, "num_accepted_tokens")))
    assert counts[0] == counts[1]


@pytest.mark.parametrize("name", slow_but(HEADS, "eagle3", "dspark"))
def test_an_unsure_head_stops_early(
    name: str, model: Path, folders: dict[str, Path], plain: Any
) -> None:
    """Drafts of several lengths; the same tokens, greedy and seeded."""
    most = HEADS[name]["num_speculative_tokens"]
    unsure = {**HEADS[name], "draft_confidence_threshold": UNSURE[name]}
    with _open(model, unsure, folders[name], **PRESSURES["calm"]) as llm:
        for parameters in ("greedy", "filters"):
            assert run(llm, parameters) == plain(parameters)
        params = SamplingParams(max_tokens=TOKENS, temperature=0.0, detokenize=False)
        found = llm.generate(make_prompts(COUNT, 3), params, use_tqdm=False)
    metrics = [request.outputs[0].metrics for request in found]
    lengths = {n for m in metrics if m is not None for n in m.drafted_per_step}
    assert len(lengths) > 1 and max(lengths) <= most and min(lengths) >= 1, lengths


@pytest.mark.slow
@pytest.mark.parametrize("parameters", PARAMETERS)
@pytest.mark.parametrize("name", HEADS)
def test_ten_thousand_tokens(
    name: str, parameters: str, model: Path, folders: dict[str, Path], plain_long: Any
) -> None:
    """At least 10,000 tokens per head and parameter set."""
    with _open(model, HEADS[name], folders[name], **PRESSURES["calm"]) as llm:
        found = run_long(llm, parameters)
        assert found == plain_long(parameters)
        if parameters != "stops":
            assert sum(len(result.token_ids) for result in found) >= 10_000


class Audited(Proposer):
    """Asks a proposer, and the same one with its memory wiped."""

    name = "audited"

    def __init__(self, kept: KVProposer) -> None:
        self._kept = kept
        self._book = kept.progress
        self.num_compared = 0

    def propose(self, context: Context) -> Draft:
        found = self._kept.propose(context)
        known, self._book._reaches = self._book._reaches, {}
        filled, self._book._filled = self._book._filled, {}
        expected = self._kept.propose(context)
        self._book._reaches, self._book._filled = known, filled
        assert found.ids == expected.ids
        self.num_compared += sum(bool(ids) for ids in found.ids)
        return replace(found)

    def release(self, request_id: str) -> None:
        self._book.release(request_id)


@pytest.mark.parametrize("pressure", slow_but(["calm", "chunks", "shortage"], "shortage"))
@pytest.mark.parametrize("name", WITH_KV)
def test_kept_kv_equals_kv_computed_anew(
    name: str, pressure: str, model: Path, folders: dict[str, Path]
) -> None:
    """Pauses, partial acceptance, chunked prefill, preemption and prefix hits: at every step the
    drafts are those of a head that reads all features anew."""
    settings = {**PRESSURES[pressure], "block_size": 8}
    with _open(model, HEADS[name], folders[name], **settings) as llm:
        parts = llm._engine.parts
        [member] = parts.proposer.members.values()  # type: ignore[attr-defined]
        kept = member.proposer
        assert isinstance(kept, KVProposer)
        audited = Audited(kept)
        object.__setattr__(parts, "proposer", audited)
        cycle = (4, 0, 0, 1, 3, 2, 0)
        calls = iter(range(10**9))
        parts.scheduler._plan_drafts = lambda requests, load: DraftPlan(
            load=load, budgets=tuple(cycle[next(calls) % len(cycle)] for _ in requests)
        )
        params = SamplingParams(max_tokens=24, temperature=0.0, detokenize=False)
        for _ in range(2):
            llm.generate(make_prompts(9, 5), params, use_tqdm=False)
        assert audited.num_compared > (20 if pressure == "shortage" else 80)


def test_wrong_heads_are_refused(model: Path, draft: Path, folders: dict[str, Path]) -> None:
    """Another method, no mask, no weights, a plain model as PARD: each says what is allowed."""
    with pytest.raises(ConfigError, match="method.*eagle3, which"):
        _open(model, {"method": "eagle"}, folders["eagle3"])
    with pytest.raises(ConfigError, match="no mask"):
        _open(model, {"method": "eagle3", "parallel_drafting": True}, folders["eagle3"])
    with pytest.raises(CheckpointError, match="pard_token"):
        _open(model, HEADS["pard"], draft)
    with pytest.raises(ConfigError, match="parallel_drafting"):
        _open(model, {"method": "mlp", "parallel_drafting": True}, folders["mlp"])
    with pytest.raises(ConfigError, match="drafter for method mlp"):
        LLM(str(model), speculative_config={"method": "mlp", "num_speculative_tokens": 3})


@pytest.mark.parametrize(
    ("name", "method"),
    [
        ("eagle", "eagle"), ("eagle3", "eagle3"), ("peagle", "eagle3"), ("dflash", "dflash"),
        ("dflash reduced", "dflash"), ("dspark", "dspark"), ("mlp", "mlp"), ("medusa", "medusa"),
        ("pard", "parallel"),
    ],
)  # fmt: skip
def test_the_method_follows_from_the_folder(
    name: str, method: str, folders: dict[str, Path]
) -> None:
    """Left out, the method is what config.json says, or, of EAGLE's own format, the tensors."""
    [config] = SpeculativeConfig.from_dict({"model": str(folders[name])}).drafters
    assert config.method == method


@pytest.mark.slow
def test_heads_among_other_drafters(model: Path, folders: dict[str, Path], plain: Any) -> None:
    """Several heads and a look-up take turns; a request may name one; no token changes."""
    heads = [
        {**HEADS[name], "model": str(folders[name]), "name": name}
        for name in ("eagle3", "mlp", "medusa", "dflash")
    ]
    lookup = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1}
    config = {"drafters": [lookup, *heads]}
    with open_exact(model, config, max_num_seqs=16) as llm:
        for parameters in ("greedy", "filters"):
            assert run(llm, parameters) == plain(parameters)
        wishes = ["mlp", "eagle3", "medusa", "dflash"] * (COUNT // 4)
        params = [
            SamplingParams(
                max_tokens=TOKENS, temperature=0.0, detokenize=False, speculation={"drafter": wish}
            )
            for wish in wishes
        ]
        found = llm.generate(make_prompts(COUNT, 3), params, use_tqdm=False)
    ids = [out.outputs[0].token_ids for out in found]
    assert ids == [result.token_ids for result in plain("greedy")]
    for wish, out in zip(wishes, found, strict=True):
        metrics = out.outputs[0].metrics
        assert metrics is not None and set(metrics.drafter_per_step) <= {wish, ""}
        assert wish in metrics.drafter_per_step


@pytest.mark.parametrize(
    "stop", [slow({}), {"draft_confidence_threshold": 0.45}], ids=["all", "sure"]
)
@pytest.mark.parametrize("name", slow_but(["peagle", "dflash", "dspark"], "dspark"))
def test_drawn_drafts_have_the_plain_distribution(
    name: str, stop: dict[str, Any], model: Path, folders: dict[str, Path], drawn_plain: Any
) -> None:
    """Four tokens without a seed: a two-sample chi-square of what came out."""
    with _open(model, {**HEADS[name], **stop}, folders[name], seed=3) as llm:
        assert_alike(drawn_plain(4), drawn(llm, 4), least_freedom=3)


@pytest.mark.skipif(find_library() is None, reason="without kernels nothing is packed")
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_matrices_of_blocks_are_there_once(
    name: str, model: Path, folders: dict[str, Path]
) -> None:
    """What was packed is not kept beside it."""
    config = {**HEADS[name], "quantization": "int8"}
    with _open(model, config, folders[name]) as llm:
        [member] = llm._engine.parts.proposer.members.values()  # type: ignore[attr-defined]
        net = member.proposer.make_steps([]).runner.net
        left = [one for one in net.modules() if isinstance(one, nn.Linear)]
        assert {one.out_features for one in left} <= {1}, "but what judges drafts"


class Promoted(Proposer):
    """Audits a head's drafts and gives others in their place that are mostly right."""

    name = "promoted"

    def __init__(self, kept: KVProposer, known: ReplayProposer) -> None:
        self.audited, self._known = Audited(kept), known

    def propose(self, context: Context) -> Draft:
        self.audited.propose(context)
        return self._known.propose(context)

    def release(self, request_id: str) -> None:
        self.audited.release(request_id)


@pytest.mark.parametrize("wrong", [0.0, 0.2])
@pytest.mark.parametrize("name", ["eagle3", "dflash", "dspark"])
def test_kept_kv_where_drafts_are_accepted(
    name: str, wrong: float, model: Path, folders: dict[str, Path]
) -> None:
    """Whole drafts accepted, and some of each: at every step the drafts are those of a head that
    reads all features anew."""
    params = SamplingParams(max_tokens=40, temperature=0.0, detokenize=False, ignore_eos=True)
    prompts = make_prompts(9, 5)
    with open_llm(model, None, "plain") as llm:
        found = llm.generate(prompts, params, use_tqdm=False)
        known = {out.request_id: list(out.outputs[0].token_ids) for out in found}
    settings = {**PRESSURES["calm"], "block_size": 8}
    with _open(model, HEADS[name], folders[name], **settings) as llm:
        parts = llm._engine.parts
        [member] = parts.proposer.members.values()  # type: ignore[attr-defined]
        replay = ReplayProposer(known, int(TINY["vocab_size"]), wrong=wrong, seed=1)
        promoted = Promoted(member.proposer, replay)
        object.__setattr__(parts, "proposer", promoted)
        again = llm.generate(prompts, params, use_tqdm=False)
    most = HEADS[name]["num_speculative_tokens"]
    assert {out.request_id: list(out.outputs[0].token_ids) for out in again} == known
    assert promoted.audited.num_compared > 60
    steps = [out.outputs[0].metrics for out in again]
    assert max(n for one in steps if one is not None for n in one.accepted_per_step) == most


def test_copies_of_the_targets_tables_are_given_up(
    model: Path, folders: dict[str, Path], tmp_path: Path, plain: Any
) -> None:
    """DeepSpec's files have some; a head that differs is kept."""
    target = load_file(model / "model.safetensors")
    head = load_file(folders["dspark"] / "model.safetensors")
    head["embed_tokens.weight"] = target["model.embed_tokens.weight"]
    save_file(head, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_bytes((folders["dspark"] / "config.json").read_bytes())
    with _open(model, HEADS["dspark"], tmp_path) as llm:
        [member] = llm._engine.parts.proposer.members.values()  # type: ignore[attr-defined]
        net = member.proposer.make_steps([]).runner.net
        assert not net.shape.own_embedding and net.shape.own_head
        assert net.table is llm._engine.parts.runner.model.embedding
        assert run(llm, "greedy") == plain("greedy")
