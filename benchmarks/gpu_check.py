"""What only a GPU can say of the GPU path, in ten minutes: bits, tokens, and fractions of a limit.

Every section prints one JSON line and ends by its own clock; what it did not come to, it says. The
limit of all fractions is the read bandwidth that section `card` measures. Models have random
weights in published shapes, made on the device: nothing is downloaded.

    python benchmarks/gpu_check.py                 # all sections
    python benchmarks/gpu_check.py --only shapes   # one
    python benchmarks/gpu_check.py --rehearse      # on a CPU, by twins of the kernels: no numbers

docs/gpu.md has the predicted numbers, and says what was measured where.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import common  # noqa: F401  (it makes the packages beside it known)
import torch
from gpu_models import (
    MIXTURES,
    SHAPES,
    RandomWeights,
    random_runner,
    rows_at,
    write_random_eagle3,
)
from torch import Tensor

from foretoken import LLM, SamplingParams
from foretoken.backend import backend_for
from foretoken.kernels.gpu_kernels import GpuKernels, GpuWeights
from foretoken.kernels.library import VARIABLE
from foretoken.layers.mixture import Mixture
from foretoken.models import LoadOptions, Model
from foretoken.models.gpu.mixture import bind_mixture
from foretoken.models.load import layer_builder
from foretoken.models.tensors import StepDraws
from foretoken.ops.attention import Geometry, SpanWindow
from foretoken.ops.attention.gpu import GpuAttention
from foretoken.ops.drawing import Drawing, pack_rows
from foretoken.ops.linear.gpu import WholeLinear, pack_for_gpu
from foretoken.runtime import runner as runner_module
from foretoken.shape import ModelShape
from tests.drafters import ReplayProposer

SECONDS = {"card": 15, "tests": 110, "bits": 40, "models": 90, "shapes": 100, "steps": 140,
           "mixtures": 50, "yardstick": 50}  # fmt: skip
BITS_ROWS = (1, 2, 6, 16, 17, 64, 128, 256, 2048)
DRAFTERS: dict[str, dict[str, Any]] = {
    "ngram": {"method": "ngram", "num_speculative_tokens": 4},
    "draft model": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 4},
    "draft tree": {"method": "draft_model", "model": "demo-draft", "num_speculative_tokens": 6,
                   "choices": "[(0,),(1,),(0,0),(0,1),(1,0),(0,0,0)]"},
    "eagle3": {"method": "eagle3", "model": "demo-eagle3", "num_speculative_tokens": 4},
    "peagle": {"method": "peagle", "model": "demo-parallel", "num_speculative_tokens": 3},
    "dflash": {"method": "dflash", "model": "demo-dflash", "num_speculative_tokens": 4},
    "dspark": {"method": "dspark", "model": "demo-dspark", "num_speculative_tokens": 4},
    "medusa": {"method": "medusa", "model": "demo-medusa", "num_speculative_tokens": 3},
    "mlp": {"method": "mlp_speculator", "model": "demo-mlp", "num_speculative_tokens": 3},
}  # fmt: skip
PRODUCTS = ("linear_splits", "linear_long", "gate_up", "experts_gate_up", "experts_down")
PROMPTS = ("def fibonacci(n):", "The capital of France is", "import os\nimport sys\n\nclass ")


class Over(Exception):
    """A section's time is over."""


@dataclass
class Check:
    """One run: where it runs, how large things are, and what it has found."""

    rehearse: bool
    device: torch.device
    kernels: GpuKernels
    read_gb_s: float = 1.0
    ends: float = 0.0
    found: dict[str, Any] = field(default_factory=dict)

    def tick(self) -> None:
        """Raise `Over` once the section's time is over."""
        if time.monotonic() > self.ends:
            raise Over

    def put(self, name: str, value: Any) -> None:
        """Keep a finding, and look at the clock."""
        self.found[name] = value
        self.tick()

    @property
    def dtype(self) -> torch.dtype:
        return torch.bfloat16

    def randn(self, *size: int) -> Tensor:
        return torch.randn(*size, device=self.device, dtype=self.dtype)

    def seconds(self, run: Callable[[], Any], repeats: int = 20) -> float:
        """The median time of a call, on the device's own clock; weights are not in its cache where
        they are larger than that."""
        repeats = 2 if self.rehearse else repeats
        for _ in range(1 if self.rehearse else 3):
            run()
        times = []
        for _ in range(repeats):
            if self.device.type != "cuda":
                began = time.perf_counter()
                run()
                times.append(time.perf_counter() - began)
                continue
            first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            first.record()
            run()
            last.record()
            last.synchronize()
            times.append(first.elapsed_time(last) / 1e3)
        return statistics.median(times)

    def graph(self, run: Callable[[], Any]) -> Callable[[], Any]:
        """The call as a graph, where there are any."""
        recorder = self.kernels.recorder()
        return run if recorder is None or self.rehearse else recorder.record(run)


