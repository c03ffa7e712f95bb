"""A kind of drafter that can be trained is one record in the table of methods."""

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from foretoken.cli.app import app
from foretoken.config import methods
from foretoken.config.methods import DraftingMethod, Trained, register_method, trained_kinds
from foretoken.errors import ConfigError
from foretoken.proposers.heads.folder import method_of, read_head
from foretoken.testing import write_tiny_llama
from foretoken.training.heads import mlp
from foretoken.training.heads.kind import HeadKind, find_kind
from foretoken.training.runs import train
from tests.unit.training.own_runs import silent, write_config

KIND = mlp.KIND
"""What the record below names: this module trains toys, as MLP speculators are trained."""

TOY = DraftingMethod(
    name="toy",
    summary="a method of a package of its own",
    source="this test",
    drafts_with="head",
    trained=(Trained(kind="toy", command="toy", summary="a toy", code=__name__),),
)


@pytest.mark.parametrize("word", trained_kinds())
def test_every_record_names_a_module_that_trains(word: str) -> None:
    assert isinstance(find_kind(word), HeadKind)


def test_a_kind_is_one_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its config is read; it learns, is measured and written."""
    monkeypatch.setattr(methods, "_table", dict(methods._table))
    target = write_tiny_llama(tmp_path / "target", seed=2)
    with pytest.raises(ConfigError, match=r"head\.kind: got 'toy'"):
        train(write_config(tmp_path, "toy", steps=2), tmp_path / "run", target, silent)
    register_method(TOY)
    config = write_config(tmp_path, "toy", steps=2)
    done = train(config, tmp_path / "run", target, silent, kind="toy", export="own")
    assert done.step == 2 and "depth_3" in done.history[-1]
    assert method_of(read_head(tmp_path / "run" / "export")) == "mlp", "written as MLPs are"


def test_a_registered_kind_has_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(methods, "_table", dict(methods._table))
    assert said("toy").exit_code == 2 and "No such command 'toy'" in said("toy").output
    register_method(TOY)
    assert "Train a toy." in said("toy", "--help").output
    assert "Train a toy." in said("--help").output


@pytest.mark.parametrize(
    ("word", "instead"),
    [
        ("parallel", "pard, which train parallel"),
        ("ngram", "ngram has no weights"),
        ("mtp", "the record of mtp names no training"),
    ],
)
def test_a_method_without_a_command_says_why(word: str, instead: str) -> None:
    result = said(word)
    assert result.exit_code == 2 and f"got '{word}'; allowed: " in result.output
    assert instead in result.output


def said(*words: str) -> Result:
    return CliRunner().invoke(app, ["train", *words])
