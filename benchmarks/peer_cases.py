"""What the engines of `peers.py` are asked to do, and what can be tuned about each of them.

A setting is a dictionary: the value of every axis. Axes stand in the order in which they are
searched, and their first value is where the search begins. What no axis names stays at the
engine's own default. Knows nothing of processes or of time.
"""

from dataclasses import dataclass, replace
from typing import Any

Setting = dict[str, int | str]
Axes = dict[str, tuple[int | str, ...]]

OURS = "foretoken"
OURS_8 = "foretoken, 8-bit activations"
"""Ours in its other mode: tuned, named and judged apart."""
DRAFT_LENGTHS = (3, 2, 5, 1, 8)
LOOK_UP_LENGTHS = (5, 15, 10, 3)
PRECISIONS = ("int8", "16 bit", "int4")
QUANTIZING = (OURS, OURS_8, "openvino", "llama-cpp")
"""Engines whose draft weights may have another precision than 16 bits."""
AXES: dict[str, Axes] = {
    OURS: {"threads": (2, 1)},
    OURS_8: {"activations": ("int8",), "threads": (2, 1)},
    "transformers": {"threads": (2, 1)},
    "vllm": {"threads": (2, 1), "eager": ("off", "on")},
    "openvino": {
        "backend": ("PA", "SDPA"),
        "dynamic_quantization": ("default", 0),
        "kv_cache": ("u8", "f16"),
        "pinning": ("on", "off"),
        "split_fuse": ("on", "off"),
        "threads": (2, 1),
    },
    "llama-cpp": {
        "pool": ("own", "openmp"),
        "poll": (50, 0),
        "file": ("BF16", "F16"),
        "threads": (2, 1),
    },
    "onnxruntime": {"accuracy": (4, 1), "threads": (2, 1)},
}
ONCE = ("threads", "pinning", "split_fuse", "kv_cache", "eager")
"""Searched in an engine's first plain case and in its first with drafts; the rest take it over."""
FLEXIBLE = (OURS, OURS_8, "openvino")
"""Engines that take `k` with each request, up to the one they were loaded with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all engines do."""

    engines: tuple[str, ...]
    """Those that can."""
    weights: str = "16 bit"
    """Of the target, the same for everyone."""
    draft: str | None = None
    method: str | None = None
    prompts: str = "fresh"
    prompt_tokens: int = 128
    tokens: int = 128
    """To write for each prompt."""
    batch: int = 1
    prefill: bool = False
    """Settings are chosen by the time of the first token, not by that of the others."""

    @property
    def kind(self) -> str:
        """Cases of one kind share what is searched once."""
        return self.method or "plain"

    @property
    def may_be_cut(self) -> bool:
        """Whether a search may ask with the end of a prompt only."""
        return self.prompts == "fresh" and not self.prefill and self.prompt_tokens < LONG_PROMPT

    @property
    def context(self) -> int:
        """Positions that a prompt and its answer may take."""
        return self.prompt_tokens + max(self.tokens, SEARCH_TOKENS) + SPARE

    @property
    def work(self) -> "Case":
        """The case without what only a search looks at: cases of equal work are asked at once."""
        return replace(self, prefill=False)


SEARCH_TOKENS = 50
"""One round of a cycle: every place at which a draft is wrong counts once."""
SPARE = 16
LONG_PROMPT = 1000
AT_LENGTH = ("backend", "dynamic_quantization", "draft", "k")
"""What is searched at long prompts, where a trial takes long; the rest comes from short ones."""
PAIR: dict[str, Any] = {"draft": "cycle-draft-80", "method": "draft_model"}
RIGHT: dict[str, Any] = {**PAIR, "draft": "cycle-draft-100"}
LONG: dict[str, Any] = {"prompt_tokens": 4000, "tokens": 64}
EVERYONE = (OURS, "openvino", "llama-cpp", "vllm", "transformers")
QUANTIZED = (OURS, OURS_8, "openvino", "llama-cpp")
CASES = {
    "16 bit": Case(engines=EVERYONE),
    "int8": Case(engines=(*QUANTIZED, "onnxruntime"), weights="int8"),
    "int4": Case(engines=(*QUANTIZED, "onnxruntime"), weights="int4"),
    "16 bit, draft 80 %": Case(engines=EVERYONE, **PAIR),
    "int8, draft 80 %": Case(engines=QUANTIZED, weights="int8", **PAIR),
    "int4, draft 80 %": Case(engines=QUANTIZED, weights="int4", **PAIR),
    "16 bit, prompt 4000": Case(engines=EVERYONE, prefill=True, **LONG),
    "int8, prompt 4000": Case(engines=QUANTIZED, weights="int8", prefill=True, **LONG),
    "16 bit, at 4000": Case(engines=EVERYONE, **LONG),
    "int8, at 4000": Case(engines=QUANTIZED, weights="int8", **LONG),
    "16 bit, draft 100 %": Case(engines=EVERYONE, **RIGHT),
    "int8, draft 100 %": Case(engines=QUANTIZED, weights="int8", **RIGHT),
    "int4, draft 100 %": Case(engines=QUANTIZED, weights="int4", **RIGHT),
    "n-gram echo": Case(
        engines=(OURS, "openvino", "vllm", "transformers"), method="ngram", prompts="echo"
    ),
    "batch 8": Case(engines=(OURS, "vllm"), prompt_tokens=384, batch=8),
    "prefill 1024": Case(engines=(OURS, "vllm"), prompt_tokens=1024, tokens=8, prefill=True),
}


def axes(engine: str, case: Case) -> Axes:
    """What is searched for `engine` in `case`."""
    found = dict(AXES[engine])
    if engine == "llama-cpp" and case.weights != "16 bit":
        del found["file"]
    if engine == "openvino":
        if case.method:
            del found["backend"]  # It speculates with paged attention only.
        if case.weights == "16 bit" and case.method is None:
            del found["dynamic_quantization"]
    if case.method == "draft_model":
        if engine == "llama-cpp":
            found["draft_poll"] = ("as poll", 0)
        if engine in QUANTIZING:
            found["draft"] = PRECISIONS
        found["k"] = DRAFT_LENGTHS
    if case.method == "ngram":
        found["k"] = LOOK_UP_LENGTHS
    return found


def taken_over(case: Case, own: Axes, known: Setting) -> Setting:
    """The part of what the first case of its kind found that is not searched again."""
    long = case.prompt_tokens >= LONG_PROMPT
    names = [n for n in own if n in known and (n in ONCE or (long and n not in AT_LENGTH))]
    return {name: known[name] for name in names}


def describe(setting: Setting) -> str:
    """A setting as printed beside a figure."""
    return ", ".join(f"{name} {value}" for name, value in setting.items())


def mode_of(engine: str, weights: str, setting: Setting) -> str:
    """What weights of fewer than 16 bits are multiplied with."""
    if weights == "16 bit":
        return "16 bit"
    eight = engine in (OURS_8, "llama-cpp")
    if engine == "openvino":
        eight = setting.get("dynamic_quantization", "default") != 0
    if engine == "onnxruntime":
        eight = setting["accuracy"] == 4
    return "8-bit activations" if eight else "weight-only"
