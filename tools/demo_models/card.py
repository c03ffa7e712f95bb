"""Model cards: what a packaged model is, where it came from and what it measured.

Owns the text around the numbers. The numbers come from a run's newest checkpoint and from the
command `measure` (`foretoken train eval` for heads); nothing in a card is typed by hand.
"""

import json
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from foretoken.errors import ConfigError
from foretoken.training.run_folder import PROVENANCE, newest_state
from tools.demo_models.acceptance import TEMPERATURES
from tools.demo_models.batches import Mix
from tools.demo_models.packages import MOST_CHARACTERS, load_packages
from tools.python_text.stdlib import load_corpus

Record = dict[str, float]


@dataclass(frozen=True, slots=True, kw_only=True)
class CardInput:
    """A run's folder, the measurements of its pair, and lines on how the run was done."""

    run: Path
    measured: dict[str, Any]
    notes: tuple[str, ...] = ()


def table_of(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """A Markdown table."""
    lines = [heads, tuple("---" for _ in heads), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def thin(history: list[Record], most: int = 12) -> list[Record]:
    """Evenly spread records of `history`, at most `most`, the last among them."""
    stride = max(1, -(-len(history) // most))
    return history[::-1][::stride][::-1]


def loss_curve(history: list[Record], columns: dict[str, str]) -> str:
    """A table of tokens, minutes and the named columns of `history`."""
    rows = [
        (
            f"{r['step']:.0f}",
            f"{r['tokens'] / 1e6:.2f} M",
            f"{r['minutes']:.1f}",
            *(f"{r[name]:.3f}" for name in columns),
        )
        for r in thin(history)
    ]
    return table_of(("step", "tokens", "minutes", *columns.values()), rows)


def provenance_of(run: Path) -> dict[str, Any]:
    """The record of a run's newest start; empty where its folder has none."""
    path = run / PROVENANCE
    found: dict[str, Any] = json.loads(path.read_text())[-1] if path.is_file() else {}
    return found


def settings_of(run: Path) -> dict[str, Any]:
    """The settings of a run's newest start; none where its folder has no record of one."""
    settings: dict[str, Any] = provenance_of(run).get("settings", {})
    return settings


def data_section(run: Path) -> str:
    """What a run of this interpreter read, and what it held out."""
    settings = settings_of(run)
    share, edits = settings.get("package_share", 0.0), settings.get("edit_share", Mix().edit_share)
    more, theirs = ("", "") if share == 0.0 else (_packages_read(share), LICENCES)
    corpus = load_corpus()
    library = [file for file in corpus.training if not file.is_test]
    tests = [file for file in corpus.training if file.is_test]
    sizes = [sum(len(file.text) for file in part) / 1e6 for part in (library, tests)]
    held = ", ".join(f"`{file.path}`" for file in corpus.held_out)
    return f"""## Data

CPython {platform.python_version()}'s own standard library, read from the interpreter that runs
the training: {len(library)} library files ({sizes[0]:.1f} MB) and {len(tests)} files of its test
suite ({sizes[1]:.1f} MB). Left out: character tables, generated data, anything that is not plain
UTF-8 Python, and every file that shares a tenth or more of the distinctive lines of a held-out
module, and the held-out modules' own tests. The digests of all files are pinned in
`tools/demo_models/manifests/`. {edits:.0%} of the rows are documents that show a piece of
a training file, name an edit, and show the edited piece.
{more}
Held out, never trained on ({len(corpus.held_out)} modules): {held}.

The sources are under the PSF License{theirs}. Of their text this
project stores the excerpts in `packaged/prompts.jsonl`, but a model trained on so little text can
repeat passages of it."""


def _packages_read(share: float) -> str:
    packages = load_packages()
    files = [file for package in packages for file in package.files]
    size = sum(len(file.text) for file in files) / 1e6
    named = ", ".join(f"{one.name} {one.version} ({one.licence})" for one in packages)
    return f"""
Beside it {len(files)} files ({size:.1f} MB) of {len(packages)} packages, from which {share:.0%} of
the rows of text come: {named}. Their metadata name permissive licences. Left out: tests, copies
that packages bring of others, generated files, tables, what is past {MOST_CHARACTERS / 1e6:.0f} MB
of a package, files that have half of their distinctive lines from files before them, and files that
have a tenth of theirs from held-out modules, or hold a tenth of one's. Versions and digests are
pinned, too.
"""


LICENCES = ", the packages' under the licences named above"


def drafter_data_section(run: Path) -> str:
    """Whose text a drafter learned from."""
    settings = settings_of(run)
    part = f"{settings['on_policy_share']:.0%}" if "on_policy_share" in settings else "Some"
    return f"""## Data

The text of `demo`, whose card says which. {part} of the rows are the target's own samples (greedy,
temperature 0.8 and 1.0), the others its training text.

Held out, never trained on: the modules that the card of `demo` names."""


def work_of(run: Path, progress: dict[str, Any]) -> str:
    """How long a run was, on what and with which versions, as its folder says."""
    made = provenance_of(run)
    versions = ", ".join(f"{name} {one}" for name, one in made.get("versions", {}).items())
    on = made.get("device", "an unknown device")
    return f"""{progress["step"]} steps, {progress["tokens"] / 1e6:.1f} M tokens,
{progress["seconds"] / 60:.1f} minutes on {on}. {versions}."""


def notes_of(notes: tuple[str, ...]) -> str:
    """Lines on how the run was done, as a list."""
    return "".join(f"- {note}\n" for note in notes)


def target_card(card: CardInput) -> str:
    """The card of `demo`, as Markdown."""
    progress, measured = newest_state(card.run)["progress"], card.measured
    bits = measured["target_bits_per_byte"]
    columns = {
        "loss": "training loss",
        "nats": "held-out loss",
        "bits_per_byte": "held-out bits/byte",
    }
    curve = loss_curve(progress["history"], columns)
    rows = [
        ("bits per byte, rows of 512 tokens", f"{bits['512']:.3f}"),
        ("bits per byte, rows of 2048 tokens", f"{bits['2048']:.3f}"),
        ("repeated 4-grams, greedy, 128 new tokens", f"{measured['repeated_4grams_greedy']:.1%}"),
        *(
            (f"repeated 4-grams, temperature {t}", f"{measured[f'repeated_4grams_at_{t}']:.1%}")
            for t in TEMPERATURES
        ),
        ("repeated 4-grams of the text itself", f"{measured['repeated_4grams_of_text']:.1%}"),
    ]
    name = settings_of(card.run).get("name", "demo")
    table = table_of(("what", "value"), rows)
    return f"""# Model card: demo

A Llama-architecture language model of Python source code, 10.98 M parameters in bfloat16 (22 MB):
24 layers x 192, 6 heads of 32 (2 key-value heads), feed-forward 512, byte-level BPE of 8000
tokens, tied embeddings, 2048 positions. It exists so that speculative decoding can be shown and
tested offline: deep and narrow, so that one of its steps costs many steps of its draft. It is a
demonstration, not an assistant: its text has the look of Python, and seldom more.

{data_section(card.run)}

## Training

`python -m tools.demo_models train {name}`: {work_of(card.run, progress)} Muon for the
matrices, AdamW for the rest; warm-up, constant rate, linear decay.
{notes_of(card.notes)}
{curve}

## Measured on the held-out modules

{table}

## Provenance

Trained from random weights by the code in `src/foretoken/training` and `tools/demo_models`; no
other model and no other data took part. License of the weights: Apache-2.0, as the project.
"""


def draft_card(card: CardInput) -> str:
    """The card of `demo-draft`, as Markdown."""
    progress, measured = newest_state(card.run)["progress"], card.measured
    plain, edits, cost = measured["functions"], measured["edits"], measured["step_milliseconds"]
    columns = {
        "loss": "divergence",
        "agreement": "greedy agreement",
        "tokens_a_step": "tokens a step, k = 5",
        "edit_tokens_a_step": "the same, edits",
    }
    rows = [
        ("greedy agreement", f"{plain['agreement']:.1%}", f"{edits['agreement']:.1%}"),
        ("tokens a step, k = 5", f"{plain['length']:.2f}", f"{edits['length']:.2f}"),
        ("1 - TV at temperature 0.8", f"{plain['overlap']:.3f}", f"{edits['overlap']:.3f}"),
    ]
    table = table_of(("what", "functions to complete", "code to edit"), rows)
    name = settings_of(card.run).get("name", "demo-draft")
    return f"""# Model card: demo-draft

The draft model of `demo`: the same vocabulary and widths, one layer, 1.93 M parameters in bfloat16
(3.9 MB). It first had the target's embedding, last norm and last layer, and was distilled from
the target's full distributions.

{drafter_data_section(card.run)}

## Training

`python -m tools.demo_models train {name} --target DEMO`: {work_of(card.run, progress)} The loss is
half forward KL divergence and half total variation.
{notes_of(card.notes)}
{loss_curve(progress["history"], columns)}

## Measured against `demo` on prompts from the held-out modules

24 prompts each, 128 new tokens, greedy, bfloat16 weights computed in float32; tokens a step is the
teacher-forced count with k = 5 draft tokens, the token of the target itself included.

{table}

Bits per byte of the draft alone: {measured["draft_bits_per_byte"]["512"]:.3f}. One decoding step of
the training code (not of the engine) took {cost["target"]:.2f} ms for the target and
{cost["draft"]:.2f} ms for the draft.

## Provenance

Distilled from `demo` by the code in `src/foretoken/training` and `tools/demo_models`; no other
model and no other data took part. License of the weights: Apache-2.0, as the project.
"""


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
