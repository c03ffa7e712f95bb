"""Cards hold the run's own numbers."""

from pathlib import Path

import pytest
import torch

from foretoken.errors import ConfigError
from foretoken.training import run_folder
from tools.demo_models import card
from tools.demo_models.card import CardInput, draft_card, target_card, thin
from tools.demo_models.head_card import head_card
from tools.demo_models.packages import Package
from tools.python_text.stdlib import SourceFile

PART = {"agreement": 0.61, "length": 2.71, "overlap": 0.582}
MEASURED = {
    "target_bits_per_byte": {"512": 1.234, "2048": 1.111},
    "draft_bits_per_byte": {"512": 2.345},
    "repeated_4grams_greedy": 0.25,
    "repeated_4grams_at_0.7": 0.075,
    "repeated_4grams_at_0.8": 0.05,
    "repeated_4grams_of_text": 0.025,
    "functions": PART,
    "edits": {**PART, "length": 3.33},
    "step_milliseconds": {"target": 12.5, "draft": 1.25},
}
RECORD = {
    "step": 100, "tokens": 819200, "minutes": 4, "loss": 4.567, "nats": 4.321,
    "bits_per_byte": 1.543, "agreement": 0.5, "tokens_a_step": 2.2, "edit_tokens_a_step": 2.1,
}  # fmt: skip


@pytest.mark.slow
def test_cards(tmp_path: Path) -> None:
    progress = {"step": 100, "tokens": 819200, "seconds": 240.0, "history": [RECORD]}
    run_folder.save(tmp_path, 100, {"progress": progress})
    given = CardInput(run=tmp_path, measured=MEASURED, notes=("resumed twice",))
    target, draft = target_card(given), draft_card(given)
    for piece in ("| 1.234 |", "| 25.0% |", "4.321", "- resumed twice", "`textwrap.py`"):
        assert piece in target, piece
    for piece in ("| 2.71 | 3.33 |", "61.0%", "12.50 ms", "2.345", "- resumed twice"):
        assert piece in draft, piece


@pytest.mark.slow
def test_a_card_tells_the_run_and_what_packages_were_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = SourceFile(path="inner.py", text="x = 1\n" * 200_000, is_test=False)
    package = Package(name="outer", version="1.5", licence="MIT", files=(file,))
    monkeypatch.setattr(card, "load_packages", lambda: (package,))
    monkeypatch.setattr(run_folder, "device_name", lambda: "a large GPU")
    progress = {"step": 200, "tokens": 1638400, "seconds": 60.0, "history": [RECORD]}
    run_folder.save(tmp_path, 200, {"progress": progress})
    settings = {"seed": 0, "name": "demo-more", "package_share": 0.6}
    run_folder.write_provenance(tmp_path, settings, "data")
    told = " ".join(target_card(CardInput(run=tmp_path, measured=MEASURED)).split())
    pieces = ("train demo-more`: 200 steps", "1.0 minutes on a large GPU", "torch ", "| 7.5% |")
    for piece in (*pieces, "outer 1.5 (MIT)", "1 files (1.2 MB) of 1 packages", "60% of"):
        assert piece in told, piece


def test_thin_keeps_the_last() -> None:
    records = [{"step": float(i)} for i in range(50)]
    kept = thin(records)
    assert len(kept) <= 12 and kept[-1] == records[-1]
    assert thin(records[:3]) == records[:3]


@pytest.mark.parametrize("kind", ["eagle3", "mlp", "medusa", "parallel", "dflash", "dspark"])
def test_cards_of_heads(tmp_path: Path, kind: str) -> None:
    record = {**RECORD, "depth_1": 0.712, "depth_2": 0.533}
    progress = {"step": 100, "tokens": 819200, "seconds": 240.0, "history": [record]}
    head = {"kind": kind, "depth": 2, "depth_decay": 0.8}
    state = {"progress": progress, "kind": kind, "head": head, "model": {"w": torch.zeros(1000, 9)}}
    run_folder.save(tmp_path, 100, state)
    found = {"by_position": [0.61, 0.42], "lengths": [1.61, 2.03], "num_verifications": 50}
    costs = [
        {"drafts": k, "total_s": 0.004, "drafting_s": 0.001, "verifying_s": 0.003} for k in range(3)
    ]
    measured = {"acceptance": {"0": found}, "costs": costs, "speedups": {"0": [1.31, 1.52]}}
    card = head_card(CardInput(run=tmp_path, measured=measured, notes=("short",)), f"demo-{kind}")
    config = "pard" if kind == "parallel" else kind
    for piece in (
        f"# Model card: demo-{kind}",
        f"tools.demo_models train demo-{config} ",
        "| 0 | 2.03 | 0.61 0.42 |",
        "| 2 | 4.00 | 1.00 | 1.52 |",
        "0.712 | 0.533",
        "- short",
        "card of `demo`",
        "0.01 M parameters",
    ):
        assert piece in card, piece


def test_the_card_of_a_draft_says_whose_text_it_learned_from(tmp_path: Path) -> None:
    progress = {"step": 100, "tokens": 819200, "seconds": 240.0, "history": [RECORD]}
    run_folder.save(tmp_path, 100, {"progress": progress})
    settings = {"seed": 0, "name": "demo-small", "on_policy_share": 0.6}
    run_folder.write_provenance(tmp_path, settings, "data")
    told = " ".join(draft_card(CardInput(run=tmp_path, measured=MEASURED)).split())
    for piece in ("train demo-small --target", "60% of the rows", "the card of `demo`"):
        assert piece in told, piece


def test_a_card_needs_a_run_of_a_head(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="RUN: "):
        head_card(CardInput(run=tmp_path, measured={}), "x")
