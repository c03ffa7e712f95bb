"""The kinds of training runs: which method each makes a drafter of, and what trains it. Torch-free.

The module of a kind has a `KIND` (`foretoken.training.heads.kind`).
"""

from dataclasses import dataclass

from foretoken.config.method_registry import DraftingMethod, known_methods


@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A kind of training run. That of a method of your own is one of its `extras`."""

    kind: str
    """Its word in the `[head]` table of a training config."""
    command: str
    """Its word after `foretoken train`."""
    summary: str
    """What is trained, in a few words."""
    code: str
    """Dotted path of the module that trains it."""
    formats: tuple[str, ...] = ()
    """Published formats that it can be written in, beside its own."""


def _row(
    method: str, command: str, summary: str, *formats: str, kind: str = ""
) -> tuple[str, Trained]:
    code = f"foretoken.training.heads.{command}"
    found = Trained(
        kind=kind or command, command=command, summary=summary, code=code, formats=formats
    )
    return method, found


_ROWS = (
    _row("draft_model", "draft", "a small Llama that learns what the target says", "vllm"),
    _row(
        "parallel", "pard", "a draft model that guesses all its tokens in one pass (PARD)", "vllm",
        kind="parallel",
    ),
    _row(
        "eagle", "eagle", "an EAGLE head (1 and 2) over the target's last features",
        "vllm", "eagle",
    ),
    _row(
        "eagle3", "eagle3", "an EAGLE-3 head, by its training-time test",
        "speculators", "vllm", "eagle",
    ),
    _row(
        "eagle3", "peagle",
        "a P-EAGLE head, an EAGLE-3 network that guesses all tokens in one pass",
        "speculators", "vllm",
    ),
    _row("mlp", "mlp", "an MLP speculator"),
    _row("medusa", "medusa", "Medusa heads over the target's own output head"),
    _row(
        "dflash", "dflash", "a DFlash head, which fills in a block of drafts by one pass",
        "speculators", "vllm", "sglang",
    ),
    _row(
        "dspark", "dspark",
        "a DSpark head, whose drafts follow one another in a block and are judged",
        "speculators", "vllm", "sglang",
    ),
)  # fmt: skip


def kinds_of(method: DraftingMethod) -> tuple[Trained, ...]:
    """The kinds of runs that train a method."""
    own = (one for one in method.extras if isinstance(one, Trained))
    return (*(kind for name, kind in _ROWS if name == method.name), *own)


def shipped_kinds() -> tuple[Trained, ...]:
    """Those that come with Foretoken; no installed package is imported for them."""
    return tuple(kind for _, kind in _ROWS)


def trained_kinds() -> dict[str, Trained]:
    """All kinds, those of installed packages included, by their word in a training config."""
    return {kind.kind: kind for method in known_methods() for kind in kinds_of(method)}