def card(check: Check) -> None:
    """Versions, and how fast memory is copied and read: the ceiling of all fractions."""
    import foretoken

    check.found |= {"torch": torch.__version__, "foretoken": foretoken.__version__}
    count = 1 << 20 if check.rehearse else 2 << 30
    if check.device.type == "cuda":
        properties = torch.cuda.get_device_properties(check.device)
        check.found |= {"card": properties.name, "memory": properties.total_memory,
                        "capability": f"{properties.major}.{properties.minor}",
                        "cuda": torch.version.cuda,
                        "triton": __import__("triton").__version__}  # fmt: skip
    x = torch.ones(count // 4, dtype=torch.float32, device=check.device)
    y = torch.empty_like(x)
    copied = 2 * x.nbytes / check.seconds(lambda: y.copy_(x)) / 1e9
    check.read_gb_s = x.nbytes / check.seconds(lambda: x.sum()) / 1e9
    check.put("copy_gb_s", round(copied, 1))
    check.put("read_gb_s", round(check.read_gb_s, 1))


def tests(check: Check) -> None:
    """The kernels' own tests, on the device."""
    if check.rehearse:
        return check.put("skipped", "they are for a device")
    every = sorted(Path("tests/unit/kernels").glob("test_triton_*.py"))
    files = [str(one) for one in every if one.stem != "test_triton_compiled"]
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
    left = max(5.0, check.ends - time.monotonic() - 2)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=left, check=False)
    except subprocess.TimeoutExpired as error:
        shown = error.stdout or b""
        check.put("cut", (shown.decode() if isinstance(shown, bytes) else shown)[-400:])
        return
    lines = done.stdout.splitlines()
    failed = [line for line in lines if line.startswith(("FAILED", "ERROR"))]
    check.put("passed", done.returncode == 0)
    check.put("failed", failed[:20])
    check.put("said", lines[-1] if lines else done.stderr[-300:])


def bits(check: Check) -> None:
    """Rows alone and in company; splits and long products; recorded and launched; twice."""
    from foretoken.ops.gpu.probe import why_bits_differ

    check.put("probe", why_bits_differ(check.kernels, check.device) or "passed")
    for name, (outputs, inputs) in _matrices("tiny" if check.rehearse else "llama-8b").items():
        linear = _linear(check, outputs, inputs)
        check.put(f"rows {name}", _other_bits(check, linear, inputs))
    geometry = _geometry(check, "tiny" if check.rehearse else "llama-8b")
    for tile in (32, 64, 128):
        kernels = _with_tile(check, tile)
        if kernels is not None:
            found = _attention_rows(check, GpuAttention(geometry, kernels))
            own = _attention_rows(check, GpuAttention(geometry, check.kernels))
            check.put(f"attention by tiles of {tile}", bool(torch.equal(found, own)))


def mixtures(check: Check) -> None:
    """Layers of published mixtures: the bits of their experts, and steps against what they read."""
    for name in (one for one in MIXTURES if one.startswith("tiny") is check.rehearse):
        with tempfile.TemporaryDirectory() as folder:
            runner, shape = random_runner(name, Path(folder), check.device, check.dtype)
            bound: Any = bind_mixture(runner.model.layers[0].mlp, shape.experts)
            give = partial(bound.give, check.kernels)
            check.put(f"rows {name}", _other_bits(check, give, shape.hidden_size))
            if runner.model.captured is None:
                check.put(f"{name}: steps", "none, the probe of its experts failed")
                continue
            for batch in (1, 8) if check.rehearse else (1, 8, 64):
                _time_step(check, (runner, shape), (batch, 1, 1000), f"{name}, ")
            del runner, bound, give


