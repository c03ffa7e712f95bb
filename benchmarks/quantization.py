"""Quality of quantized targets, and how often quantized drafts are right, on the packaged pair.

    python benchmarks/quantization.py [--prompts 12] [--tokens 96]

Bits per byte of held-out code for each target, and the share of drafts that each draft model has
accepted by it, greedy and at temperatures 0.8 and 1.0 with a seed, k=5. Times play no part, so the
machine may be busy. More than five points of acceptance lost: that draft is not worth its bits.
"""

import argparse
import math
from collections.abc import Sequence
from dataclasses import dataclass

from common import Goal, announce, at_least, finish, make_parser, use_threads
from runs import acceptance, build, run_once

from foretoken import LLM, SamplingParams
from foretoken.training.prompts import heldout_prompts

SCHEMES = (None, "int8", "int4")
TEMPERATURES = (0.0, 0.8, 1.0)
POINTS = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """One draft with one target."""

    target: str
    draft: str
    rates: dict[float, float]
    """Accepted share of drafted tokens, by temperature."""


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
    texts: Sequence[str], settings: argparse.Namespace
) -> tuple[dict[str, float], list[Pairing]]:
    bits: dict[str, float] = {}
    pairings = []
    for target in SCHEMES:
        name = target or "16-bit"
        for draft in SCHEMES:
            config = {
                "model": settings.draft,
                "num_speculative_tokens": 5,
                "quantization": draft,
            }
            llm = build(settings.model, config, quantization=target)
            prompts = [llm.get_tokenizer().encode(text) for text in texts]
            if name not in bits:
                bits[name] = bits_per_byte(llm, texts)
                print(f"target {name}: {bits[name]:.4f} bits per byte", flush=True)
            rates = {t: rate(llm, prompts, t, settings.tokens) for t in TEMPERATURES}
            pairings.append(Pairing(target=name, draft=draft or "16-bit", rates=rates))
            shown = ", ".join(f"T={t}: {r:.3f}" for t, r in rates.items())
            print(f"target {name}, draft {pairings[-1].draft}: {shown}", flush=True)
    return bits, pairings


def goals(pairings: Sequence[Pairing]) -> list[Goal]:
    """Points of acceptance that each quantized draft loses against the 16-bit one, at worst."""
    found = []
    for scheme in SCHEMES[1:]:
        lost = []
        for target in SCHEMES:
            own = {p.draft: p.rates for p in pairings if p.target == (target or "16-bit")}
            lost += [own["16-bit"][t] - own[scheme or ""][t] for t in TEMPERATURES]
        found.append(at_least(f"{scheme} draft, points kept", POINTS - 100 * max(lost), 0.0))
    return found


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="default: %(default)s")
    parser.add_argument("--draft", default="demo-draft", help="default: %(default)s")
    parser.add_argument("--prompts", type=int, default=12, help="default: %(default)s")
    parser.add_argument("--tokens", type=int, default=96, help="new tokens; default: %(default)s")
    settings = parser.parse_args()
    if settings.quick:
        settings.prompts, settings.tokens = 2, 16
    use_threads(settings.threads)
    where = announce(settings)
    texts = [prompt.text for prompt in heldout_prompts(settings.prompts, tokens=128)]
    bits, pairings = measure(texts, settings)
    results = {"bits_per_byte": bits, "acceptance": pairings}
    finish("quantization", where, settings, results, goals(pairings))


if __name__ == "__main__":
    main()
