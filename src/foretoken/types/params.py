"""How the tokens of one request are chosen: vLLM's sampling parameters, every value checked."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

from foretoken.errors import ParameterError
from foretoken.types.scalars import plain
from foretoken.types.speculation import Speculation
from foretoken.types.structure import StructuredOutputs


def _check(name: str, given: object, ok: bool, allowed: str) -> None:
    if not ok:
        raise ParameterError(name, given, allowed)


def _is_real(value: object) -> bool:
    """A finite number that a float can hold; integers have no bound of their own."""
    most = sys.float_info.max
    return isinstance(value, int | float) and not isinstance(value, bool) and -most <= value <= most


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_id(value: object) -> bool:
    """A token id >= 0, or its text, as keys of JSON are."""
    if isinstance(value, str):
        return value.isascii() and value.isdigit() and len(value) < 20
    return _is_int(value) and value >= 0  # type: ignore[operator]


def _items(name: str, given: object, allowed: str) -> tuple[Any, ...]:
    """The items of a list, tuple, set or array; none of None."""
    if given is None:
        return ()
    items: Any = given
    ok = isinstance(given, Iterable) and not isinstance(given, str | bytes | Mapping)
    _check(name, given, ok, allowed)
    try:
        return tuple(map(plain, items))
    except TypeError:
        raise ParameterError(name, given, allowed) from None


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How the tokens of one request are chosen; names and defaults as in vLLM.

    The order in which a row of logits is processed is fixed: allowed_token_ids, bad_words,
    min_tokens, logit_bias, repetition/frequency/presence penalty, temperature, min_p, top_k,
    top_p. Logprobs are taken from the raw logits, before any of these.

    Raises:
        ParameterError: a value is out of its range, NaN, or of the wrong type.
    """

    n: int = 1
    """How many outputs to draw for the prompt."""
    presence_penalty: float = 0.0
    """Subtracted once from the logit of every token already in the output; -2 to 2."""
    frequency_penalty: float = 0.0
    """Subtracted per occurrence in the output; -2 to 2."""
    repetition_penalty: float = 1.0
    """Divides positive and multiplies negative logits of tokens in prompt or output; > 0."""
    temperature: float = 1.0
    """0 is greedy."""
    top_p: float = 1.0
    """Keep the smallest set of tokens whose probability reaches top_p; in (0, 1]."""
    top_k: int = 0
    """Keep the k best tokens (ties with the k-th are kept); 0 or -1 keeps all."""
    min_p: float = 0.0
    """Keep tokens at least this probable relative to the best one; in [0, 1]."""
    seed: int | None = None
    """Makes the output reproducible: any batch, any speculation, the same tokens."""
    stop: str | Sequence[str] | None = None
    """Strings that end the output."""
    stop_token_ids: Sequence[int] | None = None
    """Token ids that end the output."""
    bad_words: Sequence[str] | None = None
    """Words that must not appear."""
    ignore_eos: bool = False
    """Go on after the end-of-sequence token."""
    max_tokens: int | None = 16
    """Most output tokens; None: up to the context limit."""
    min_tokens: int = 0
    """No end-of-sequence or stop token id before this many output tokens."""
    logprobs: int | None = None
    """Log-probabilities of this many best tokens (and of the chosen one) per output token."""
    prompt_logprobs: int | None = None
    """The same for every prompt token but the first."""
    detokenize: bool = True
    """Return text as well as ids."""
    skip_special_tokens: bool = True
    """Leave special tokens out of the text."""
    spaces_between_special_tokens: bool = True
    """Put spaces between special tokens in the text."""
    include_stop_str_in_output: bool = False
    """Keep the stop string at the end of the text."""
    logit_bias: Mapping[int, float] | None = None
    """Added to the logits of these token ids; clamped to [-100, 100]."""
    allowed_token_ids: Sequence[int] | None = None
    """Only these token ids may be chosen."""
    speculation: Speculation | Mapping[str, Any] | None = None
    """This request's own policy, as a dictionary: `enabled` (False: plain decoding), `drafter`
    (the name of the only drafter to use), `num_speculative_tokens` (at most the engine's),
    `guard` (share of its time that drafts for others may cost it). It never changes which tokens
    come out."""
    prediction: str | Sequence[int] | None = None
    """Text or token ids that the output will probably contain, such as the file to be edited: it
    is drafted from, before any drafter, and found again after a difference."""
    structured_outputs: StructuredOutputs | Mapping[str, Any] | None = None
    """What the output must look like, as a dictionary with one of `json` (a schema), `regex`,
    `choice`, `grammar`, `json_object`. Where it leaves no choice, its tokens are drafted. Needs
    the extra `serve`."""

    def __post_init__(self) -> None:
        """Check every field; turn sequences into tuples so that the object is truly frozen, and
        NumPy's scalars into Python's."""
        for spec in fields(self):
            object.__setattr__(self, spec.name, plain(getattr(self, spec.name)))
        _check("n", self.n, _is_int(self.n) and self.n >= 1, "an integer >= 1")
        for name in ("presence_penalty", "frequency_penalty"):
            value = getattr(self, name)
            _check(name, value, _is_real(value) and -2 <= value <= 2, "a number in [-2, 2]")
        value = self.repetition_penalty
        _check("repetition_penalty", value, _is_real(value) and value > 0, "a number > 0")
        value = self.temperature
        _check("temperature", value, _is_real(value) and value >= 0, "a number >= 0")
        _check("top_p", self.top_p, _is_real(self.top_p) and 0 < self.top_p <= 1, "in (0, 1]")
        _check("top_k", self.top_k, _is_int(self.top_k) and self.top_k >= -1, "0 or -1 (all), >= 1")
        _check("min_p", self.min_p, _is_real(self.min_p) and 0 <= self.min_p <= 1, "in [0, 1]")
        _check("seed", self.seed, self.seed is None or _is_int(self.seed), "an integer or None")
        self._check_lengths()
        self._check_tokens()

    def _check_lengths(self) -> None:
        maximum = self.max_tokens
        ok = maximum is None or (_is_int(maximum) and maximum >= 1)
        _check("max_tokens", maximum, ok, "an integer >= 1 or None")
        ok = _is_int(self.min_tokens) and 0 <= self.min_tokens <= (maximum or self.min_tokens)
        _check("min_tokens", self.min_tokens, ok, "an integer >= 0 and <= max_tokens")
        for name in ("logprobs", "prompt_logprobs"):
            value = getattr(self, name)
            ok = value is None or (_is_int(value) and 0 <= value <= 20)
            _check(name, value, ok, "None or an integer from 0 to 20")

    def _check_tokens(self) -> None:
        allowed = "a non-empty string or a list of them"
        given = (self.stop,) if isinstance(self.stop, str) else self.stop
        stop = _items("stop", given, allowed)
        _check("stop", self.stop, all(isinstance(s, str) and s for s in stop), allowed)
        object.__setattr__(self, "stop", stop)
        words = _items("bad_words", self.bad_words, "a list of non-empty strings")
        ok = all(isinstance(word, str) and word for word in words)
        _check("bad_words", self.bad_words, ok, "a list of non-empty strings")
        object.__setattr__(self, "bad_words", words)
        ids = _items("stop_token_ids", self.stop_token_ids, "a list of integers >= 0")
        ok = all(_is_int(i) and i >= 0 for i in ids)
        _check("stop_token_ids", self.stop_token_ids, ok, "a list of integers >= 0")
        object.__setattr__(self, "stop_token_ids", ids)
        if self.allowed_token_ids is not None:
            ids = _items("allowed_token_ids", self.allowed_token_ids, "a list of ids >= 0")
            ok = bool(ids) and all(_is_int(i) and i >= 0 for i in ids)
            _check("allowed_token_ids", self.allowed_token_ids, ok, "a non-empty list of ids >= 0")
            object.__setattr__(self, "allowed_token_ids", ids)
        self._check_bias()
        object.__setattr__(self, "speculation", Speculation.of(self.speculation))
        structured = StructuredOutputs.of(self.structured_outputs)
        object.__setattr__(self, "structured_outputs", structured)
        self._check_prediction()

    def _check_bias(self) -> None:
        bias, allowed = self.logit_bias, "a map of token id >= 0 to a finite number"
        if bias is None:
            return
        _check("logit_bias", bias, isinstance(bias, Mapping), allowed)
        bias = {plain(i): plain(b) for i, b in bias.items()}
        ok = all(_is_id(i) and _is_real(b) for i, b in bias.items())
        _check("logit_bias", bias, ok, allowed)
        clamped = {int(i): max(-100.0, min(100.0, float(b))) for i, b in bias.items()}
        object.__setattr__(self, "logit_bias", clamped)

    def _check_prediction(self) -> None:
        given = self.prediction
        allowed = "None, a text, or a list of token ids >= 0"
        if given is not None and not isinstance(given, str):
            ids = _items("prediction", given, allowed)
            _check("prediction", given, all(_is_int(i) and i >= 0 for i in ids), allowed)
            object.__setattr__(self, "prediction", ids)

    @property
    def structured(self) -> StructuredOutputs | None:
        """`structured_outputs` as it was checked."""
        assert self.structured_outputs is None or isinstance(
            self.structured_outputs, StructuredOutputs
        ), type(self.structured_outputs)
        return self.structured_outputs

    @property
    def greedy(self) -> bool:
        """Whether the best token is always taken."""
        return self.temperature == 0.0

    @property
    def deterministic(self) -> bool:
        """Whether there is one right output: greedy or seeded. Verified by matching."""
        return self.greedy or self.seed is not None

    @property
    def own_policy(self) -> Speculation | None:
        """`speculation` as it was read when this object was made."""
        own = self.speculation
        assert own is None or isinstance(own, Speculation), type(own)
        return own

    def to_dict(self) -> dict[str, Any]:
        """The fields by name, in order."""
        return {f.name: getattr(self, f.name) for f in fields(self)}
