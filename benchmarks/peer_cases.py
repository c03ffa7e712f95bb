"""What the engines of `peers.py` are asked to do, and what can be tuned about each of them.

A setting is a dictionary: the value of every axis. Axes stand in the order in which they are
searched, and their first value is where the search begins. What no axis names stays at the
engine's own default. Knows nothing of processes or of time.
"""

from dataclasses import dataclass
from typing import Any

Setting = dict[str, int | str]
Axes = dict[str, tuple[int | str, ...]]

OURS = "foretoken"
OURS_8 = "foretoken, 8-bit activations"
"""Ours in its other mode: tuned, named and judged apart."""
DRAFT_LENGTHS = (3, 2, 5, 1, 8)
PRECISIONS = ("int8", "16 bit", "int4")
QUANTIZING = (OURS, OURS_8, "openvino", "llama-cpp")
"""Engines whose draft weights may have another precision than 16 bits."""
AXES: dict[str, Axes] = {
    OURS: {"threads": (2, 1)},
    OURS_8: {"activations": ("int8",), "threads": (2, 1)},
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
SEARCH_TOKENS = 50
"""One round of a cycle: every place at which a draft is wrong counts once."""
SPARE = 16
LONG_PROMPT = 1000
AT_LENGTH = ("backend", "dynamic_quantization", "draft", "k")
"""What is searched at long prompts, where a trial takes long; the rest comes from short ones."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all engines do."""

    engines: tuple[str, ...]
    """Those that can."""
    weights: str = "16 bit"
    """Of the target, the same for everyone."""
    draft: str | None = None
    prompt_tokens: int = 128
    tokens: int = 128
    """To write for each prompt."""
    batch: int = 1

    @property
    def is_long(self) -> bool:
        """Whether its prompts take so long that a search must not cut them."""
        return self.prompt_tokens >= LONG_PROMPT

    @property
    def context(self) -> int:
        """Positions that a prompt and its answer may take."""
        return self.prompt_tokens + max(self.tokens, SEARCH_TOKENS) + SPARE


PAIR: dict[str, Any] = {"draft": "cycle-draft-80"}
LONG: dict[str, Any] = {"prompt_tokens": 4000, "tokens": 64}
EVERYONE = (OURS, "openvino", "llama-cpp", "vllm")
CASES = {
    "16 bit": Case(engines=EVERYONE),
    "int8": Case(engines=(*QUANTIZING, "onnxruntime"), weights="int8"),
    "int4": Case(engines=(*QUANTIZING, "onnxruntime"), weights="int4"),
    "16 bit, draft 80 %": Case(engines=EVERYONE, **PAIR),
    "int8, draft 80 %": Case(engines=QUANTIZING, weights="int8", **PAIR),
    "int4, draft 80 %": Case(engines=QUANTIZING, weights="int4", **PAIR),
    "16 bit, prompt 4000": Case(engines=EVERYONE, **LONG),
    "int8, prompt 4000": Case(engines=QUANTIZING, weights="int8", **LONG),
    "batch 8": Case(engines=(OURS, "vllm"), prompt_tokens=384, batch=8),
}


def axes(engine: str, case: Case) -> Axes:
    """What is searched for `engine` in `case`."""
    found = dict(AXES[engine])
    if engine == "llama-cpp" and case.weights != "16 bit":
        del found["file"]
    if engine == "openvino":
        if case.draft:
            del found["backend"]  # It speculates with paged attention only.
        elif case.weights == "16 bit":
            del found["dynamic_quantization"]
    if case.draft:
        if engine == "llama-cpp":
            found["draft_poll"] = ("as poll", 0)
        if engine in QUANTIZING:
            found["draft"] = PRECISIONS
        found["k"] = DRAFT_LENGTHS
    return found


def taken_over(case: Case, own: Axes, known: Setting) -> Setting:
    """The part of what the first case of its kind found that is not searched again."""
    names = [n for n in own if n in known and (n in ONCE or (case.is_long and n not in AT_LENGTH))]
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
