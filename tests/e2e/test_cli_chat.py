"""`foretoken chat`: what is said before counts, and nothing of it is lost, dropped or made up."""

import json
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from foretoken import LLM, SamplingParams
from foretoken.checkpoint import packaged_model
from foretoken.cli.app import app
from foretoken.cli.chat import COMMANDS, Conversation, Terminal
from foretoken.cli.writing import Screen, write_plain
from foretoken.testing import write_tiny_llama
from foretoken.types import Output
from tests.golden.gguf_files import write_gguf
from tests.guards.sources import ROOT
from tests.unit.gguf_tokens import add_fields, fields_of, train

GREEDY = SamplingParams(max_tokens=12, temperature=0.0)
TURNS = ("import os", "def add(a, b):")
TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"
)


def run(*arguments: str, stdin: str = "") -> Result:
    return CliRunner().invoke(app, ["chat", *arguments], input=stdin)


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    settings: dict[str, Any] = {"max_num_seqs": 1, "batch_invariant": True, "max_model_len": 128}
    with LLM("demo", **settings) as made:
        yield made


@pytest.fixture(scope="module")
def expected(llm: LLM) -> list[str]:
    messages: list[dict[str, str]] = []
    for turn in TURNS:
        messages.append({"role": "user", "content": turn})
        [found] = llm.chat(messages, GREEDY, use_tqdm=False)
        messages.append({"role": "assistant", "content": found.outputs[0].text})
    return [message["content"] for message in messages[1::2]]


@pytest.mark.parametrize("way", [[], pytest.param(["--draft", "demo-draft"], id="draft")])
def test_piped_lines_are_turns_and_answers_alone_are_written(
    expected: list[str], way: list[str]
) -> None:
    options = ["--max-tokens", "12", "--batch-invariant", "on", *way]
    result = run("demo", *options, stdin=f"{TURNS[0]}\n\n{TURNS[1]}\n")
    assert result.exit_code == 0, result.output
    assert result.stdout == "".join(f"{text}\n" for text in expected)


def test_a_turn_computes_only_what_is_new(llm: LLM, expected: list[str]) -> None:
    talk = Conversation(llm, GREEDY, "Answer at length. " * 8)
    talk.ask(TURNS[0], write_plain)
    first, page = talk.num_prompt_tokens, llm.config.block_size
    metrics = talk.ask(TURNS[1], write_plain).metrics
    assert metrics is not None and metrics.num_cached_tokens >= first // page * page > 0
    assert "of them computed before" in talk.describe_all()


def test_a_model_without_a_template(tmp_path: Path) -> None:
    for file in packaged_model("demo").iterdir():
        (tmp_path / file.name).symlink_to(file)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    del config["chat_template"]
    (tmp_path / "tokenizer_config.json").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    result = run(str(tmp_path), stdin="a\n")
    assert result.exit_code == 2 and result.stdout == ""
    assert re.fullmatch(
        r"foretoken: MODEL: .*chat template.*`foretoken generate`.*\n", result.stderr
    )


def test_a_full_context_is_said_and_nothing_is_dropped() -> None:
    options = ["--max-model-len", "64", "--ignore-eos"]
    result = run("demo", *options, stdin="first\nsecond\n")
    assert result.exit_code == 2 and result.stdout.count("\n") >= 1
    assert re.search(
        r"^foretoken: the conversation: .*max_model_len 64.*/clear", result.stderr, re.M
    )


def test_two_ways_to_say_how_to_draft() -> None:
    result = run("demo", "--draft", "demo-draft", "--speculative-config", "none")
    assert result.exit_code == 2 and "--draft" in result.stderr


def typed(llm: LLM, monkeypatch: pytest.MonkeyPatch, lines: list[Any], **params: Any) -> Any:
    """A terminal in which these lines are typed, or keys pressed, one after the other."""
    coming = iter(lines)

    def answer(prompt: str) -> str:
        line = next(coming, EOFError())
        if isinstance(line, BaseException):
            raise line
        return str(line)

    monkeypatch.setattr("builtins.input", answer)
    made = SamplingParams(**{"max_tokens": 12, "temperature": 0.0, **params})
    talk = Conversation(llm, made, None)
    terminal = Terminal(talk, Screen(llm))
    terminal.run()
    assert next(coming, None) is None, "it ended too early"
    return talk


