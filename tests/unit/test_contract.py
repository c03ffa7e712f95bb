"""Drafters: the contract that ships, several behind one, and the packaged ones."""

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import foretoken
from foretoken import checkpoint
from foretoken.config import EngineConfig
from foretoken.config.published import head_method
from foretoken.errors import ConfigError, ModelNotFoundError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer, ProposerSettings
from foretoken.proposers.choose.drafters import Drafters
from foretoken.proposers.choose.offers import Member
from foretoken.proposers.choose.policy import FirstPolicy
from foretoken.proposers.custom import load_custom
from foretoken.proposers.lookup.ngram import NgramProposer
from foretoken.proposers.lookup.suffix.proposer import SuffixProposer
from foretoken.runtime.sequence import Sequence
from foretoken.testing import contract as contracts
from foretoken.testing.contract import CONTRACT, MakeProposer
from tests.drafters import JunkProposer
from tests.unit.proposing import make_context, make_sequence

SETTINGS = ProposerSettings(vocab_size=97, max_model_len=64, num_speculative_tokens=4)


def ngram(settings: ProposerSettings) -> Proposer:
    return NgramProposer(prompt_lookup_min=1, prompt_lookup_max=3)


def suffix(settings: ProposerSettings) -> Proposer:
    return SuffixProposer(
        max_tree_depth=24, max_cached_requests=8, max_spec_factor=1.0, min_token_prob=0.1
    )


def junk(settings: ProposerSettings) -> Proposer:
    return JunkProposer(settings.vocab_size)


@pytest.mark.parametrize("check", CONTRACT, ids=lambda check: check.__name__)
@pytest.mark.parametrize("make", [ngram, suffix, junk])
def test_our_drafters_keep_the_contract(
    make: MakeProposer, check: Callable[[MakeProposer], None]
) -> None:
    check(make)


class Bad(Proposer):
    """Does what it is told, which is wrong."""

    name = "bad"
    looks_up = True

    def __init__(self, wrong: Callable[[Context], Draft]) -> None:
        self.wrong = wrong

    def propose(self, context: Context) -> Draft:
        return self.wrong(context)

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def fixed(count: int, token: int = 1) -> Callable[[Context], Draft]:
    return lambda context: Draft(ids=((token,) * count,) * len(context.spans))


def within(context: Context, token: int) -> Draft:
    return Draft(ids=tuple((token,) * span.draft_budget for span in context.spans))


def appending(context: Context) -> Draft:
    for span in context.spans:
        span.sequence.token_ids.append(1)
    return Draft.empty(len(context.spans))


def flat(context: Context) -> Draft:
    draft = within(context, 1)
    count = sum(len(ids) for ids in draft.ids)
    return replace(draft, probs_KV=torch.full((count, 97), 0.5))


TURN = itertools.count()


def turning(context: Context) -> Draft:
    """Another token each time it is asked the same."""
    return within(context, next(TURN) % 97)


@pytest.mark.parametrize(
    ("check", "wrong"),
    [
        (contracts.budgets_are_kept, fixed(7)),
        (contracts.budgets_are_kept, lambda context: within(context, 97)),
        (contracts.budgets_are_kept, lambda context: Draft.empty(len(context.spans) + 1)),
        (contracts.budgets_are_kept, flat),
        (contracts.budget_zero_gets_nothing, fixed(1)),
        (contracts.sequences_are_left_alone, appending),
        (contracts.looked_up_drafts_follow_from_the_text, turning),
    ],
)
def test_bad_drafters_are_caught(
    check: Callable[[MakeProposer], None], wrong: Callable[[Context], Draft]
) -> None:
    with pytest.raises(AssertionError):
        check(lambda settings: Bad(wrong))


class Custom(Proposer):
    """Found by its dotted path."""

    name = "custom"

    def __init__(self, settings: ProposerSettings) -> None:
        self.settings = settings

    def propose(self, context: Context) -> Draft:
        return Draft.empty(len(context.spans))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


def test_a_class_is_found_by_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "some_drafters", sys.modules[__name__])
    found = load_custom("some_drafters.Custom", SETTINGS)
    assert isinstance(found, Custom)
    assert found.settings is SETTINGS


