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
DRAFT_LENGTHS = (3, 2, 5, 1, 8)
LOOK_UP_LENGTHS = (5, 15, 10, 3)
PRECISIONS = ("int8", "16 bit", "int4")
QUANTIZING = (OURS, "openvino", "llama-cpp")
"""Engines whose draft weights may have another precision than 16 bits."""
AXES: dict[str, Axes] = {
    OURS: {"threads": (2, 1)},
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
}
ONCE = ("threads", "pinning", "split_fuse", "kv_cache", "eager")
"""Searched in an engine's first plain case and in its first with drafts; the rest take it over."""
FLEXIBLE = (OURS, "openvino")
"""Engines that take `k` with each request, up to the one they were loaded with."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What all engines do, and the wanted ratio by peer: ours / the peer's, both at their best."""

    goals: dict[str, float]
    weights: str = "16 bit"
    """Of the target, the same for everyone."""
    draft: str | None = None
    method: str | None = None
    prompts: str = "fresh"
    prompt_tokens: int = 128
    batch: int = 1
    prefill: bool = False
    """Judged by the time of the first token, not by the others."""

    @property
    def kind(self) -> str:
        """Cases of one kind share what is searched once."""
        return self.method or "plain"


PAIR: dict[str, Any] = {"draft": "cycle-draft-80", "method": "draft_model"}
RIGHT: dict[str, Any] = {**PAIR, "draft": "cycle-draft-100"}
EVERYONE = {"transformers": 1.0, "vllm": 1.0, "openvino": 1.0, "llama-cpp": 1.0}
QUANTIZED = {"openvino": 1.0, "llama-cpp": 1.0}
CASES = {
    "16 bit": Case(goals=EVERYONE),
    "int8": Case(goals=QUANTIZED, weights="int8"),
    "int4": Case(goals=QUANTIZED, weights="int4"),
    "16 bit, draft 80 %": Case(goals={**EVERYONE, "openvino": 1.25}, **PAIR),
    "int8, draft 80 %": Case(goals={**QUANTIZED, "llama-cpp": 1.35}, weights="int8", **PAIR),
    "int4, draft 80 %": Case(goals={**QUANTIZED, "llama-cpp": 1.35}, weights="int4", **PAIR),
    "16 bit, draft 100 %": Case(goals=EVERYONE, **RIGHT),
    "int8, draft 100 %": Case(goals={**QUANTIZED, "llama-cpp": 1.35}, weights="int8", **RIGHT),
    "int4, draft 100 %": Case(goals={**QUANTIZED, "llama-cpp": 2.0}, weights="int4", **RIGHT),
    "n-gram echo": Case(
        goals={"transformers": 1.0, "vllm": 1.0, "openvino": 1.05}, method="ngram", prompts="echo"
    ),
    "batch 8": Case(goals={"vllm": 1.0}, prompt_tokens=384, batch=8),
    "prefill 1024": Case(goals={"vllm": 1.0}, prompt_tokens=1024, prefill=True),
}
STANDARD = tuple(CASES)[:6]
"""What is run if no case is named."""


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


def describe(setting: Setting) -> str:
    """A setting as printed beside a figure."""
    return ", ".join(f"{name} {value}" for name, value in setting.items())