def models(check: Check) -> None:
    """Packaged models with every drafter, greedy and seeded: the tokens of plain decoding."""
    most = 6 if check.rehearse else 64
    plain = _tokens(check, None, most)
    for name, config in DRAFTERS.items():
        if check.rehearse and name not in ("ngram", "draft model"):
            continue
        found = _tokens(check, config, most)
        check.put(name, "equal" if found == plain else _first_difference(plain, found))


def shapes(check: Check) -> None:
    """Microseconds and fraction of the read bandwidth of each product, and of attention."""
    model = "tiny" if check.rehearse else "llama-8b"
    for name, (outputs, inputs) in _matrices(model).items():
        for rows in (1, 6, 64):
            found = {}
            for segments in (0, 1, 2, 4, 8):
                linear = _linear(check, outputs, inputs, segments)
                if linear is None:
                    continue
                x_TK = check.randn(rows, inputs)
                parts = x_TK.new_empty(linear.num_parts(rows), rows, outputs, dtype=torch.float32)
                run = check.graph(partial(linear.run, x_TK, parts))
                seconds = check.seconds(run)
                share = linear.weights.values_NK.nbytes / seconds / 1e9 / check.read_gb_s
                key = "table" if not segments else f"{segments} segments"
                found[key] = [round(1e6 * seconds, 1), round(share, 3)]
            check.put(f"{name} {outputs}x{inputs}, {rows} rows: us, fraction", found)
    geometry = _geometry(check, model)
    for places in (200,) if check.rehearse else (1000, 8000, 32000):
        seconds = _attention_seconds(check, geometry, places)
        read = 2 * places * geometry.num_kv_heads * geometry.head_dim * 2
        share = read / seconds / 1e9 / check.read_gb_s
        check.put(f"attention, {places} keys", [round(1e6 * seconds, 1), round(share, 3)])


def steps(check: Check) -> None:
    """Whole steps of Llama-3.1-8B's shape: recorded, on the host, and against the limit."""
    name = "tiny" if check.rehearse else "llama-8b"
    with tempfile.TemporaryDirectory() as folder:
        runner, shape = random_runner(name, Path(folder), check.device, check.dtype)
        for batch, rows, place in ((1, 1, 1000), (1, 6, 1000), (8, 1, 1000), (32, 1, 1000),
                                   (64, 1, 1000), (64, 6, 1000), (1, 1, 8000)):  # fmt: skip
            if check.rehearse and batch > 8:
                continue
            _time_step(check, (runner, shape), (batch, rows, place))
        if check.device.type == "cuda":
            check.put("profile of batch 1", _profile(runner))
        del runner  # The engine wants the memory.
        _engine(check, name, Path(folder))


