"""Promise 1 on GGUF files: the same tokens with and without speculation, for targets, draft models
and heads whose weights stay in the blocks of their files.

The guarded bugs: a product whose last bits follow from the number of rows, in the kernels of one
type; a head that reads another layer. There is no tolerance.
"""

import os
from pathlib import Path
from typing import Any

import gguf
import pytest

from foretoken import LLM
from foretoken.checkpoint import packaged_model
from foretoken.shape.gguf import forget_gguf
from tests.e2e.gguf_targets import MIXES, WIDTH, write_target
from tests.e2e.heads import write_head
from tests.e2e.lossless import PARAMETERS, PRESSURES, Result, counted, generate, make_prompts
from tests.golden.gguf_files import write_gguf
from tests.golden.gguf_heads import write_gguf_head
from tests.marks import slow_but

Kind = gguf.GGMLQuantizationType
METHODS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_min": 1},
    "draft": {"method": "draft_model", "num_speculative_tokens": 4},
    "eagle3": {"num_speculative_tokens": 4},
    "dflash": {"num_speculative_tokens": 4},
    "dspark": {"num_speculative_tokens": 5},
}
"""Those of heads are told from their files."""
HEADS = ("eagle3", "dspark")
BOTH = ("greedy", "seeded")
TOKENS = 40
SHORTAGE = {**PRESSURES["shortage"], "kv_cache_memory_bytes": 130_000}
"""Few pages, of which drafters have theirs."""


class Files:
    def __init__(self, target: Path, drafters: dict[str, Path], tokenizer: str | None) -> None:
        self._target, self._drafters, self._tokenizer = target, drafters, tokenizer

    def open(self, method: str | None, **settings: Any) -> LLM:
        """An engine with one of METHODS; None: with none."""
        forget_gguf()
        chosen = {"batch_invariant": True, "adaptive_speculation": False, **settings}
        if method is not None:
            config = dict(METHODS[method])
            if method in self._drafters:
                config["model"] = str(self._drafters[method])
            chosen["speculative_config"] = config
        return LLM(str(self._target), tokenizer=self._tokenizer, **chosen)


def of_mix(folder: Path, mix: str) -> Files:
    """Random ones, the target in one of MIXES; a draft model is right often, heads never are."""
    target = write_target(folder / "target.gguf", mix)
    drafters = {"draft": write_target(folder / "draft.gguf", mix, layers=1)}
    for name, kind in (("eagle3", Kind.Q8_0), ("dflash", Kind.Q5_0), ("dspark", Kind.F16)):
        head, path = write_head(folder / name, name, folder, WIDTH), folder / f"{name}.gguf"
        drafters[name] = write_gguf_head(head, path, kind, target_hidden=WIDTH)
    return Files(target, drafters, None)


def packaged(folder: Path, kind: Kind) -> Files:
    """The packaged ones, whose drafts are often right, in one type."""

    def model(name: str) -> Path:
        return write_gguf(packaged_model(name), "llama", path=folder / f"{name}.gguf", kind=kind)

    drafters = {"draft": packaged_model("demo-draft")}
    for name in ("eagle3", "dflash", "dspark"):
        head, path = packaged_model(f"demo-{name}"), folder / f"{name}.gguf"
        usual: dict[str, Any] = {"target_layers": [2, 12, 21]} if name == "eagle3" else {}
        drafters[name] = write_gguf_head(head, path, kind, target_hidden=192, **usual)
    return Files(model("demo"), drafters, str(packaged_model("demo")))


def run(llm: LLM, parameters: str, count: int, tokens: int = TOKENS) -> list[Result]:
    return generate(llm, make_prompts(count, 3), {"max_tokens": tokens, **PARAMETERS[parameters]})


def tokens_of(results: list[Result]) -> int:
    return sum(len(result.token_ids) for result in results)


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return of_mix(tmp_path_factory.mktemp("mix"), "Q4_K_M")


@pytest.fixture(scope="module")
def plain(files: Files) -> dict[str, list[Result]]:
    with files.open(None, **PRESSURES["one at a time"]) as llm:
        return {parameters: run(llm, parameters, 12) for parameters in BOTH}


