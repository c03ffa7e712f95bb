"""How the packaged models are made: the rows they learn from, and the command from end to end."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from foretoken.errors import ConfigError
from foretoken.kv.features import FINAL
from foretoken.training.heads.export import export_run
from foretoken.training.llama import Llama
from foretoken.training.loop import Job
from foretoken.training.losses import Head, distance
from foretoken.training.ranks import Ranks
from foretoken.training.schedule import Stage
from tests.unit.training import tiny
from tools.demo_models import manifest, pool
from tools.demo_models.__main__ import app
from tools.demo_models.acceptance import GreedyRun, measure, tokens_per_step
from tools.demo_models.batches import Batch
from tools.demo_models.distill import begin_with_last_layers
from tools.demo_models.heads import CaptureSource, require_answers
from tools.demo_models.pool import SamplePool
from tools.demo_models.recipe import CONFIGS, Recipe, read_recipe
from tools.demo_models.sampling import Sampling, generate
from tools.python_text import stdlib
from tools.python_text.stdlib import Corpus, SourceFile

TINY = """
target = "nowhere"
max_steps = 2
batch_tokens = 256
micro_tokens = 128
warmup_steps = 1
compile = false
precision = "float32"
{keys}

[shape]
vocab_size = 2000
hidden_size = 24
layers = {layers}
heads = 4
kv_heads = 2
ffn_size = 32
max_positions = 2048

[[stages]]
until = 1.0
length = 128

{head}
"""
HEAD = """
[head]
kind = "mlp"
depth = 2
inner_size = 16
"""
SOURCES = (
    "argparse.py", "ast.py", "difflib.py", "inspect.py", "optparse.py", "pickle.py", "tarfile.py",
    "configparser.py", "fractions.py", "functools.py", "shlex.py", "tempfile.py", "uuid.py",
)  # fmt: skip
"""The last six are held out."""


@pytest.fixture
def small_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A standard library of a few modules, for whoever asks for this interpreter's own."""
    root, real = tmp_path / "library", stdlib.stdlib_path()
    root.mkdir()
    for name in SOURCES:
        (root / name).write_text((real / name).read_text("utf-8"), "utf-8")
    monkeypatch.setattr(stdlib, "stdlib_path", lambda: root)
    for cached in (stdlib.load_corpus, stdlib.held_out_files):
        cached.cache_clear()
    yield root
    for cached in (stdlib.load_corpus, stdlib.held_out_files):
        cached.cache_clear()


@pytest.mark.slow
def test_the_command_makes_a_model_its_draft_and_a_head(
    small_library: Path, tmp_path: Path
) -> None:
    """Trained, exported and described, all on rows of the small library."""

    def run(*words: str) -> str:
        done = CliRunner().invoke(app, list(words), catch_exceptions=False)
        assert done.exit_code == 0, done.output
        return done.output

    kinds = {
        "lm": TINY.format(keys="", layers=2, head="").replace('target = "nowhere"\n', ""),
        "draft": TINY.format(keys="pool_tokens = 1", layers=1, head=""),
        "head": TINY.format(keys="pool_tokens = 1", layers=1, head=HEAD),
    }
    for name, text in kinds.items():
        (tmp_path / f"{name}.toml").write_text(text)
        more = [] if name == "lm" else ["--target", str(tmp_path / "lm")]
        said = run("train", str(tmp_path / f"{name}.toml"), "--out", str(tmp_path / name), *more)
        assert "done: 2 steps" in said and ("sampled" in said) == (name != "lm")
        export_run(tmp_path / name, tmp_path / f"{name}-model", verifier="lm")
    numbers = tmp_path / "numbers.json"
    run("measure", str(tmp_path / "lm-model"), str(tmp_path / "draft-model"), "--out", str(numbers))
    for name, title in {"lm": "demo", "draft": "demo-draft"}.items():
        run("card", str(tmp_path / name), str(numbers), str(tmp_path / "card.md"))
        assert f"# Model card: {title}\n" in (tmp_path / "card.md").read_text()


def test_a_manifest_names_what_differs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(manifest, "MANIFESTS", tmp_path)
    files = [SourceFile(path=f"{n}.py", text=f"x = {n}\n", is_test=False) for n in range(4)]
    corpus = Corpus(training=tuple(files[:3]), held_out=tuple(files[3:]))
    assert len(manifest.digests(corpus)["0.py"]) == 12
    assert manifest.difference(corpus) is None
    manifest.write_manifest(corpus)
    assert manifest.difference(corpus) == manifest.Difference(missing=(), added=(), changed=())
    other = replace(files[0], text="y = 1\n")
    changed = manifest.difference(Corpus(training=(other,), held_out=corpus.held_out))
    assert changed is not None
    assert changed.changed == ("0.py",) and changed.missing == ("1.py", "2.py")


