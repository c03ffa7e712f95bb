"""Quality of quantized targets, and how often quantized drafts are right, on the packaged pair.

    python benchmarks/quantization.py [--prompts 12] [--tokens 96] [--sequences 128]
    python benchmarks/quantization.py --kv

16-bit, int8, int4 rounded to nearest and int4 calibrated on the pair's training text, as targets
and as drafts; integers with activations of 16 bits and, `a8`, of 8. Bits per byte of held-out code
for each target, and the share of drafts that each draft model has accepted by it, greedy and at
temperatures 0.8 and 1.0 with a seed, k=5. Times play no part, so the machine may be busy. More than
five points lost: step back to more bits. With --kv instead keys and values in 16 bits and in int8,
of target and draft, whose weights have 16 bits.
"""

import argparse
import json
import math
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean

from common import Goal, announce, at_least, at_most, finish, make_pair_parser, use_threads
from runs import acceptance, build, run_once

from foretoken import LLM, SamplingParams
from foretoken.training.quantize.job import PROVENANCE, quantize_model
from foretoken.training.quantize.settings import CalibrationSettings, QuantizeSettings
from tools.python_text.heldout import heldout_prompts

WHOLE, CALIBRATED = "16-bit", "int4 calibrated"
ARMS = (WHOLE, "int8", "int4", CALIBRATED, "int8 a8", "int4 a8", "int4 calibrated a8")
TEMPERATURES = (0.0, 0.8, 1.0)
POINTS, KV_LOSS = 5.0, 1.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """One draft with one target."""

    target: str
    draft: str
    rates: dict[float, float]
    """Accepted share of drafted tokens, by temperature."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """How an arm is opened."""

    path: str
    quantization: str | None = None
    activations: str = "auto"
    kv_cache_dtype: str = "auto"

    def settings(self) -> dict[str, str | None]:
        """As target and draft take them."""
        return {"quantization": self.quantization, "activations": self.activations,
                "kv_cache_dtype": self.kv_cache_dtype}  # fmt: skip


def arms(name: str, folder: Path, settings: argparse.Namespace) -> dict[str, Model]:
    """The arms of a model; the calibrated one is written to `folder` unless it is there."""
    if not folder.exists():
        wanted = CalibrationSettings(source="python", sequences=settings.sequences)
        quantize_model(name, folder, QuantizeSettings(scheme="int4", calibration=wanted))
    errors = json.loads((folder / PROVENANCE).read_text())["output_errors"].values()
    fitted, nearest = (fmean(e[kind] for e in errors) for kind in ("calibrated", "nearest"))
    print(f"{name}: outputs change by {fitted:.4f}, rounded to nearest {nearest:.4f}", flush=True)
    integers = {
        "int8": Model(path=name, quantization="int8", activations="int16"),
        "int4": Model(path=name, quantization="int4", activations="int16"),
        CALIBRATED: Model(path=str(folder), quantization="int4", activations="int16"),
    }
    rounded = {f"{arm} a8": replace(model, activations="int8") for arm, model in integers.items()}
    return {WHOLE: Model(path=name, quantization=None), **integers, **rounded}


def bits_per_byte(llm: LLM, texts: Sequence[str]) -> float:
    """-log2 of the probability of each text after its first token, per byte of it."""
    tokenizer = llm.get_tokenizer()
    params = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    nats, size = 0.0, 0
    for text in texts:
        ids = tokenizer.encode(text)
        [result] = llm.generate([{"prompt_token_ids": ids}], params, use_tqdm=False)
        assert result.prompt_logprobs is not None, "asked for"
        for token, entry in zip(ids, result.prompt_logprobs, strict=True):
            nats -= entry[token].logprob if entry is not None else 0.0
        size += len(text.encode()) - len(tokenizer.decode(ids[:1]).encode())
    return nats / math.log(2) / size


def rate(llm: LLM, prompts: Sequence[list[int]], temperature: float, tokens: int) -> float:
    """Accepted share of the drafts over all prompts."""
    runs = []
    for index, ids in enumerate(prompts):
        seed = 1000 + index if temperature else None
        params = SamplingParams(
            temperature=temperature, seed=seed, max_tokens=tokens, ignore_eos=True
        )
        runs.append(run_once(llm, ids, params))
    return acceptance(runs).rate


def measure(
    targets: Mapping[str, Model], drafts: Mapping[str, Model], settings: argparse.Namespace
) -> tuple[dict[str, float], list[Pairing]]:
    texts = [p.text for p in heldout_prompts(settings.texts, tokens=400, seed=1)]
    prompts = [p.text for p in heldout_prompts(settings.prompts, tokens=128)]
    bits: dict[str, float] = {}
    pairings = []
    for name, target in targets.items():
        for other, draft in drafts.items():
            config = {"model": draft.path, "num_speculative_tokens": 5, **draft.settings()}
            llm = build(target.path, config, **target.settings())
            ids = [llm.get_tokenizer().encode(text) for text in prompts]
            if name not in bits:
                bits[name] = bits_per_byte(llm, texts)
                print(f"target {name}: {bits[name]:.4f} bits per byte", flush=True)
            rates = {t: rate(llm, ids, t, settings.tokens) for t in TEMPERATURES}
            pairings.append(Pairing(target=name, draft=other, rates=rates))
            shown = ", ".join(f"T={t}: {r:.3f}" for t, r in rates.items())
            print(f"target {name}, draft {other}: {shown}", flush=True)
    return bits, pairings


def goals(pairings: Sequence[Pairing]) -> list[Goal]:
    """Points of acceptance that an arm loses, at worst, against 16 bits in the same place."""
    rates = {(p.target, p.draft): p.rates for p in pairings}
    found = []
    for arm in ARMS[1:]:
        places = {
            f"{arm} draft": [((target, WHOLE), (target, arm)) for target in ARMS],
            f"{arm} target": [((WHOLE, draft), (arm, draft)) for draft in ARMS],
        }
        for name, everywhere in places.items():
            pairs = [(a, b) for a, b in everywhere if a in rates and b in rates]
            if not pairs:
                continue
            lost = max(rates[a][t] - rates[b][t] for a, b in pairs for t in TEMPERATURES)
            left = POINTS - 100 * lost
            found.append(at_least(f"{name}, points left of {POINTS:g}", left, 0.0))
            if left < 0:
                print(f"{name}: {100 * lost:.1f} points lost: step back to more bits")
    return found


def main() -> None:
    parser = make_pair_parser(__doc__, tokens=96)
    parser.add_argument("--targets", nargs="+", choices=ARMS, default=ARMS, help="default: all")
    parser.add_argument("--drafts", nargs="+", choices=ARMS, default=ARMS, help="default: all")
    parser.add_argument("--kv", action="store_true", help="keys and values in place of weights")
    parser.add_argument("--folder", type=Path, help="keeps the calibrated models for other runs")
    parser.add_argument("--texts", type=int, default=24, help="for bits; default: %(default)s")
    parser.add_argument(
        "--sequences", type=int, default=128, help="of the calibration; default: %(default)s"
    )
    settings = parser.parse_args()
    if settings.quick:
        settings.prompts, settings.tokens, settings.texts, settings.sequences = 2, 16, 2, 4
    use_threads(settings.threads)
    where = announce(settings)
    with tempfile.TemporaryDirectory() as temporary:
        folder = settings.folder or Path(temporary)
        if settings.kv:
            targets, drafts = (
                {f"KV {kept}": Model(path=path, kv_cache_dtype=kept) for kept in ("auto", "int8")}
                for path in (settings.model, settings.draft)
            )
        else:
            targets = arms(settings.model, folder / "target", settings)
            drafts = arms(settings.draft, folder / "draft", settings)
            targets = {name: targets[name] for name in settings.targets}
            drafts = {name: drafts[name] for name in settings.drafts}
        bits, pairings = measure(targets, drafts, settings)
    found = goals(pairings)
    if settings.kv:
        ratio = bits["KV int8"] / bits["KV auto"]
        found = [at_most("int8 keys and values, bits per byte over 16 bits", ratio, KV_LOSS)]
    results = {"bits_per_byte": bits, "acceptance": pairings}
    finish("quantization", where, settings, results, found)


if __name__ == "__main__":
    main()
