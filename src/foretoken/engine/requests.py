"""From a prompt and its parameters to requests: all that can be refused before anything runs.

Knows what the engine was set up for, nothing of what runs in it. Invariant: whatever is given, the
error is one of ours and names the field.
"""

import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import final

from foretoken.config import ResolvedConfig
from foretoken.control.budget import PREDICTED_DRAFTS
from foretoken.errors import ContextError, ParameterError, PromptError, named_as
from foretoken.runtime.grammar import Grammars
from foretoken.runtime.resuming import with_resumed_text
from foretoken.runtime.scheduling.scheduler import Scheduler
from foretoken.text.tokenizer import Tokenizer
from foretoken.types import Request, Resume, SamplingParams, Speculation
from foretoken.types.scalars import plain


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Intake:
    """Makes the requests of one engine."""

    config: ResolvedConfig
    tokenizer: Tokenizer | None
    drafters: Mapping[str, int]
    """Names that a request may ask for, and the most drafts of each."""
    scheduler: Scheduler
    grammars: Grammars
    vocab_size: int
    eos_token_ids: frozenset[int]
    placeholders: Mapping[int, str]
    """Ids that stand for pictures and sounds, and what config.json calls them."""
    seeds: random.Random
    """Where requests without a seed get theirs from."""

    def requests(
        self,
        request_id: str,
        prompt_token_ids: Sequence[int],
        params: SamplingParams,
        *,
        priority: int = 0,
        cache_salt: str | None = None,
        resume: Sequence[Resume] | None = None,
    ) -> list[Request]:
        """Check one prompt and its parameters; n > 1 gives n requests, ids `request_id-i`.

        With `resume`, one entry per output, the outputs go on where another engine left them; those
        that have ended give no request. Their ids count as output, and only later ones come out.

        Raises:
            PromptError: the prompt is empty, or has token ids out of range, or that stand for
                something else than text.
            ContextError: it is longer than the context.
            ParameterError: a parameter names token ids that the model does not have, or needs
                text and there is no tokenizer; or together they forbid every token; or `resume`
                cannot be gone on with.
            CapacityError: the prompt can never fit the KV cache.
        """
        ids = self._prompt_ids(prompt_token_ids)
        self._check_ids(params)
        prediction_ids = self._prediction(params)
        self._check_speculation(params, bool(prediction_ids))
        room = self.config.max_model_len - len(ids)
        stop_ids = frozenset(params.stop_token_ids or ())
        eos_ids = self.eos_token_ids
        request = Request(
            request_id=request_id,
            prompt_token_ids=ids,
            params=params,
            seed=self._seed(params),
            max_tokens=min(room, params.max_tokens or room),
            arrival=time.monotonic(),
            priority=priority,
            stop_ids=stop_ids if params.ignore_eos else stop_ids | eos_ids,
            min_tokens_ids=stop_ids | eos_ids if params.min_tokens else frozenset(),
            bad_words_ids=self._bad_words(params),
            cache_salt=cache_salt,
            prediction_ids=prediction_ids,
        )
        self._check_choice(request)
        self.scheduler.check_capacity(request)
        request = replace(request, grammar=self.grammars.compiled(params))
        requests = [request]
        if params.n > 1:
            requests = [
                replace(request, request_id=f"{request_id}-{i}", sample_index=i)
                for i in range(params.n)
            ]
        return requests if resume is None else self._resumed(requests, resume)

    def _resumed(self, requests: Sequence[Request], resume: Sequence[Resume]) -> list[Request]:
        """Those of the requests whose outputs go on, each with what was written of it."""
        if len(resume) != len(requests):
            allowed = f"one entry per output: n = {len(requests)}"
            raise ParameterError("resume", f"{len(resume)} outputs", allowed)
        found = []
        for request, written in zip(requests, resume, strict=True):
            if written.ended:
                continue
            worst = max(written.output_ids, default=0)
            if worst >= self.vocab_size:
                raise ParameterError("resume.output_ids", worst, f"0 to {self.vocab_size - 1}")
            begun = replace(request, resumed_ids=tuple(written.output_ids))
            self.scheduler.check_capacity(begun)
            max_len = self.scheduler.max_len
            found.append(with_resumed_text(begun, self.tokenizer, self.grammars, max_len))
        return found

    def _seed(self, params: SamplingParams) -> int:
        """The user's seed, folded to 64 bits, or a key of the engine's own."""
        if params.seed is not None:
            return params.seed & (2**64 - 1)
        return self.seeds.getrandbits(64)

    def _prompt_ids(self, given: Sequence[int]) -> tuple[int, ...]:
        """The ids of a prompt as Python's integers, checked."""
        ids = tuple(given)
        if not ids:
            raise PromptError("prompt", list(ids), "at least one token")
        if set(map(type, ids)) != {int}:
            ids = tuple(map(plain, ids))
            for one in ids:
                if not isinstance(one, int) or isinstance(one, bool):
                    raise PromptError("prompt_token_ids", one, "integers")
        limit = self.config.max_model_len
        if len(ids) >= limit:
            allowed = f"at most {limit - 1} (max_model_len {limit})"
            raise ContextError("prompt", f"{len(ids)} tokens", allowed)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self.vocab_size:
            wrong = low if low < 0 else high
            raise PromptError("prompt_token_ids", wrong, f"0 to {self.vocab_size - 1}")
        others = self.placeholders.keys() & set(ids) if self.placeholders else ()
        if others:
            token = min(others)
            found = f"{token}, the {self.placeholders[token]} of the model"
            raise PromptError("prompt_token_ids", found, "text: pictures and sounds are not read")
        return ids

    def _check_ids(self, params: SamplingParams) -> None:
        named = {
            "allowed_token_ids": params.allowed_token_ids or (),
            "logit_bias": params.logit_bias or (),
            "stop_token_ids": params.stop_token_ids or (),
        }
        for name, ids in named.items():
            worst = max(ids, default=0)
            if worst >= self.vocab_size:
                raise ParameterError(name, worst, f"0 to {self.vocab_size - 1}")
        for name in ("stop", "bad_words"):
            given = getattr(params, name)
            if given and self.tokenizer is None:
                raise ParameterError(name, given, "nothing: there is no tokenizer")

    def _bad_words(self, params: SamplingParams) -> tuple[tuple[int, ...], ...]:
        if self.tokenizer is None or not params.bad_words:
            return ()
        with named_as({"text": "bad_words"}):
            return self.tokenizer.bad_words_ids(params.bad_words)

    def _prediction(self, params: SamplingParams) -> tuple[int, ...]:
        given = params.prediction
        if given is None:
            return ()
        if isinstance(given, str):
            if self.tokenizer is None:
                raise ParameterError("prediction", given, "token ids: there is no tokenizer")
            with named_as({"text": "prediction"}):
                return tuple(self.tokenizer.encode(given, add_special_tokens=False))
        worst = max(given, default=0)
        if worst >= self.vocab_size:
            raise ParameterError("prediction", worst, f"0 to {self.vocab_size - 1}")
        return tuple(given)

    def _check_speculation(self, params: SamplingParams, predicted: bool) -> None:
        own = params.own_policy
        if own is not None:
            limits = dict(self.drafters)
            if predicted:
                limits["prediction"] = PREDICTED_DRAFTS
            self.check_policy(own, limits)

    def check_policy(self, policy: Speculation, limits: Mapping[str, int]) -> None:
        """Check a policy against the drafters that there are and the most drafts of each. Raises
        ParameterError: an unknown drafter, or too many drafts."""
        if policy.drafter is not None and policy.drafter not in limits:
            allowed = ", ".join(limits) or "nothing: the engine has no drafter"
            raise ParameterError("speculation.drafter", policy.drafter, allowed)
        count, most = policy.num_speculative_tokens, max(limits.values(), default=0)
        if count is not None and count > most:
            raise ParameterError("speculation.num_speculative_tokens", count, f"0 to {most}")

    def _check_choice(self, request: Request) -> None:
        """Refuse what would leave no token to choose from the start; later is another matter."""
        allowed = request.params.allowed_token_ids
        banned = {word[0] for word in request.bad_words_ids if len(word) == 1}
        banned |= request.min_tokens_ids
        left = self.vocab_size - len(banned) if allowed is None else len({*allowed} - banned)
        if left <= 0:
            name = "bad_words" if allowed is None else "allowed_token_ids"
            given = getattr(request.params, name)
            raise ParameterError(name, given, "what leaves a token beside bad_words and min_tokens")
