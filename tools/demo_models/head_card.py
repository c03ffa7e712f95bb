"""Model cards of heads: what a head is, how it was trained, what it measured.

Owns the text around the numbers. They come from a run's newest checkpoint and from
`foretoken train eval`; nothing in a card is typed by hand but its notes.
"""

from typing import Any

from foretoken.errors import ConfigError
from foretoken.training.run_folder import newest_state
from tools.demo_models.card import (
    CardInput,
    drafter_data_section,
    loss_curve,
    notes_of,
    settings_of,
    table_of,
    work_of,
)

CONFIGS = {"parallel": "pard"}
ANCHORED = "; each repeats the newest token and features plus a mask, a variant of our own"
ABOUT = {
    "eagle": "an EAGLE head (arXiv 2401.15077): one decoder layer over the target's last features",
    "eagle3": "an EAGLE-3 head (arXiv 2503.01840): one decoder layer over three hidden states of "
    "the target",
    "peagle": "a P-EAGLE head (arXiv 2602.01469): an EAGLE-3 network that guesses all its tokens "
    "in one pass over mask slots",
    "dflash": "a DFlash head (arXiv 2602.06036): layers over five hidden states of the target, "
    "which fill in a block of drafts by one pass",
    "dspark": "a DSpark head (arXiv 2607.05147): a DFlash head whose drafts follow one another, "
    "and that judges how far they go",
    "mlp": "an MLP speculator (arXiv 2404.19124): one stage for each token ahead, weights tied",
    "medusa": "Medusa heads (arXiv 2401.10774) of low rank over the target's own output head",
    "parallel": "a draft model that guesses all its tokens in one pass over mask tokens, PARD "
    "(arXiv 2504.18583)",
}


def head_card(card: CardInput, name: str) -> str:
    """The card of a head trained for `demo`, as Markdown.

    Args:
        card: a head's run, and what `foretoken train eval` wrote.
        name: of the head.

    Raises:
        ConfigError: the run is not one of a head.
    """
    state = newest_state(card.run)
    kind, progress = state.get("kind"), state["progress"]
    if kind not in ABOUT:
        raise ConfigError("RUN", kind, f"a run of {', '.join(ABOUT)}")
    parameters = sum(t.numel() for t in state["model"].values() if t.is_floating_point())
    depth = state["head"]["depth"]
    config = settings_of(card.run).get("name", f"demo-{CONFIGS.get(kind, kind)}")
    about = ABOUT[kind] + (ANCHORED if state["head"].get("anchored") else "")
    columns = {"loss": "divergence", "tokens_a_step": f"tokens a step, k = {depth}"}
    columns |= {f"depth_{i + 1}": f"depth {i + 1}" for i in range(depth)}
    return f"""# Model card: {name}

For the target `demo`: {about}. {parameters / 1e6:.2f} M parameters of its own in bfloat16
({2 * parameters / 1e6:.1f} MB). It only drafts: the target checks every token, so it changes how
fast text comes, never which.

{drafter_data_section(card.run)}

## Training

`python -m tools.demo_models train {config} --target DEMO`: {work_of(card.run, progress)}
A chain in training has {depth} tokens; each depth counts {state["head"]["depth_decay"]:g} times the
one before. The loss is half forward KL divergence and half total variation.
{notes_of(card.notes)}
Depths are the shares of right greedy guesses, given that all before were right, on the target's
greedy text after held-out prompts:

{loss_curve(progress["history"], columns)}

## Measured against `demo` in the engine

Prompts from the held-out modules; a verification's tokens include the recovered or bonus token.
By position: the share of verifications that accept the draft at it and all before.

{_acceptance(card.measured)}

{_costs(card.measured)}

## Provenance

Trained for `demo` by the code in `src/foretoken/training` and `tools/demo_models`; no other model
and no other data took part. License of the weights: Apache-2.0, as the project.
"""


def _acceptance(measured: dict[str, Any]) -> str:
    rows = []
    for temperature, found in measured["acceptance"].items():
        shares = " ".join(f"{share:.2f}" for share in found["by_position"])
        rows.append((temperature, f"{found['lengths'][-1]:.2f}", shares))
    most = max(len(found["by_position"]) for found in measured["acceptance"].values())
    return table_of(("temperature", f"tokens a verification, k = {most}", "by position"), rows)


def _costs(measured: dict[str, Any]) -> str:
    rows = []
    for cost in measured["costs"]:
        k = cost["drafts"]
        gains = [speedups[k - 1 : k] if k else [1.0] for speedups in measured["speedups"].values()]
        shown = [f"{gain[0]:.2f}" if gain else "" for gain in gains]
        times = (f"{1000 * cost['total_s']:.2f}", f"{1000 * cost['drafting_s']:.2f}")
        rows.append((str(k), *times, *shown))
    heads = [f"speed-up at {name}" for name in measured["speedups"]]
    table = table_of(("k", "step, ms", "of it drafting, ms", *heads), rows)
    return f"""A decoding step of one sequence with k drafts, and the speed-up over the same engine
without drafts that follows from it (on a shared machine; for timings see the benchmarks):

{table}"""