def test_a_conversation_in_a_terminal(
    llm: LLM,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    talk = typed(
        llm, monkeypatch, [*TURNS, "/stats", "/clear", TURNS[0], "/help", "/what", "/quit"]
    )
    shown = capsys.readouterr().out
    first, second, again = shown.split("a new conversation")[0], shown, shown.split("a new conv")[1]
    assert expected[0] in first and expected[1] in second and expected[0] in again
    assert shown.count("12 tokens, ") == 3 and "first token" in first
    assert "2 answers, 24 tokens" in shown and "there is no /what" in shown
    assert all(f"{name} " in shown for name in COMMANDS)
    assert len(talk.answers) == 3


def test_instructions_are_changed(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    talk = typed(llm, monkeypatch, ["/system be short", "/usr/bin is what?"])
    assert talk.system == "be short" and len(talk.answers) == 1, "a path is no command"
    assert typed(llm, monkeypatch, ["/system a", "/system"]).system is None


def test_ctrl_c_ends_an_answer_which_stands_as_far_as_it_came(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    show, came = Screen.show, []

    def broken(screen: Screen, outputs: Iterator[Output]) -> None:
        def some() -> Iterator[Output]:
            for output in outputs:
                came.append(output.text)
                yield output
                if len(came) == 3:
                    raise KeyboardInterrupt

        show(screen, some())

    monkeypatch.setattr(Screen, "show", broken)
    talk = typed(llm, monkeypatch, [TURNS[0], TURNS[1]])
    assert not llm._engine.has_unfinished
    kept = talk._turns[1]["content"]
    assert kept == "".join(came[:3]) and "broken off" in capsys.readouterr().out
    messages = talk._turns[:3]
    [found] = llm.chat(messages, GREEDY, use_tqdm=False)
    assert talk._turns[3]["content"] == found.outputs[0].text


def test_ctrl_c_at_the_prompt_ends_when_it_comes_twice(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    key = KeyboardInterrupt()
    typed(llm, monkeypatch, [key, "/stats", key, key])
    assert capsys.readouterr().out.count("once more ends") == 2


def test_what_cannot_be_answered_is_not_said(
    llm: LLM, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    talk = typed(llm, monkeypatch, ["long " * 300, TURNS[0]], max_tokens=None, ignore_eos=True)
    shown = capsys.readouterr().out
    assert "foretoken: the conversation: " in shown and "max_model_len 128" in shown
    assert talk._turns[0]["content"] == TURNS[0] and len(talk._turns) == 2
    assert "the context is full: /clear begins a new conversation" in shown


def test_a_gguf_file(tmp_path: Path) -> None:
    """Its own template and ends; `generate` takes it before its prompt."""
    tokenizer = train(
        {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}
    )
    fields = fields_of(tokenizer, "gpt-2") | {"chat_template": TEMPLATE, "bos_token_id": None}
    folder = write_tiny_llama(tmp_path / "model", vocab_size=len(fields["tokens"]))
    path = str(write_gguf(folder, "llama", lambda writer, _: add_fields(writer, fields)))
    result = run(path, "--max-tokens", "5", stdin="hello\nagain\n")
    assert result.exit_code == 0, result.output
    options = ["--max-tokens", "5"]
    written = CliRunner().invoke(app, ["generate", path, "user: hello\n", *options])
    assert written.exit_code == 0, written.output
    assert written.stdout and result.stdout.startswith(written.stdout)
    asked = CliRunner().invoke(app, ["generate", path, *options], input="user: hello\n")
    assert asked.stdout == written.stdout
    shutil.rmtree(folder)


@pytest.mark.slow
def test_in_a_real_terminal() -> None:
    """Colours, Ctrl-C while it writes, and the end."""
    ours, theirs = pty.openpty()
    command = [sys.executable, "-m", "foretoken", "chat", "demo", "--ignore-eos"]
    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src"), "TERM": "xterm-256color"},
        start_new_session=True,
        preexec_fn=lambda: _own_terminal(theirs),
    )
    os.close(theirs)
    seen = b""

    def wait_for(words: str, start: int = 0) -> int:
        nonlocal seen
        end = time.monotonic() + 100
        while (found := re.compile(words.encode()).search(seen, start)) is None:
            assert time.monotonic() < end, seen
            if select.select([ours], [], [], 1)[0]:
                seen += os.read(ours, 4096)
        return found.end()

    try:
        at = wait_for("> ")
        os.write(ours, b"def f(x):\r")
        at = wait_for("\x1b\\[32m", at)
        os.write(ours, b"\x03")
        at = wait_for("broken off|once more ends", at)  # the latter if the answer was quicker
        wait_for("> ", at)
        os.write(ours, b"\x04")
        assert process.wait(100) == 0
    finally:
        process.kill()
        process.wait()
        os.close(ours)


def _own_terminal(descriptor: int) -> None:
    """Make it the one that Ctrl-C comes from."""
    import fcntl
    import termios

    fcntl.ioctl(descriptor, termios.TIOCSCTTY, 0)
