"""The processes that fill chat templates. The guarded bugs: a template that never ends or takes all
memory, one render that holds up the others, a process that outlives its owner or has its keys."""

import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from foretoken.errors import ForetokenError, PromptError
from foretoken.text import renderers as rendering
from foretoken.text.chat_template import ChatTemplate
from foretoken.text.renderers import ANSWER, MOST_RENDERS, ORDER, Renderers, order_of

ENDLESS = "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}"
PLAIN = order_of("{{ messages[0].content }}", {"messages": [{"content": "hi"}]})
NEVER = order_of(ENDLESS, {"messages": []})


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No render is ended because of the time that it takes."""
    monkeypatch.setattr(rendering, "most_seconds", lambda _: 1e6)
    monkeypatch.setattr(rendering, "_MOST_WAITED_S", 1e6)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every render is soon ended that takes long."""
    monkeypatch.setattr(rendering, "most_seconds", lambda _: 0.1)


def only_process(renderers: Renderers) -> Any:
    [process] = renderers._idle
    return process


@pytest.mark.usefixtures("hasty")
@pytest.mark.parametrize(
    "source",
    [
        ENDLESS,
        "{{ 10 ** (10 ** 10) }}",
        "{{ 'ab'.split('x', 1)[0] | center(99999999) | wordwrap(1) }}",
        "{% set ns = namespace(a=[]) %}{% for i in range(99999) %}{% set ns.a = [ns.a, ns.a] %}"
        "{% endfor %}{{ ns.a }}",
        "{{ 'a' * 30000000000 }}",
        "{{ 'a' * 400000000 }}",
        "{{ 'a' * 40000000 }}",
    ],
)  # fmt: skip
def test_no_template_takes_all_time_or_memory(source: str) -> None:
    """The third way is a search: whichever bound it meets first, it meets one."""
    template = ChatTemplate({"default": source}, {})
    chat = [{"role": "user", "content": "x"}]
    with pytest.raises(PromptError, match="messages: got '1 messages'; allowed: what") as raised:
        template.render(chat, add_generation_prompt=True, tools=None, variables={})
    assert raised.value.http_status == 400
    assert template.renderers.ask(PLAIN) == "hi"


@pytest.mark.usefixtures("hasty")
def test_a_template_is_not_even_read_in_this_process() -> None:
    """jinja2 computes what is constant before anything is rendered."""
    for constant in ("10 ** (10 ** 10)", "'a' * 30000000000"):
        template = ChatTemplate({"default": f"{{{{ {constant} }}}}{{{{ a_token }}}}"}, {})
        assert template.unknown_tokens({}) <= {"a_token"}


