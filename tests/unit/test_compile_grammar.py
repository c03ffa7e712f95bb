"""The child that compiles grammars first. The guarded bugs: a child that outlives its owner, an
owner that waits for a child which has ended."""

import json
import select
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from functools import partial
from typing import Any

import llguidance
import pytest

from foretoken.checkpoint import packaged_model
from foretoken.errors import ForetokenError, ParameterError
from foretoken.runtime import compile_grammar as compiling
from foretoken.runtime.compile_grammar import GrammarTokenizer, TrialCompiler, compile_grammar
from foretoken.text.tokenizer import Tokenizer


@pytest.fixture(scope="module")
def tokenizer() -> GrammarTokenizer:
    text = Tokenizer(packaged_model("demo")).to_json()
    return GrammarTokenizer(tokenizer_json=text, vocab_size=8000, eos_ids=(1,))


@pytest.fixture
def compiler(tokenizer: GrammarTokenizer) -> Iterator[TrialCompiler]:
    found = TrialCompiler(tokenizer)
    yield found
    found.stop()


def order(kind: str, source: str) -> str:
    return json.dumps({"kind": kind, "source": source, "compact": False}) + "\n"


def test_it_answers_line_by_line_and_ends_with_its_owner(tokenizer: GrammarTokenizer) -> None:
    """The end of its input is all that a child hears of an owner that was killed."""
    orders = json.dumps(asdict(tokenizer)) + "\n"
    orders += order("regex", "a+") + order("json", '{"type": 3}') + order("regex", "b")
    done = subprocess.run(
        [sys.executable, "-P", "-m", compiling.__name__],
        input=orders,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 0
    ready, fine, wrong, fine_again = map(json.loads, done.stdout.splitlines())
    assert (ready, fine, fine_again) == (None, None, None)
    assert wrong.startswith("what llguidance can follow") or "type" in wrong


@pytest.mark.parametrize(
    ("kind", "source"), [("json", "{"), ("grammar", "start: missing"), ("regex", "(")]
)
def test_what_is_wrong_is_said_with_the_parameter(kind: str, source: str) -> None:
    tokenizer: Any = llguidance.LLTokenizer("byte")
    with pytest.raises(ParameterError, match=rf"structured_outputs\.{kind}"):
        compile_grammar(kind, source, False, tokenizer)


def test_a_child_that_was_killed_is_replaced(compiler: TrialCompiler) -> None:
    """Killed as it is asked, as by the kernel, short of memory: that request alone is refused."""
    compiler.check("regex", "a+", False)
    child = compiler._child
    assert child is not None
    child.kill()
    child.wait()
    assert compiling._ask(child, b"{}\n" * 100_000) == b""
    compiler.check("regex", "b+", False)
    assert compiler._child is not None and compiler._child.pid != child.pid


def test_no_process_is_not_the_clients_fault(
    compiler: TrialCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.executable", "/nowhere/python")
    with pytest.raises(ForetokenError, match="no process to compile grammars in"):
        compiler.check("regex", "a+", False)


def test_it_knows_the_tokens_of_the_engine(
    compiler: TrialCompiler, tokenizer: GrammarTokenizer
) -> None:
    """What the trial says of a grammar is what compiling it says."""
    for compiled in (compiler.check, partial(compile_grammar, tokenizer=tokenizer.load())):
        for legal in ("<[300]>", "<[7999]>", '<[0-9]> "a"', '<s> "a"', '"a" </s>'):
            compiled("grammar", f"start: {legal}", False)
        for illegal in ("<[8000]>", "<[7-8000]>", '<|tool|> "a"', '"a" <nope>'):
            with pytest.raises(ParameterError, match="[Tt]oken"):
                compiled("grammar", f"start: {illegal}", False)


def test_a_tokenizer_that_cannot_be_read_is_said() -> None:
    text = json.loads(Tokenizer(packaged_model("demo")).to_json())
    del text["decoder"]
    wrong = GrammarTokenizer(tokenizer_json=json.dumps(text), vocab_size=8000, eos_ids=(1,))
    with pytest.raises(ParameterError, match="tokenizer llguidance can read"):
        wrong.load()


@pytest.mark.parametrize("started", [True, False], ids=["running", "starting"])
def test_an_answer_that_was_not_waited_for_is_nobodys(
    compiler: TrialCompiler, started: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C while a grammar compiles: the next one got its verdict."""

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    if started:
        compiler.check("regex", "a+", False)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(select, "select", interrupt)
        compiler.check("regex", "a+", False)
    with pytest.raises(ParameterError, match="regex"):
        compiler.check("regex", "(", False)
    compiler.check("regex", "b+", False)