@pytest.mark.parametrize("method", METHODS)
def test_short_of_pages_and_with_prefix_hits(
    method: str, files: Files, plain: dict[str, list[Result]]
) -> None:
    """Greedy and seeded, twice, with preemption: identical, and something was drafted."""
    with files.open(method, **SHORTAGE) as llm:
        preemptions = 0
        for parameters in (*BOTH, *BOTH):
            found = run(llm, parameters, 12)
            assert found == plain[parameters], parameters
            preemptions += sum(result.num_preemptions for result in found)
        drafted = counted(llm, "num_draft_tokens")
    assert drafted > 5 and preemptions > 0, (drafted, preemptions)


@pytest.mark.parametrize("method", slow_but(METHODS, "eagle3"))
def test_in_chunks(method: str, files: Files, plain: dict[str, list[Result]]) -> None:
    """Prompts in chunks of 24 tokens, in batches with decoding."""
    with files.open(method, **PRESSURES["chunks"]) as llm:
        for parameters in BOTH:
            assert run(llm, parameters, 12) == plain[parameters], parameters


TEXTS = (
    "def area(width, height):\n    return width * height\n\ndef volume(width, height, depth):\n",
    "Once there was a small house by the sea. In the small house",
    "1, 2, 3, 4, 5, 6, 7, 8,",
)


@pytest.mark.parametrize("methods", slow_but([HEADS, tuple(METHODS)], HEADS))
@pytest.mark.parametrize("kind", slow_but([Kind.Q5_0, Kind.Q4_1, Kind.Q8_0], Kind.Q5_0), ids=str)
def test_drafts_that_are_right(kind: Kind, methods: tuple[str, ...], tmp_path: Path) -> None:
    """The packaged target and its trained drafters: many drafts are accepted, none changes a
    token. A head that read other layers, or rows in another order, would be right by chance."""
    files = packaged(tmp_path, kind)

    def texts(llm: LLM, parameters: str) -> list[Result]:
        return generate(llm, list(TEXTS), {"max_tokens": 32, **PARAMETERS[parameters]})

    with files.open(None, **PRESSURES["one at a time"]) as llm:
        expected = {parameters: texts(llm, parameters) for parameters in BOTH}
    for method in methods:
        with files.open(method, max_num_seqs=8) as llm:
            for parameters in BOTH:
                assert texts(llm, parameters) == expected[parameters], (method, parameters)
            drafted, accepted = (
                counted(llm, f"num_{name}_tokens") for name in ("draft", "accepted")
            )
        assert accepted > 0.15 * drafted > 10, (method, drafted, accepted)


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("mix", MIXES)
def test_twenty_thousand_tokens_of_each_mix(mix: str, tmp_path: Path) -> None:
    """More than 100,000 tokens in all: every method, greedy and seeded, in one batch, in chunks and
    short of pages, in the file's own type and in float32: identical."""
    files, count, compared = of_mix(tmp_path, mix), 10, 0
    for dtype in ("auto", "float32"):
        with files.open(None, dtype=dtype, **PRESSURES["one at a time"]) as llm:
            expected = {parameters: run(llm, parameters, count) for parameters in BOTH}
        for method in METHODS:
            for pressure in (PRESSURES["calm"], PRESSURES["chunks"], SHORTAGE):
                with files.open(method, dtype=dtype, **pressure) as llm:
                    for parameters in BOTH:
                        found = run(llm, parameters, count)
                        assert found == expected[parameters], (dtype, method, pressure, parameters)
                        compared += tokens_of(found)
    assert compared >= 20_000, compared