@pytest.mark.parametrize(
    "path",
    ["no_such_module.Custom", "foretoken.nothing.Custom", "json.Missing", "json.JSONDecoder"],
)
def test_wrong_paths_name_the_setting(path: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_custom(path, SETTINGS)
    assert caught.value.field == "speculative_config.model"
    assert caught.value.given == path


VOCAB = 11


class Stub(Proposer):
    """Drafts its own number for the requests it knows, and writes down what it was asked."""

    def __init__(self, name: str, token: int, knows: str, drawn: bool = False) -> None:
        self.name = name
        self.token = token
        self.knows = knows
        self.drawn = drawn
        self.asked: list[tuple[str, int]] = []
        self.released: list[str] = []

    def propose(self, context: Context) -> Draft:
        ids = []
        for span in context.spans:
            request_id = span.sequence.request.request_id
            self.asked.append((request_id, span.draft_budget))
            known = request_id in self.knows
            ids.append((self.token,) * (span.draft_budget if known else 0))
        total = sum(len(one) for one in ids)
        probs_KV = torch.full((total, VOCAB), 1 / VOCAB) if self.drawn else None
        return Draft(ids=tuple(ids), probs_KV=probs_KV, drafter="inner name")

    def release(self, request_id: str) -> None:
        self.released.append(request_id)


class ShortStub(Stub):
    looks_up = True

    def propose(self, context: Context) -> Draft:
        return Draft(ids=tuple((self.token,) for _ in context.spans), drafter="inner name")


def drafters(*members: tuple[Stub, int], least: int = 0) -> Drafters:
    each = {s.name: Member(proposer=s, max_drafts=most, least=least) for s, most in members}
    return Drafters(each, FirstPolicy())


def sequences(names: str, **changes: object) -> list[Sequence]:
    return [make_sequence([1], [2], request_id=name, **changes) for name in names]


def test_the_first_with_an_offer_wins_and_the_next_serves_the_rest() -> None:
    one, two = Stub("one", 1, "a"), Stub("two", 2, "ab")
    a, b, c = sequences("abc")
    draft = drafters((one, 3), (two, 5)).propose(make_context((a, 4), (b, 4), (c, 0)))
    assert draft.ids == ((1, 1, 1), (2, 2, 2, 2), ())
    assert draft.names == ("one", "two", "")
    assert one.asked == [("a", 3), ("b", 3)]
    assert two.asked == [("b", 4)]


def test_nobody_is_asked_at_budget_zero() -> None:
    one = Stub("one", 1, "ab")
    a, b = sequences("ab")
    draft = drafters((one, 3)).propose(make_context((a, 0), (b, 0)))
    assert draft.ids == ((), ())
    assert not one.asked


def _rows(probs_KV: Tensor | None) -> list[list[float]]:
    assert probs_KV is not None
    rows: list[list[float]] = probs_KV.tolist()
    return rows


def test_distributions_stay_with_their_tokens_and_looked_up_tokens_are_one_hot() -> None:
    drawn, looked_up = Stub("drawn", 1, "bd", drawn=True), Stub("looked up", 4, "ac")
    a, b, c, d = sequences("abcd")
    context = make_context((a, 2), (b, 1), (c, 1), (d, 2))
    draft = drafters((looked_up, 5), (drawn, 5)).propose(context)
    assert draft.ids == ((4, 4), (1,), (4,), (1, 1))
    flat, hot = [pytest.approx(1 / VOCAB)] * VOCAB, [0.0] * VOCAB
    hot[4] = 1.0
    assert _rows(draft.probs_KV) == [hot, hot, flat, hot, flat, flat]
    assert [draft.is_one_hot(i) for i in range(4)] == [True, False, True, False]
    draft.check()


def test_short_looked_up_drafts_are_dropped_and_short_budgets_not_asked_for() -> None:
    short, long = ShortStub("short", 1, ""), Stub("long", 2, "a")
    [a] = sequences("a")
    draft = drafters((short, 4), (long, 4), least=2).propose(make_context((a, 4)))
    assert draft.ids == ((2, 2, 2, 2),)
    assert drafters((long, 4), least=2).propose(make_context((a, 1))).ids == ((),)


def test_the_only_drafter_goes_under_its_own_name() -> None:
    [a] = sequences("a")
    draft = drafters((Stub("mine", 3, "a"), 2)).propose(make_context((a, 2)))
    assert (draft.ids, draft.names) == (((3, 3),), ("mine",))


def test_release_tells_everybody() -> None:
    one, two = Stub("one", 1, ""), Stub("two", 1, "")
    drafters((one, 1), (two, 1)).release("a")
    assert (one.released, two.released) == (["a"], ["a"])


def test_who_drafts_blocks_is_known_by_its_name() -> None:
    """A draft carries the name that the user gave, not the method's."""
    one, wide = Stub("one", 1, ""), Stub("wide", 2, "")
    wide.drafts_blocks = True
    assert drafters((one, 1), (wide, 1)).block_drafters == {"wide"}


HEADS = {
    "demo-eagle3": {"speculators_model_type": "eagle3"},
    "demo-mlp": {"model_type": "mlp_speculator", "n_predict": 3},
    "demo-medusa": {"medusa_num_heads": 4},
    "demo-parallel": {"speculators_model_type": "peagle_anchored"},
    "demo-dflash": {"speculators_model_type": "dflash"},
    "demo-dspark": {"speculators_model_type": "dspark"},
}
PACKAGED = Path(foretoken.__file__).parent / "packaged"
MEGABYTE = 10**6


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A packaged folder that holds all heads."""
    for name, config in HEADS.items():
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(checkpoint, "_packaged_root", lambda: tmp_path)
    return tmp_path


def _drafter(target: str, **given: Any) -> tuple[str, str | None]:
    config = EngineConfig.from_kwargs(model=target, speculative_config=given).speculative_config
    assert config is not None
    [drafter] = config.drafters
    return drafter.method, drafter.model


@pytest.mark.parametrize(
    ("given", "method", "model"),
    [
        ({"method": "mlp"}, "mlp", "demo-mlp"),
        ({"method": "mlp_speculator"}, "mlp", "demo-mlp"),
        ({"method": "eagle3"}, "eagle3", "demo-eagle3"),
        ({"method": "medusa"}, "medusa", "demo-medusa"),
        ({"method": "peagle"}, "eagle3", "demo-parallel"),
        ({"method": "eagle3", "parallel_drafting": True}, "eagle3", "demo-parallel"),
        ({"method": "dflash"}, "dflash", "demo-dflash"),
        ({"method": "dspark"}, "dspark", "demo-dspark"),
        ({"method": "draft_model"}, "draft_model", "demo-draft"),
        ({"method": "mlp", "model": "other"}, "mlp", "other"),
        ({"method": "ngram"}, "ngram", None),
    ],
)
def test_the_shipped_drafter_is_found(given: dict[str, Any], method: str, model: str) -> None:
    assert _drafter("demo", **given, num_speculative_tokens=3) == (method, model)


@pytest.mark.parametrize(
    ("config", "found", "missing"),
    [
        ({"pard_token": 1}, "pard", "peagle"),
        ({"speculators_model_type": "peagle_anchored"}, "peagle", "pard"),
    ],
)
def test_the_parallel_drafter_has_one_method(
    shipped: Path, config: dict[str, Any], found: str, missing: str
) -> None:
    """PARD or P-EAGLE, whichever ships; EAGLE-3 is never taken in the place of P-EAGLE."""
    (shipped / "demo-parallel" / "config.json").write_text(json.dumps(config))
    assert _drafter("demo", method=found)[1] == "demo-parallel"
    with pytest.raises(ConfigError, match=r"speculative_config\.model"):
        _drafter("demo", method=missing)
    assert _drafter("demo", method="eagle3")[1] == "demo-eagle3"


def test_each_of_several_drafters_finds_its_own() -> None:
    several = {"drafters": [{"method": "ngram"}, {"method": "mlp"}], "num_speculative_tokens": 3}
    config = EngineConfig.from_kwargs(model="demo", speculative_config=several).speculative_config
    assert config is not None
    assert [one.model for one in config.drafters] == [None, "demo-mlp"]


@pytest.mark.parametrize("given", [{"method": "eagle"}, {"method": "mlp"}])
def test_nothing_ships_for_another_target(given: dict[str, Any]) -> None:
    target = "demo" if given["method"] == "eagle" else "my-model"
    with pytest.raises(ConfigError, match=r"speculative_config\.model"):
        _drafter(target, **given)


@pytest.mark.parametrize("name", HEADS)
def test_packaged_names_resolve_and_name_their_method(shipped: Path, name: str) -> None:
    assert checkpoint.find_model(name) == shipped / name
    assert head_method(name) == ("eagle3" if "parallel" in name else name.removeprefix("demo-"))
    assert checkpoint.installed() == tuple(n for n in checkpoint.PACKAGED if n in HEADS)


def test_a_missing_head_says_what_is_there(shipped: Path) -> None:
    (shipped / "demo-mlp" / "config.json").unlink()
    with pytest.raises(ModelNotFoundError, match="demo-mlp.*demo-eagle3, demo-medusa"):
        checkpoint.find_model("demo-mlp")


def _bytes(name: str, pattern: str = "*") -> int:
    return sum(f.stat().st_size for f in (PACKAGED / name).rglob(pattern) if f.is_file())


def test_what_ships_is_small() -> None:
    """All packaged weights <= 45 MB, the block heads of them <= 7 MB; each with its card."""
    heads = [name for name in HEADS if (PACKAGED / name).is_dir()]
    assert _bytes(".", "*.safetensors") <= 45 * MEGABYTE
    assert _bytes("demo-dflash") + _bytes("demo-dspark") <= 7 * MEGABYTE
    for name in heads:
        assert "Held out" in (PACKAGED / name / "README.md").read_text()
