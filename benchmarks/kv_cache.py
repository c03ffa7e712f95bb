"""Quality of int8 keys and values on the packaged pair, of the target and of its draft.

    python benchmarks/kv_cache.py [--prompts 12] [--tokens 96]

Bits per byte of held-out code, and the share of drafts that are accepted, greedy and at temperature
0.8 with a seed, k=5: keys and values in 16 bit and in int8, of target and draft. Times play no
part, so the machine may be busy. `benchmarks/attention.py` has the times, `benchmarks/memory.py`
the bytes.
"""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass

from common import announce, at_most, finish, make_pair_parser, use_threads
from quantization import bits_per_byte, rate
from runs import build

from tools.python_text.heldout import heldout_prompts

KV_DTYPES = ("auto", "int8")
TEMPERATURES = (0.0, 0.8)
LOSS = 0.002


@dataclass(frozen=True, slots=True, kw_only=True)
class Pairing:
    """One way to keep the keys and values of the pair."""

    target: str
    draft: str
    bits: float
    rates: dict[float, float]
    """Accepted share of drafted tokens, by temperature."""


def measure(texts: Sequence[str], settings: argparse.Namespace) -> list[Pairing]:
    found = []
    for target in KV_DTYPES:
        for draft in KV_DTYPES:
            config = {
                "model": settings.draft,
                "num_speculative_tokens": 5,
                "kv_cache_dtype": draft,
            }
            llm = build(settings.model, config, kv_cache_dtype=target)
            prompts = [llm.get_tokenizer().encode(text) for text in texts]
            rates = {t: rate(llm, prompts, t, settings.tokens) for t in TEMPERATURES}
            bits = bits_per_byte(llm, texts)
            found.append(Pairing(target=target, draft=draft, bits=bits, rates=rates))
            shown = ", ".join(f"T={t}: {r:.3f}" for t, r in rates.items())
            print(f"KV {target}, draft's KV {draft}: {bits:.4f} bits per byte, {shown}", flush=True)
    return found


def main() -> None:
    parser = make_pair_parser(__doc__, tokens=96)
    settings = parser.parse_args()
    if settings.quick:
        settings.prompts, settings.tokens = 2, 16
    use_threads(settings.threads)
    where = announce(settings)
    texts = [prompt.text for prompt in heldout_prompts(settings.prompts, tokens=128)]
    found = measure(texts, settings)
    bits = {one.target: one.bits for one in found}
    goals = [at_most("int8 keys and values, bits per byte", bits["int8"] / bits["auto"], 1 + LOSS)]
    finish("kv_cache", where, settings, {"pairings": found}, goals)


if __name__ == "__main__":
    main()