def _time_step(
    check: Check, on: tuple[Any, ModelShape], size: tuple[int, int, int], name: str = ""
) -> None:
    """A whole step: measured, as docs/gpu.md predicts it, and the limit that reading sets.

    `size`: sequences, rows of each, and their place.
    """
    (runner, shape), (batch, rows, place) = on, size
    place = min(place, shape.max_position_embeddings - 8)
    layouts, ids = rows_at(batch, rows, place, runner.page_size)
    draws = StepDraws(pack_rows(range(batch * rows), Drawing.of(0.8, None)))

    def step() -> Any:
        given = (layouts, ids, range(batch * rows), runner.store, None, draws)
        return runner.model.step(*given).arrived()

    with torch.inference_mode():
        check.kernels.launched.clear()
        experts = step().experts_read  # It is launched twice: to compile it and to record it.
        launched = {one: count // 2 for one, count in check.kernels.launched.items()}
        seconds = _wall(step, 3 if check.rehearse else 30)
    windows = [shape.window(layer) or place for layer in range(shape.num_hidden_layers)]
    seen = sum(min(place, window) for window in windows) / len(windows)
    kept = batch * seen * shape.kv_bytes_per_token(2, "auto")
    read = _weight_bytes(runner, experts) + kept
    limit, launches = read / check.read_gb_s / 1e9, sum(launched.values())
    products = sum(launched.get(one, 0) for one in PRODUCTS)
    gaps = (1.5 * products + 2.5 * (launches - products)) / 1e6
    reserved = torch.cuda.memory_reserved() if check.device.type == "cuda" else 0
    found = {"ms": round(1e3 * seconds, 3), "predicted_ms": round(1e3 * (limit / 0.92 + gaps), 3),
             "limit_ms": round(1e3 * limit, 3), "reserved_mib": reserved >> 20,
             "fraction": round(limit / seconds, 3), "tokens_s": round(batch / seconds, 1),
             "launches": launches}  # fmt: skip
    if shape.experts is not None:
        # What a router that chooses evenly reads, and what this one did.
        even = _weight_bytes(runner, shape.experts.touched(batch * rows)) + kept
        found |= {"experts": experts, "mib": [round(one / 2**20, 1) for one in (even, read)]}
    check.put(f"{name}batch {batch}, {rows} rows, place {place}", found)


def _other_bits(check: Check, run: Callable[[Tensor], Tensor], inputs: int) -> Any:
    """By how many rows at once some row has other bits than among most; or `equal`."""
    most = 64 if check.rehearse else max(BITS_ROWS)
    x_TK = check.randn(most, inputs)
    whole = run(x_TK)
    wrong = [
        rows
        for rows in BITS_ROWS
        if rows <= most
        and not torch.equal(torch.cat([run(x) for x in x_TK[: 4 * rows].split(rows)]),
                            whole[: 4 * rows])
    ]  # fmt: skip
    return wrong or "equal"


def _engine(check: Check, name: str, folder: Path) -> None:
    """Tokens a second of the engine: plain, with drafts of which 0.7 are right, and with a head."""

    def load(folder: Path, options: LoadOptions) -> Model:
        shape = ModelShape.from_config(folder)
        weights = RandomWeights(check.device, check.dtype)
        return layer_builder(weights, shape, options).model()

    tokens, most = (8, 4) if check.rehearse else (160, 64)
    head = write_random_eagle3(name, folder / "head", 300 if check.rehearse else 32000)
    vocabulary, known = SHAPES[name]["vocab_size"], dict[str, list[int]]()
    arms: dict[str, Callable[[], dict[str, Any]]] = {
        "plain": dict,
        "0.7 of 5 drafts right": lambda: {"proposer": ReplayProposer(known, vocabulary, wrong=0.3)},
        "eagle3 of 5, none right": lambda: {"speculative_config": {
            "method": "eagle3", "model": str(head), "num_speculative_tokens": 5}},
    }  # fmt: skip
    with mock.patch.object(runner_module, "load_model", load):
        for batch in (1, most):
            prompts = [{"prompt_token_ids": [7 + i % 90] * 100} for i in range(batch)]
            for arm, settings in arms.items():
                with LLM(str(folder), device=check.device.type, dtype="bfloat16", seed=1,
                         max_num_seqs=batch, max_model_len=400, adaptive_speculation=False,
                         **settings()) as llm:  # fmt: skip
                    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True,
                                            detokenize=False)  # fmt: skip
                    llm.generate(prompts, params, use_tqdm=False)
                    began = time.perf_counter()
                    found = llm.generate(prompts, params, use_tqdm=False)
                    seconds = time.perf_counter() - began
                # Requests are numbered on; the next engine numbers them from 0, twice.
                if arm == "plain":
                    ids = [list(one.outputs[0].token_ids) for one in found]
                    known |= {str(i): ids[i % batch] for i in range(2 * batch)}
                line = {"tokens_s": round(batch * tokens / seconds, 1)}
                if arm.startswith("eagle3"):
                    # Each step gave one token; with drafts right 0.7 of the time it gives 2.94.
                    gives = sum(0.7**i for i in range(6))
                    line["tokens_s_at_0.7"] = round(gives * batch * tokens / seconds, 1)
                check.put(f"engine, batch {batch}, {arm}", line)


def yardstick(check: Check) -> None:
    """The same shapes by cuBLAS and SDPA in one graph: what an engine without the promise has."""
    name = "tiny" if check.rehearse else "llama-8b"
    shape, place = SHAPES[name], 100 if check.rehearse else 1000
    heads, size = shape["num_attention_heads"], shape["head_dim"]
    keys = shape["num_key_value_heads"]
    matrices = _matrices(name)
    weights = [
        {one: check.randn(*of) for one, of in matrices.items() if one != "head"}
        for _ in range(shape["num_hidden_layers"])
    ]
    head = check.randn(*matrices["head"])
    ones = torch.ones(shape["hidden_size"], device=check.device, dtype=check.dtype)
    for batch in (1, 8, 32, 64):
        kv = [check.randn(2, batch, keys, place, size) for _ in weights]
        x0 = check.randn(batch, shape["hidden_size"])

        def step(kv: list[Tensor] = kv, x0: Tensor = x0, batch: int = batch) -> Tensor:
            x = x0
            for w, (k, v) in zip(weights, kv, strict=True):
                normed = torch.nn.functional.rms_norm(x, ones.shape, ones)
                q = (normed @ w["qkv"].T)[:, : heads * size].view(batch, heads, 1, size)
                out = torch.nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True)
                x = x + out.reshape(batch, -1) @ w["out"].T
                normed = torch.nn.functional.rms_norm(x, ones.shape, ones)
                gate, up = (normed @ w["gate_up"].T).chunk(2, -1)
                x = x + (torch.nn.functional.silu(gate) * up) @ w["down"].T
            return (x @ head.T).argmax(-1)

        with torch.inference_mode():
            seconds = check.seconds(check.graph(step))
        check.put(f"batch {batch}: ms", round(1e3 * seconds, 3))


