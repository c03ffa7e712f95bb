"""Predicted memory against measured, and the peak while loading.

    python benchmarks/memory.py --model FOLDER [--draft FOLDER]

Every arm is a fresh process: anonymous memory when idle (Foretoken and PyTorch imported), its peak
while the models load (sampled), and its peak once every page has been written and a full step of
sampled requests has run. Wanted: the prediction within 5 %; while loading at most one layer more
than afterwards. Times play no part, so the machine may be busy.
"""

import argparse
import json
import subprocess
import sys
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from common import Goal, announce, at_most, finish, make_parser
from served import anonymous_bytes

MIB = 1 << 20
ARMS: dict[str, dict[str, Any]] = {
    "16-bit": {},
    "int8": {"quantization": "int8"},
    "int4": {"quantization": "int4"},
    "16-bit, int8 KV": {"kv_cache_dtype": "int8"},
    "16-bit, 16-bit draft": {"draft": None},
    "int8, int8 draft": {"quantization": "int8", "draft": "int8"},
    "int4, int4 draft, both with int8 KV": {
        "quantization": "int4",
        "kv_cache_dtype": "int8",
        "draft": "int4",
        "draft_kv_cache_dtype": "int8",
    },
}
"""What differs from the defaults; only arms with `draft`, its quantization, have a drafter."""


class Peak:
    """The most anonymous memory while a `with` block runs, sampled every millisecond."""

    def __enter__(self) -> "Peak":
        self.value, self._done = anonymous_bytes(), threading.Event()
        self._thread = threading.Thread(target=self._watch)
        self._thread.start()
        return self

    def _watch(self) -> None:
        while not self._done.wait(0.001):
            self.value = max(self.value, anonymous_bytes())

    def __exit__(self, *_: object) -> None:
        self._done.set()
        self._thread.join()
        self.value = max(self.value, anonymous_bytes())


def run_arm(settings: Mapping[str, Any]) -> dict[str, int]:
    """Measure one configuration in this process."""
    import gc

    import torch

    from foretoken import LLM, SamplingParams
    from foretoken.kv.store import KVStore

    torch.set_num_threads(1)
    torch.ones(64, 64) @ torch.ones(64, 64)
    idle = anonymous_bytes()
    with Peak() as loading:
        llm = LLM(**settings)
    loaded = anonymous_bytes()
    config = llm._engine.parts.config
    with Peak() as running:
        # Drafters write what a full target leaves to them.
        budget, target = config.budget, llm._engine.parts.runner.store
        every = budget.num_tokens * budget.need.draft_kv_per_token
        share = budget.draft_bytes / every if every else 1.0
        for store in [found for found in gc.get_objects() if isinstance(found, KVStore)]:
            for layer_SKh in store.layers:
                rows = layer_SKh.shape[0]
                layer_SKh[: rows if store is target else int(share * rows)].fill_(0)
        each = config.max_num_batched_tokens // config.max_num_seqs
        prompts = [
            {"prompt_token_ids": [1 + (7 * i + j) % 90 for j in range(each)]}
            for i in range(config.max_num_seqs)
        ]
        params = SamplingParams(temperature=0.8, max_tokens=8, ignore_eos=True)
        llm.generate(prompts, params, use_tqdm=False)
    return {
        "tokens": budget.num_tokens,
        "predicted": budget.total,
        "measured": running.value - idle,
        "predicted_weights": budget.need.weights + budget.need.draft_weights,
        "loaded": loaded - idle,
        "loading_peak": loading.value - idle,
        "layer": llm._engine.parts.runner.model.shape.layer_parameters() * 2,
    }


def measure(model: str, draft: str | None, arm: Mapping[str, Any], quick: bool) -> dict[str, int]:
    """Run one arm in a process of its own."""
    settings = {
        "model": model,
        "quantization": arm.get("quantization"),
        "kv_cache_dtype": arm.get("kv_cache_dtype", "auto"),
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64 if quick else 256,
        "max_model_len": 512,
        "kv_cache_memory_bytes": (8 if quick else 128) * MIB,
    }
    if "draft" in arm:
        settings["speculative_config"] = {
            "model": draft,
            "num_speculative_tokens": 4,
            "quantization": arm["draft"],
            "kv_cache_dtype": arm.get("draft_kv_cache_dtype", "auto"),
        }
    command = [sys.executable, __file__, "--child", json.dumps(settings)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(done.stderr)
    found: dict[str, int] = json.loads(done.stdout.splitlines()[-1])
    return found


def judged(name: str, one: Mapping[str, int]) -> list[Goal]:
    """Print one arm; the two promises."""
    error = one["predicted"] / one["measured"] - 1
    more = (one["loading_peak"] - one["loaded"]) / one["layer"]
    print(f"{name}: {one['tokens']} tokens of KV, predicted {one['predicted'] / MIB:.0f} MiB, "
          f"measured {one['measured'] / MIB:.0f} MiB ({error:+.1%}); after loading "
          f"{one['loaded'] / MIB:.0f}, peak while loading {one['loading_peak'] / MIB:.0f} "
          f"(a layer: {one['layer'] / MIB:.0f} MiB)", flush=True)  # fmt: skip
    return [at_most(f"{name}: error of the prediction", abs(error), 0.05),
            at_most(f"{name}: layers more while loading", more, 1.0)]  # fmt: skip


def main(arguments: Sequence[str]) -> None:
    if arguments[:1] == ["--child"]:
        print(json.dumps(run_arm(json.loads(arguments[1]))))
        return
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--draft", help="a draft model beside it; default: none")
    parser.add_argument("--arms", nargs="*", choices=ARMS, help="default: all that apply")
    settings: argparse.Namespace = parser.parse_args()
    names = settings.arms or [n for n in ARMS if settings.draft or "draft" not in ARMS[n]]
    where = announce(settings)
    results, goals = {}, list[Goal]()
    for name in names:
        results[name] = measure(settings.model, settings.draft, ARMS[name], settings.quick)
        goals += judged(name, results[name])
    finish("memory", where, settings, results, goals)


if __name__ == "__main__":
    main(sys.argv[1:])