FOLDER = os.environ.get("FORETOKEN_REAL")
SMOLLM2, GEMMA = "smollm2-135m-instruct-q4_1", "gemma-3-270m-q4_k_m"
SMALL, LARGE = (f"qwen2.5-coder-{size}-instruct-q4_k_m" for size in ("0.5b", "1.5b"))
CODE = """class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()
"""
PUBLISHED_TEXTS = (
    CODE + "\n\nclass Queue:\n",
    "def fibonacci(n):\n",
    "The lighthouse keeper climbed the stairs every evening. He",
    "List of the months: January, February, March,",
    '{"name": "Ada", "born": 1815}\n{"name": "Alan", "born": 1912}\n{"name":',
    CODE + "\n# The same class with type hints:\nclass Stack:\n",
    "Q: What is the capital of France?\nA: Paris.\nQ: What is the capital of Italy?\nA:",
    "for i in range(10):\n    print(i)\n\nfor i in range(20):\n",
)
LOOK_UP = {"method": "suffix", "num_speculative_tokens": 8}
SHORT = {"kv_cache_memory_bytes": 34 << 20, "max_num_batched_tokens": 48}
"""Pages for a third of the requests of SmolLM2, and prompts in chunks."""
CASES: dict[str, dict[str, Any]] = {
    "SmolLM2, look-up": {"model": SMOLLM2, "tokens": 400, "drafter": LOOK_UP},
    "SmolLM2, look-up, short of pages": {
        "model": SMOLLM2, "tokens": 400, "drafter": LOOK_UP,
        "settings": SHORT,
    },
    "SmolLM2, itself": {"model": SMOLLM2, "tokens": 400, "drafter": SMOLLM2},
    "Gemma 3, look-up": {"model": GEMMA, "tokens": 100, "drafter": LOOK_UP},
    "Qwen2.5 0.5B, look-up": {"model": SMALL, "tokens": 60, "drafter": LOOK_UP},
    "Qwen2.5 1.5B, 0.5B": {"model": LARGE, "tokens": 24, "drafter": SMALL},
}  # fmt: skip
LEAST = {name: 2 * len(PUBLISHED_TEXTS) * case["tokens"] for name, case in CASES.items()}
Expected = dict[str, list[Result]]


def test_the_cases_are_twenty_thousand_tokens() -> None:
    assert sum(LEAST.values()) >= 20_000


@pytest.fixture(scope="module")
def known() -> dict[tuple[str, int], Expected]:
    """What each model writes without drafts, by the number of tokens."""
    return {}


def find(name: str) -> str:
    if FOLDER is None:
        pytest.skip("FORETOKEN_REAL names no folder with published GGUF files")
    found = Path(FOLDER) / f"{name}.gguf"
    if not found.is_file():
        pytest.skip(f"{found.name} is not in FORETOKEN_REAL")
    return str(found)


def published_run(llm: LLM, parameters: str, tokens: int) -> list[Result]:
    """All texts at once, none ended before so many tokens."""
    chosen = {"max_tokens": tokens, "ignore_eos": True, **PARAMETERS[parameters]}
    return generate(llm, list(PUBLISHED_TEXTS), chosen)


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", CASES)
def test_published_files_lose_nothing(name: str, known: dict[tuple[str, int], Expected]) -> None:
    """Greedy and seeded, all requests in one batch, against one request at a time."""
    case = CASES[name]
    model, drafter, tokens = find(case["model"]), case["drafter"], case["tokens"]
    if isinstance(drafter, str):
        drafter = {"method": "draft_model", "model": find(drafter), "num_speculative_tokens": 4}
    settings: dict[str, Any] = {
        "batch_invariant": True,
        "adaptive_speculation": False,
        "max_model_len": 1024,
    }
    if (model, tokens) not in known:
        with LLM(model, **settings, max_num_seqs=1, enable_prefix_caching=False) as llm:
            both = {one: published_run(llm, one, tokens) for one in ("greedy", "seeded")}
        known[model, tokens] = both
        forget_gguf()
    settings |= {"max_num_seqs": 8, **case.get("settings", {})}
    compared = preempted = 0
    with LLM(model, **settings, speculative_config=drafter) as llm:
        for parameters, wanted in known[model, tokens].items():
            found = published_run(llm, parameters, tokens)
            assert found == wanted, parameters
            compared += sum(len(result.token_ids) for result in found)
            preempted += sum(result.num_preemptions for result in found)
        counts = {
            one.name.rsplit("num_")[-1]: getattr(one, "value", 0) for one in llm.get_metrics()
        }
    right, drafted = counts["accepted_tokens"], counts["draft_tokens"]
    print(f"\n{name}: {compared} equal, {right} of {drafted} drafts kept, {preempted} preempted")
    assert compared == LEAST[name] and drafted > 0
    assert preempted > 0 or "short" not in name