def _tokens(check: Check, config: dict[str, Any] | None, most: int) -> list[Any]:
    """Of all prompts, greedy and seeded."""
    found = []
    with LLM("demo", device=check.device.type, speculative_config=config, batch_invariant=True,
             adaptive_speculation=False, max_model_len=512, max_num_seqs=8) as llm:  # fmt: skip
        for how in ({"temperature": 0.0}, {"temperature": 0.8, "seed": 3}):
            params = SamplingParams(max_tokens=most, **how)
            outputs = llm.generate(list(PROMPTS), params, use_tqdm=False)
            found += [list(output.outputs[0].token_ids) for output in outputs]
            check.tick()
    return found


def _first_difference(plain: list[Any], found: list[Any]) -> list[int]:
    """[answer, token] where they part."""
    for answer, (one, other) in enumerate(zip(plain, found, strict=True)):
        for place, (a, b) in enumerate(zip(one, other, strict=False)):
            if a != b:
                return [answer, place]
    return [-1, -1]


def _matrices(model: str) -> dict[str, tuple[int, int]]:
    """(outputs, inputs) by name."""
    shape = SHAPES[model]
    hidden, inner = shape["hidden_size"], shape["intermediate_size"]
    heads = shape["num_attention_heads"] * shape["head_dim"]
    both = heads + 2 * shape["num_key_value_heads"] * shape["head_dim"]
    return {"qkv": (both, hidden), "out": (hidden, heads), "gate_up": (2 * inner, hidden),
            "down": (hidden, inner), "head": (shape["vocab_size"], hidden)}  # fmt: skip


