"""Prompts of several kinds in turn, and several drafters against the better of their parts.

Owns the kinds and what is compared between them; how a prompt is run and timed is in `runs`, how
a group of prompts is summarized in `methods`. Every repeat has a cache salt of its own, so that no
drafter remembers the output of the same prompt from the repeat before; within a repeat, past
outputs may help, as they would in service.
"""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from common import Goal, Ratio, at_least, ratio_of_medians

from tools.python_text.heldout import edit_prompts, heldout_prompts
from tools.python_text.stdlib import held_out_files

FUNCTION = re.compile(r"^ *def ([a-z][a-z_]{3,24})\(", re.MULTILINE)
TEMPLATES = (
    '    def get_{0}(self):\n        """Return the {0}."""\n        return self._{0}\n',
    "    def test_{0}(self):\n        result = self.module.{0}()\n"
    "        self.assertEqual(result, self.expected['{0}'])\n",
    "def {0}_command(args):\n    parser = make_parser('{0}')\n"
    "    options = parser.parse_args(args)\n    return run('{0}', options)\n",
    "    '{0}': Field(\n        name='{0}',\n        required=True,\n"
    "        help='value of {0}',\n    ),\n",
)
SHOWN = 4
"""Filled-in templates in a prompt."""
DRAFT, SUFFIX, NGRAM = "draft_model int8 k=3", "suffix", "ngram k=10"
LENGTH, GAIN = 2.5, 1.05


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Prompts that are alike."""

    name: str
    texts: tuple[str, ...]


def template_prompts(count: int, seed: int = 0) -> tuple[str, ...]:
    """Templates filled in with names of held-out modules; the next one has been begun."""
    rng = random.Random(seed)
    files = [f for f in held_out_files() if len(set(FUNCTION.findall(f.text))) > 2 * SHOWN]
    prompts = []
    for index in range(count):
        names = sorted(set(FUNCTION.findall(rng.choice(files).text)))
        template = TEMPLATES[index % len(TEMPLATES)]
        chosen = rng.sample(names, SHOWN + 1)
        shown = "\n".join(template.format(name) for name in chosen[:-1])
        begun = template[: template.index("{0}")] + chosen[-1]
        prompts.append(f"{shown}\n{begun}")
    return tuple(prompts)


def kinds(each: int) -> tuple[Kind, ...]:
    """`each` prompts of fresh code, of edits and of templates, all from held-out modules."""
    return (
        Kind(name="fresh", texts=tuple(p.text for p in heldout_prompts(each, tokens=128))),
        Kind(name="edits", texts=tuple(p.text for p in edit_prompts(each))),
        Kind(name="templates", texts=template_prompts(each)),
    )


def in_turn(several: Sequence[Kind]) -> list[tuple[str, str]]:
    """(kind, prompt) pairs, one kind after the other, over and over."""
    rounds = zip(*(kind.texts for kind in several), strict=True)
    return [
        (kind.name, text) for texts in rounds for kind, text in zip(several, texts, strict=True)
    ]


def arms(draft: str) -> dict[str, dict[str, Any]]:
    """Speculative configs of the drafters, each at its best alone, and together."""
    model = {
        "method": "draft_model",
        "model": draft,
        "num_speculative_tokens": 3,
        "quantization": "int8",
    }
    suffix = {"method": "suffix", "num_speculative_tokens": 16}
    careful = {**suffix, "min_speculative_tokens": 3}
    return {
        DRAFT: model,
        NGRAM: {"method": "ngram", "num_speculative_tokens": 10},
        SUFFIX: suffix,
        "first: suffix, draft": {"drafters": [careful, model], "policy": "first"},
        "best: suffix, draft": {"drafters": [suffix, model], "policy": "best"},
    }


def gain(seconds: dict[str, list[float]]) -> tuple[str, Ratio]:
    """The better of suffix and draft model, and its time over that of `best`."""
    totals = {name: sorted(seconds[name])[len(seconds[name]) // 2] for name in (DRAFT, SUFFIX)}
    better = min(totals, key=totals.__getitem__)
    return better, ratio_of_medians(seconds[better], seconds["best: suffix, draft"])


def goals(lengths: dict[str, dict[str, float]], won: Ratio) -> list[Goal]:
    """Acceptance lengths where text comes back, and what choosing brings."""
    found = [
        at_least(f"acceptance length, {arm}, {kind}, greedy", lengths[kind][arm], LENGTH)
        for kind in ("edits", "templates")
        for arm in (SUFFIX, NGRAM)
    ]
    name = "best over the better of suffix and draft_model, mixed"
    return [*found, at_least(name, won.value, GAIN)]
