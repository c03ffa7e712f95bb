"""From a step's logits to its new tokens: which rule checks which span, and what is reported.

The rules are in `foretoken.runtime.rules`. Knows nothing of stopping, scheduling or how drafts were
made. Invariants: every sampling span gets between 1 and
num_drafts + 1 new tokens; under matching they are the tokens that plain decoding would have
chosen, one by one; under standard and block each has the distribution that plain decoding would
have drawn it from.
"""

from collections.abc import Iterable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from itertools import islice

import torch
from torch import Tensor

from foretoken.config.speculative import RULES
from foretoken.models.tensors import ModelOutput
from foretoken.ops.drawing import BEST, pack_rows
from foretoken.ops.noise import Stream
from foretoken.ops.sampling import top_logprobs
from foretoken.runtime.batch import Batch, Span, SpanVerification, Verification
from foretoken.runtime.draft_tree import Tree
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.rows import RowGroup, Rows
from foretoken.runtime.rules import Check, RuleSettings, TreeCheck, create_rules, create_tree_rules
from foretoken.runtime.rules.base import INVALID, Branch, rule_of
from foretoken.runtime.rules.matching import matched
from foretoken.runtime.rules.trees import matched_branch
from foretoken.runtime.sampler import Sampler
from foretoken.types import Logprob, TokenSource


@dataclass(frozen=True, slots=True)
class _Found:
    """What the rules decided, by span."""

    new_ids: dict[int, tuple[int, ...]]
    paths: dict[int, tuple[int, ...]]

    def add(self, check: TreeCheck, branch: Branch) -> None:
        """What stays of a tree."""
        self.new_ids[check.index], self.paths[check.index] = branch.new_ids, branch.path

    def rows(self, index: int) -> list[int]:
        """Which of a span's sample rows gave each of its new tokens."""
        if index in self.paths:
            return [0, *(node + 1 for node in self.paths[index])]
        return list(range(len(self.new_ids.get(index, ()))))


class Verifier:
    """Chooses the new tokens of every span of a step."""

    def __init__(
        self,
        vocab_size: int,
        device: torch.device | str = "cpu",
        rule: str = "auto",
        settings: RuleSettings | None = None,
        grammars: Grammars | None = None,
    ) -> None:
        """Check drafts of `vocab_size` ids on `device` by `rule` (see `rule_of`)."""
        assert rule in RULES, (rule, RULES)
        self.rule = rule
        self.sampler = Sampler(vocab_size, device, grammars)
        settings = settings or RuleSettings()
        self._rules = create_rules(self.sampler, settings)
        self._tree_rules = create_tree_rules(self.sampler, settings)

    def release(self, request_id: str) -> None:
        """Forget a request that ended; unknown ids are fine."""
        self.sampler.release(request_id)

    def draws(self, batch: Batch) -> bytes | None:
        """How the token of each of the batch's rows of logits is drawn, so that a device can do so
        before they are looked at; None: some are weighed or edited first."""
        rows = list[bytes]()
        for span, check in zip(batch.spans, _by_span(batch), strict=True):
            rows.append(pack_rows((0,) * span.prompt_rows, BEST))
            if check is None:
                continue
            profile = self.sampler.profile(span.sequence.request)
            if profile.edits or self._rule_of(batch, check) != "matching":
                return None
            runs = check.runs if isinstance(check, TreeCheck) else (check.rows,)
            rows += (RowGroup(run, profile, 0).packed(Stream.TARGET) for run in runs)
        return b"".join(rows)

    def _rule_of(self, batch: Batch, check: Check | TreeCheck) -> str:
        params = check.rows.sequence.request.params
        # Without drafts there is nothing to weigh. Matching then just draws the next token with
        # the request's own noise, which is what plain decoding is.
        drafted = check.num_rows > 1
        one_hot = batch.draft is None or batch.draft.is_one_hot(check.index)
        return rule_of(params, self.rule, one_hot) if drafted else "matching"

    @torch.inference_mode()
    def verify(self, batch: Batch, output: ModelOutput) -> Verification:
        """Check the batch's drafts against the logits of its rows."""
        # Requests of one step may need different rules (greedy or drawn, seeded or not), and a rule
        # that is one foreign call or one tensor operation is dear per call: checks are gathered by
        # rule, each rule decides all of its checks at once.
        logits_RV = output.logits_RV
        probs_KV = None if batch.draft is None else batch.draft.probs_KV
        found = _Found({}, {})
        chains: dict[str, list[Check]] = {}
        trees: dict[str, list[TreeCheck]] = {}
        for check in _checks(batch):
            if output.chosen_R is not None:
                own = output.chosen_R[check.row : check.row + check.num_rows]
                if isinstance(check, TreeCheck):
                    found.add(check, matched_branch(check, own))
                else:
                    found.new_ids[check.index] = matched(check, own)
                continue
            name = self._rule_of(batch, check)
            if isinstance(check, TreeCheck):
                trees.setdefault(name, []).append(check)
            else:
                chains.setdefault(name, []).append(check)
        for name, some in chains.items():
            kept = self._rules[name].decide(_take(logits_RV, some), some, probs_KV)
            found.new_ids.update(zip((check.index for check in some), kept, strict=True))
        for name, wide in trees.items():
            branches = self._tree_rules[name].decide(_take(logits_RV, wide), wide, probs_KV)
            for check, branch in zip(wide, branches, strict=True):
                found.add(check, branch)
        return Verification(_results(batch, logits_RV, found, self.rule not in INVALID))


def _checks(batch: Batch) -> list[Check | TreeCheck]:
    """The spans of the batch that sample."""
    return [check for check in _by_span(batch) if check is not None]