def test_drafters_for_the_packaged_target_say_what_comes_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which data, then compilation, then the network is built: compiling starts in there."""
    lines: list[str] = []
    for name in ("copy_tokenizer", "grow_pool", "write_provenance", "corpus_digest"):
        monkeypatch.setattr(pool, name, lambda *_: None)

    def build(*_: object) -> Job:
        assert len(lines) == 1 and "compiling" in lines[0]
        return tiny.tiny_job()

    settings = tiny.tiny_settings(target=str(tmp_path), compile=True, max_steps=2)
    recipe = Recipe(settings=settings)
    done = pool.train_on_target(recipe, tmp_path / "run", lines.append, build, Ranks())
    assert done.step == 2


def test_samples_of_a_packaged_target_must_fill_a_stage_of_answers(tmp_path: Path) -> None:
    pool = SamplePool.__new__(SamplePool)
    pool._parts = []
    with pytest.raises(ConfigError, match=r"stages\.rows"):
        require_answers((Stage(until=1.0, length=512, rows="answers"),), pool)
    pool._parts = [torch.zeros(2, 513).numpy()]
    with pytest.raises(ConfigError, match=r"stages\.length"):
        require_answers((Stage(until=1.0, length=1024, rows="answers"),), pool)
    require_answers((Stage(until=1.0, length=512, rows="answers"),), pool)


class _Sevens:
    """Training text of one token."""

    def batch(self, _: int, tokens: int, length: int) -> Batch:
        rows = torch.full((tokens // length, length), 7)
        return Batch(rows, rows)


class _Nines:
    """A target that says one token."""

    tokens = 1000

    def rows(self, count: int, length: int, _: int) -> torch.Tensor:
        return torch.full((count, length), 9)


def test_a_packaged_target_has_text_answers_or_both() -> None:
    torch.manual_seed(0)
    target = Llama(tiny.SHAPE).requires_grad_(False)
    source = CaptureSource(
        target,
        _Sevens(),  # type: ignore[arg-type]
        _Nines(),  # type: ignore[arg-type]
        points=(FINAL,),
        on_policy_share=0.5,
        precision="float32",
    )
    wanted = {None: [9, 9, 7, 7], "text": [7] * 4, "answers": [9] * 4}
    for rows, firsts in wanted.items():
        found = source.batch(0, 64, Stage(until=1.0, length=16, rows=rows))
        assert found.tokens_BT[:, 0].tolist() == firsts and found.tokens_BT.shape == (4, 16)


def test_distillation_brings_the_draft_closer() -> None:
    torch.manual_seed(0)
    target = Llama(tiny.SHAPE)
    torch.nn.init.normal_(target.embed_tokens.weight, std=0.3)
    target.requires_grad_(False)
    settings = tiny.tiny_settings(shape=replace(tiny.SHAPE, layers=1))
    draft = Llama(settings.shape)
    begin_with_last_layers(draft, target)
    assert torch.equal(draft.embed_tokens.weight, target.embed_tokens.weight)
    ours, theirs = draft.state_dict(), target.state_dict()
    assert torch.equal(
        ours["layers.0.self_attn.q_proj.weight"], theirs["layers.1.self_attn.q_proj.weight"]
    )
    optimizer = torch.optim.AdamW(draft.parameters(), lr=3e-3)
    losses = []
    for _ in range(60):
        tokens = torch.randint(0, 64, (8, 16))
        wanted = Head(target.hidden(tokens).flatten(0, 1), target.embed_tokens.weight)
        mine = Head(draft.hidden(tokens).flatten(0, 1), draft.embed_tokens.weight)
        loss = distance(mine, wanted, 0.5).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert sum(losses[-10:]) < 0.7 * sum(losses[:10]), losses


def test_a_draft_of_another_width_is_refused() -> None:
    shape = replace(tiny.SHAPE, hidden_size=16)
    with pytest.raises(ConfigError, match=r"shape\.hidden_size"):
        begin_with_last_layers(Llama(shape), Llama(tiny.SHAPE))


def test_tokens_per_step() -> None:
    agree = torch.tensor([[True] * 6, [False] * 6])
    assert tokens_per_step(agree, 5) == pytest.approx(12 / 7)
    assert tokens_per_step(agree[1:], 5) == 1.0
    assert tokens_per_step(agree[:1], 2) == 3.0


def test_a_target_agrees_with_itself() -> None:
    torch.manual_seed(0)
    target = Llama(tiny.SHAPE)
    tokens = torch.randint(0, 64, (2, 24))
    with torch.inference_mode():
        logits = target.logits(target.hidden(tokens[:, :-1]))
    tokens = torch.cat((tokens[:, :8], logits[:, 7:].argmax(-1)), dim=1)
    with torch.inference_mode():
        logits = target.logits(target.hidden(tokens[:, :-1]))[:, 7:]
    run = GreedyRun(tokens=tokens, prompt_tokens=8, logits=logits)
    found = measure(target, run)
    assert found.overlap == pytest.approx(1.0, abs=1e-5)
    assert 0 < found.agreement <= 1


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("*.toml")), ids=lambda path: path.stem)
def test_every_config_is_valid(path: Path) -> None:
    recipe = read_recipe(path.stem, Path("elsewhere"))
    assert recipe.settings.name == path.stem and recipe.settings.target == "elsewhere"
    assert recipe.as_record()["edit_share"] == recipe.mix.edit_share > 0.1
    assert (recipe.pool_tokens > 0) == (path.stem != "demo")
    assert recipe.as_record()["loaders"] == recipe.loaders


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("edit_share = 2", "edit_share"),
        ("colour = 1", "colour"),
        ("pool_rows = 0", "pool_rows: got 0"),
        ("test_share = 0.5\npackage_share = 0.6", r"test_share \+ package_share"),
    ],
)
def test_a_wrong_config_names_the_key(tmp_path: Path, text: str, field: str) -> None:
    (tmp_path / "run.toml").write_text(text)
    with pytest.raises(ConfigError, match=field):
        read_recipe(tmp_path / "run.toml")
    with pytest.raises(ConfigError, match="CONFIG"):
        read_recipe("no-such-config")


def test_cached_generation_equals_full_passes() -> None:
    torch.manual_seed(1)
    model = Llama(tiny.SHAPE).eval()
    prompts = torch.randint(0, 64, (3, 5))
    tokens = generate(model, prompts, Sampling(new_tokens=20))
    with torch.inference_mode():
        again = model.logits(model.hidden(tokens[:, :-1]))[:, 4:].argmax(dim=-1)
    assert tokens.shape == (3, 25)
    assert torch.equal(tokens[:, 5:], again)
