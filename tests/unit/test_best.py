"""The policy `best`: costs, trust, and choices that never look at what was drawn."""

from foretoken.control.cost import PassCost
from foretoken.control.plan import DraftOutcome
from foretoken.models.tensors import Draft
from foretoken.proposers.base import Context, Proposer
from foretoken.proposers.choose.best import BestPolicy
from foretoken.proposers.choose.offers import Member, StepOffers
from foretoken.runtime.sequence import Sequence
from foretoken.types import StepStats
from tests.unit.proposing import make_context, make_sequence

NAMES = ("look", "model")


class LookUp(Proposer):
    """Offers as many drafts as it is told, and promises that many."""

    name = "look"
    looks_up = True

    def __init__(self) -> None:
        self.num_drafts = 0

    def propose(self, context: Context) -> Draft:
        ids = tuple((1,) * min(self.num_drafts, s.draft_budget) for s in context.spans)
        return Draft(ids=ids, promises=tuple(float(len(one)) for one in ids))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


class Model(Proposer):
    """Draws tokens that nobody may look at before deciding."""

    name = "model"

    def __init__(self) -> None:
        self.token = 2
        self.num_asked = 0
        self.silent = False

    def propose(self, context: Context) -> Draft:
        self.num_asked += len(context.spans)
        count = 0 if self.silent else 1
        return Draft(ids=tuple((self.token,) * (count * s.draft_budget) for s in context.spans))

    def release(self, request_id: str) -> None:
        """Nothing is kept."""


class World:
    def __init__(self) -> None:
        self.policy = BestPolicy()
        self.look, self.model = LookUp(), Model()
        self.members = {
            "look": Member(proposer=self.look, most=8),
            "model": Member(proposer=self.model, most=4),
        }
        self.accepts = {"look": 0.9, "model": 0.5}
        self.draft_s = 0.2

    def step(self, *sequences: Sequence) -> list[str]:
        context = make_context(*[(sequence, 8) for sequence in sequences])
        step = StepOffers(self.members, context)
        self.policy.fill(step, NAMES)
        self.policy._drafting["model"] = PassCost(self.draft_s)
        draft = step.draft()
        rows = len(sequences) + sum(len(ids) for ids in draft.ids)
        assert draft.promises is not None
        each = zip(sequences, draft.names, draft.ids, draft.promises, strict=True)
        outcomes = [
            DraftOutcome(
                s.request.request_id, name, len(ids), round(len(ids) * self.accepts[name]), promise
            )
            for s, name, ids, promise in each
            if ids
        ]
        self.policy.observe(outcomes, decoding_step(rows, len(sequences), 1 + 0.02 * rows))
        return list(draft.names)


def decoding_step(rows: int, sequences: int, seconds: float) -> StepStats:
    """A step of this many rows, drafting aside."""
    return StepStats(
        num_sequences=sequences,
        num_tokens=rows,
        num_drafts=0,
        num_draft_tokens=rows - sequences,
        num_accepted_tokens=0,
        num_accepted_tokens_per_pos=(),
        num_output_tokens=sequences,
        num_waiting=0,
        drafting_s=0.0,
        verifying_s=seconds,
        total_s=seconds,
        num_sampled=sequences,
    )


def test_a_long_look_up_wins_and_a_missing_one_leaves_the_model() -> None:
    world, sequence = World(), make_sequence([1], [2])
    world.look.num_drafts = 8
    taken = [world.step(sequence)[0] for _ in range(30)]
    assert taken.count("look") >= 28
    world.look.num_drafts = 0
    assert [world.step(sequence)[0] for _ in range(5)] == ["model"] * 5


def test_look_ups_that_are_never_accepted_lose() -> None:
    world, sequence = World(), make_sequence([1], [2])
    world.look.num_drafts, world.accepts["look"] = 3, 0.0
    taken = [world.step(sequence)[0] for _ in range(60)]
    assert taken[20:].count("model") >= 37


def test_a_model_that_costs_too_much_is_left_alone() -> None:
    world, sequence = World(), make_sequence([1], [2])
    world.draft_s, world.accepts["model"] = 5.0, 0.25
    taken = [world.step(sequence)[0] for _ in range(60)]
    assert taken[10:].count("model") <= 2


def test_sequences_of_one_batch_are_served_differently() -> None:
    world = World()
    a, b = (make_sequence([1], [2], request_id=name) for name in "ab")
    world.look.num_drafts, world.draft_s = 8, 0.05
    for _ in range(60):
        world.step(a)
        world.accepts["look"] = 0.0
        world.step(b)
        world.accepts["look"] = 0.9
    names = [world.step(a, b) for _ in range(5)]
    assert names == [["look", "model"]] * 5


def test_a_silent_model_leaves_the_look_up() -> None:
    world, sequence = World(), make_sequence([1], [2])
    world.look.num_drafts, world.accepts["look"] = 1, 0.2
    for _ in range(10):
        world.step(sequence)
    world.model.silent = True
    assert set(world.step(sequence)) == {"look"}


def test_drawn_tokens_change_no_choice() -> None:
    """Two models that draw different tokens with the same outcomes are chosen alike."""
    one, other = World(), World()
    other.model.token = 1  # agrees with what is looked up
    for index in range(80):
        for world in (one, other):
            world.look.num_drafts = index % 7
        sequences = [make_sequence([1], [2], request_id=name) for name in "ab"]
        assert one.step(*sequences) == other.step(*sequences)
    assert one.model.num_asked == other.model.num_asked


def test_release_forgets() -> None:
    world, sequence = World(), make_sequence([1], [2])
    world.step(sequence)
    assert world.policy._acceptance._by_request
    world.policy.release("r")
    world.policy.release("unknown")
    assert not world.policy._acceptance._by_request