@pytest.mark.usefixtures("patient")
def test_whoever_goes_away_ends_the_render() -> None:
    renderers = Renderers()
    renderers.warm_up()
    process = only_process(renderers)
    asked: list[bool] = []

    def wanted() -> bool:
        asked.append(True)
        return len(asked) < 2

    with pytest.raises(ForetokenError, match="nobody waits"):
        renderers.ask(NEVER, wanted)
    assert process.exit_code == -signal.SIGKILL


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_renders_that_take_long_get_company(monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as there may be but one, then others; and with all of them, whoever waits can go."""
    monkeypatch.setattr(rendering, "_PATIENCE_S", 0.001)
    renderers, gone = Renderers(), threading.Event()
    busy = threading.Semaphore(0)

    def wanted() -> bool:
        busy.release()
        return not gone.is_set()

    with ThreadPoolExecutor(MOST_RENDERS) as pool:
        try:
            stuck = [pool.submit(renderers.ask, NEVER, wanted) for _ in range(MOST_RENDERS - 1)]
            assert [renderers.ask(PLAIN) for _ in range(3)] == ["hi"] * 3
            stuck.append(pool.submit(renderers.ask, NEVER, wanted))
            while renderers._num_busy < MOST_RENDERS:
                busy.acquire()
            with pytest.raises(ForetokenError, match="nobody waits"):
                renderers.ask(PLAIN, lambda: False)
        finally:
            gone.set()
        errors = [one.exception() for one in stuck]
    assert all(isinstance(error, ForetokenError) for error in errors), errors
    assert renderers.ask(PLAIN) == "hi"


@pytest.mark.slow
@pytest.mark.usefixtures("patient")
def test_a_render_that_takes_long_steps_back_for_good() -> None:
    """What it makes counts, however long it takes; its process is not used again."""
    renderers = Renderers()
    renderers.warm_up()
    process = only_process(renderers)
    seen: list[int] = []

    def wanted() -> bool:
        seen.append(os.getpriority(os.PRIO_PROCESS, process._child.pid))
        return seen[-1] == seen[0]

    with pytest.raises(ForetokenError):
        renderers.ask(NEVER, wanted)
    assert seen[-1] > os.getpriority(os.PRIO_PROCESS, 0)
    long = order_of("{% for i in range(9000) %}{% for j in range(999) %}{% endfor %}{% endfor %}hi",
                    {"messages": []})  # fmt: skip
    renderers.warm_up()
    process = only_process(renderers)
    assert renderers.ask(long) == "hi"
    assert process.exit_code is not None and only_process(renderers) is not process


def test_short_renders_share_processes() -> None:
    renderers = Renderers()
    with ThreadPoolExecutor(16) as pool:
        assert set(pool.map(renderers.ask, [PLAIN] * 400)) == {"hi"}
    assert 1 <= len(renderers._idle) <= 2 and renderers._num_busy == 0


def test_a_process_that_was_killed_is_replaced() -> None:
    renderers = Renderers()
    assert renderers.ask(PLAIN) == "hi"
    first = only_process(renderers)
    first._child.kill()
    assert renderers.ask(PLAIN) == "hi"
    assert only_process(renderers) is not first


@pytest.mark.usefixtures("patient")
def test_a_render_whose_process_is_killed_is_tried_once_more() -> None:
    renderers = Renderers()
    killed: list[int] = []

    def killing() -> bool:
        """Asked while a render goes on: an operator, or the kernel short of memory."""
        [pid] = set(children()) - {*killed, *before}
        os.kill(pid, signal.SIGKILL)
        killed.append(pid)
        return True

    before = set(children())
    with pytest.raises(ValueError, match="its process ended, twice"):
        renderers.ask(NEVER, killing)
    assert len(killed) == 2
    assert renderers.ask(PLAIN) == "hi"


def children() -> list[int]:
    """Processes that threads of this one have started and that have not been waited for."""
    tasks = Path("/proc/self/task").iterdir()
    return [int(pid) for task in tasks for pid in (task / "children").read_text().split()]


def test_no_process_is_not_the_clients_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    renderers = Renderers()
    with monkeypatch.context() as patch:
        patch.setattr("sys.executable", "/nowhere/python")
        with pytest.raises(ForetokenError, match="no process to fill chat templates in"):
            renderers.ask(PLAIN)
    assert renderers.ask(PLAIN) == "hi"


def test_a_process_has_nothing_of_its_owners(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORETOKEN_API_KEY", "a secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    with socket.create_server(("127.0.0.1", 0)):
        renderers = Renderers()
        renderers.ask(PLAIN)
        folder = Path(f"/proc/{only_process(renderers)._child.pid}")
        descriptors = {name.name for name in (folder / "fd").iterdir()}
        assert descriptors == {"0", "1", "2", "3"}
        environment = (folder / "environ").read_bytes()
    assert b"a secret" not in environment and b"Asia/Tokyo" in environment


def test_a_process_ends_with_its_owner_and_answers_before() -> None:
    """The end of its input is all that it hears of an owner that was killed."""
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-P", "-m", "foretoken.text.sandbox"]
    with theirs:
        child = subprocess.Popen(command, stdin=theirs.fileno())
    with ours, ours.makefile("rb") as answers:
        for _ in range(2):
            ours.sendall(ORDER.pack(5.0, len(PLAIN)) + PLAIN)
            refused, last, length = ANSWER.unpack(answers.read(ANSWER.size))
            assert not refused and not last and answers.read(length) == b"hi"
    assert child.wait(60) == 0


def test_a_process_is_light() -> None:
    code = (
        "import sys, foretoken.text.sandbox\n"
        "print(sorted({'torch', 'transformers', 'tokenizers', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "[]", done.stderr


@pytest.mark.parametrize(
    "answer",
    [
        lambda: ANSWER.pack(False, False, 1 << 62),
        lambda: ANSWER.pack(False, False, 1) + b"\xff",
        lambda: ANSWER.pack(False, False, 9) + b"short",
        lambda: b"\x00",
    ],
)
def test_an_answer_that_is_none(answer: Callable[[], bytes]) -> None:
    """A template that broke out of the sandbox writes what it likes."""
    renderers = Renderers()
    renderers.warm_up()
    process = only_process(renderers)
    ours, theirs = socket.socketpair()
    with process._link, ours, theirs:
        process._link = ours
        theirs.sendall(answer())
        theirs.shutdown(socket.SHUT_WR)
        assert process.ask(PLAIN, lambda: True) is None