def _linear(check: Check, outputs: int, inputs: int, segments: int = 0) -> WholeLinear | None:
    """Random weights in so many segments; 0: as the table or the formula says; None: it cannot be
    cut so."""
    weights_NK = check.randn(outputs, inputs)
    if not segments:
        return WholeLinear(check.kernels, pack_for_gpu(check.kernels, weights_NK))
    if inputs % (128 * segments):
        return None
    weights = GpuWeights(values_NK=weights_NK, segment=inputs // segments, inputs=inputs)
    return WholeLinear(check.kernels, weights)


def _geometry(check: Check, model: str) -> Geometry:
    shape = SHAPES[model]
    return Geometry(
        num_heads=shape["num_attention_heads"],
        num_kv_heads=shape["num_key_value_heads"],
        head_dim=shape["head_dim"],
        page_size=16,
        dtype=check.dtype,
        device=check.device,
    )


def _with_tile(check: Check, tile: int) -> GpuKernels | None:
    """The kernels with other tiles; None: they have none."""
    if check.rehearse:
        return None
    made: Any = type(check.kernels)
    return made(torch.cuda.get_device_capability(check.device), tile=tile)


def _attention_rows(check: Check, attention: GpuAttention, places: int = 700) -> Tensor:
    """Random queries of a prompt of so many places."""
    geometry = attention.geometry
    generator = torch.Generator().manual_seed(0)
    pages = list(range(-(-places // geometry.page_size)))
    size = (len(pages) * geometry.page_size, 2 * geometry.num_kv_heads, geometry.head_dim)
    kv_SKh = torch.randn(*size, generator=generator).to(check.device, check.dtype)
    q = torch.randn(places, geometry.num_heads, geometry.head_dim, generator=generator)
    attend = attention.plan([SpanWindow(0, places, pages)])
    return attend(q.to(check.device, check.dtype), kv_SKh)


def _attention_seconds(check: Check, geometry: Geometry, places: int) -> float:
    """One row over so many keys, both kernels."""
    pages = list(range(-(-places // geometry.page_size)))
    size = (len(pages) * geometry.page_size, 2 * geometry.num_kv_heads, geometry.head_dim)
    kv_SKh, q_THh = check.randn(*size), check.randn(1, geometry.num_heads, geometry.head_dim)
    attend = GpuAttention(geometry, check.kernels).plan([SpanWindow(places - 1, 1, pages)])
    return check.seconds(lambda: attend(q_THh, kv_SKh))


def _weight_bytes(runner: Any, experts: float) -> int:
    """Bytes that a step reads of the weights: all but the table, and so many of a layer's
    experts."""
    parts = runner.model.captured.parts
    whole, each = [parts.head], list[Any]()
    for layer in parts.layers:
        mlp = layer.mlp
        whole += [layer.attention.qkv, layer.attention.out]
        if isinstance(mlp, Mixture):
            whole.append(mlp.router.linear)
            each += [mlp.experts[0].gate_up, mlp.experts[0].down]
        else:
            whole += [mlp.gate_up, mlp.down]
    sizes = (sum(one.weights.values_NK.nbytes for one in some) for some in (whole, each))
    return round(sum(size * times for size, times in zip(sizes, (1, experts), strict=True)))


def _wall(run: Callable[[], Any], repeats: int) -> float:
    """The median of calls, each of which waits for the device at its end."""
    times = []
    for _ in range(repeats):
        began = time.perf_counter()
        run()
        times.append(time.perf_counter() - began)
    return statistics.median(times)


def _profile(runner: Any) -> dict[str, Any]:
    """Kernels of a recorded step, the longest gaps between them, and the slowest kernels, in us."""
    layouts, ids = rows_at(1, 1, 1000, runner.page_size)
    draws = StepDraws(pack_rows(range(1), Drawing.of(0.8, None)))
    activities = [torch.profiler.ProfilerActivity.CUDA]
    with torch.inference_mode(), torch.profiler.profile(activities=activities) as profile:
        runner.model.step(layouts, ids, range(1), runner.store, None, draws).arrived()
    events = sorted(
        (event.time_range.start, event.time_range.end, event.name) for event in profile.events()
    )
    gaps = [b[0] - a[1] for a, b in zip(events, events[1:], strict=False)]
    totals: dict[str, float] = {}
    for start, end, name in events:
        totals[name[:40]] = totals.get(name[:40], 0.0) + end - start
    slowest = sorted(totals.items(), key=lambda pair: -pair[1])[:10]
    return {"kernels": len(events), "gaps_us": sorted(gaps)[-5:],
            "median_gap_us": statistics.median(gaps) if gaps else 0.0,
            "slowest_us": {name: round(total, 1) for name, total in slowest}}  # fmt: skip


SECTIONS: dict[str, Callable[[Check], None]] = {
    "card": card, "tests": tests, "bits": bits, "models": models, "shapes": shapes,
    "steps": steps, "mixtures": mixtures, "yardstick": yardstick,
}  # fmt: skip


def run(check: Check, names: Sequence[str]) -> Iterator[dict[str, Any]]:
    """What each section found; one that fails says why, and the next begins."""
    for name in names:
        check.found, began = {}, time.monotonic()
        check.ends = began + SECONDS[name]
        line: dict[str, Any] = {"section": name}
        try:
            SECTIONS[name](check)
        except Over:
            line["cut"] = f"after {SECONDS[name]} s"
        except Exception as error:  # noqa: BLE001 - one section must not cost the others
            line["error"] = f"{type(error).__name__}: {error}"[:600]
        if check.device.type == "cuda":
            torch.cuda.empty_cache()
        yield {**line, "s": round(time.monotonic() - began, 1), **check.found}


def main() -> None:
    """Run the sections that are asked for."""
    import argparse

    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--only", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    parser.add_argument("--rehearse", action="store_true", help="on a CPU, by twins; no numbers")
    given = parser.parse_args()
    if given.rehearse:
        os.environ[VARIABLE] = "twins"
    device = torch.device("cpu" if given.rehearse else "cuda")
    kernels = backend_for(device).gpu
    if kernels is None:
        raise SystemExit("no GPU, or the probe of its kernels failed: see the log above")
    for line in run(Check(rehearse=given.rehearse, device=device, kernels=kernels), given.only):
        print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