def _by_span(batch: Batch) -> list[Check | TreeCheck | None]:
    """A check for each span; None: it does not sample."""
    checks: list[Check | TreeCheck | None] = []
    row = drafted_row = 0
    for index, span in enumerate(batch.spans):
        if span.samples:
            places = {
                "index": index,
                "row": row + span.prompt_rows,
                "drafted_row": drafted_row,
                "num_rows": span.sample_rows,
            }
            tree = span.tree
            if tree is None:
                # Tokens before the first row that are not known yet, whatever they are.
                ahead = span.start + span.length - span.sequence.num_tokens
                drafts = (0,) * ahead + span.draft_ids
                rows = Rows(sequence=span.sequence, drafts=drafts, first=ahead)
                checks.append(Check(rows=rows, **places))
            else:
                runs = _tree_rows(span, tree)
                checks.append(TreeCheck(runs=runs, ids=span.draft_ids, tree=tree, **places))
        else:
            checks.append(None)
        # Prompt rows come first among a span's rows and are nobody's drafts. Spans without drafts
        # have no rows of distributions, so both counts go on by themselves.
        row += span.prompt_rows + span.sample_rows
        drafted_row += span.num_drafts
    return checks


def _tree_rows(span: Span, tree: Tree) -> tuple[Rows, ...]:
    """Rows of the root and of the nodes, run by run, each with the history of its branch."""
    found: list[Rows] = []
    for run in tree.runs:
        path = tree.paths[run[-1]] if run else ()
        drafts = tuple(span.draft_ids[node] for node in path)
        first = 0 if not found else len(drafts) - len(run) + 1
        found.append(Rows(sequence=span.sequence, drafts=drafts, first=first))
    return tuple(found)


def _take(logits_RV: Tensor, checks: Seq[Check | TreeCheck]) -> Tensor:
    """The sample rows of the checks, in order."""
    rows = [check.row + i for check in checks for i in range(check.num_rows)]
    # Usually one rule checks everything: no copy then of a tensor as wide as the vocabulary.
    if len(rows) == logits_RV.shape[0]:
        return logits_RV
    return logits_RV[torch.tensor(rows, device=logits_RV.device)]


def _sources(span: Span, num_accepted: int, path: Seq[int] | None) -> tuple[TokenSource, ...]:
    if span.num_drafts == 0:
        return (TokenSource.TARGET,)
    # After a draft that was accepted whole, the last token is one more than was drafted (bonus);
    # otherwise it stands where a draft was rejected (recovered). Of a tree, whole is to a leaf.
    if path is None or span.tree is None:
        full = num_accepted == span.num_drafts
    else:
        full = bool(path) and not span.tree.children[path[-1] + 1]
    last = TokenSource.BONUS if full else TokenSource.RECOVERED
    return (*((TokenSource.ACCEPTED,) * num_accepted), last)


@dataclass(frozen=True, slots=True)
class _Wanted:
    """Logprobs asked for: rows of the step's logits, the token chosen after each, how many."""

    rows: list[int]
    chosen: list[int]
    counts: list[int]

    def add(self, rows: Iterable[int], tokens: Seq[int], count: int | None) -> None:
        """Ask for a token after each of these rows; None asks for nothing."""
        if count is not None:
            self.rows.extend(rows)
            self.chosen.extend(tokens)
            self.counts.extend([count] * len(tokens))


def _logprobs(batch: Batch, logits_RV: Tensor, found: _Found) -> list[dict[int, Logprob]]:
    """Every logprob entry the batch asks for, in order of rows."""
    wanted = _Wanted([], [], [])
    row = 0
    for index, span in enumerate(batch.spans):
        params = span.sequence.request.params
        own = row + span.prompt_rows
        if span.prompt_rows:
            wanted.add(range(row, own), _after_prompt_rows(span), params.prompt_logprobs)
        rows = (own + place for place in found.rows(index))
        wanted.add(rows, found.new_ids.get(index, ()), params.logprobs)
        row += span.prompt_rows + span.sample_rows
    if not wanted.rows:
        return []
    rows_R = torch.tensor(wanted.rows, device=logits_RV.device)
    return top_logprobs(logits_RV[rows_R], wanted.chosen, wanted.counts)


def _after_prompt_rows(span: Span) -> list[int]:
    return span.sequence.token_ids[span.start + 1 : span.start + span.prompt_rows + 1]


def _results(
    batch: Batch, logits_RV: Tensor, found: _Found, valid: bool
) -> tuple[SpanVerification | None, ...]:
    # Logprobs of all spans are computed at once, in order of rows, and handed out in that order.
    entries = iter(_logprobs(batch, logits_RV, found))
    results: list[SpanVerification | None] = []
    for index, span in enumerate(batch.spans):
        if not span.samples and not span.prompt_rows:
            results.append(None)
            continue
        params = span.sequence.request.params
        ids, path = found.new_ids.get(index, ()), found.paths.get(index)
        accepted = max(len(ids) - 1, 0)
        prompt = own = None
        if span.prompt_rows and params.prompt_logprobs is not None:
            prompt = tuple(islice(entries, span.prompt_rows))
        if span.samples and params.logprobs is not None:
            own = tuple(islice(entries, len(ids)))
        results.append(
            SpanVerification(
                new_ids=ids,
                num_accepted=accepted,
                num_drafted=span.num_drafts,
                sources=_sources(span, accepted, path) if ids else (),
                logprobs=own,
                prompt_logprobs=prompt,
                path=path,
                valid=valid,
            )
        )
    return tuple(results)
