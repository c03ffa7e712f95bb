"""The contract suite that ships: our drafters keep it, and it catches those that do not."""

import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer, ProposerSettings
from foretoken.proposers.custom import load_custom
from foretoken.proposers.lookup.ngram import NgramProposer
from foretoken.proposers.lookup.suffix.proposer import SuffixProposer
from foretoken.testing import JunkProposer
from foretoken.testing import contract as contracts
from foretoken.testing.contract import CONTRACT, MakeProposer

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
