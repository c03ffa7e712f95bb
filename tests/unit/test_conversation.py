"""Messages and calls: every shape reaches a template right, calls are found in text, and what the
processes that fill templates do."""

import json
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
from hypothesis import given
from hypothesis import strategies as st

from foretoken.errors import ForetokenError, PromptError
from foretoken.server.tools import PARSERS, ArgumentsParser, ChoiceMessage
from foretoken.text import renderers as rendering
from foretoken.text.chat_template import ChatTemplate
from foretoken.text.conversation import conversation_of
from foretoken.text.renderers import ANSWER, MOST_RENDERS, ORDER, Renderers, order_of

CALL: dict[str, Any] = {"name": "f", "arguments": '{"a": 1}'}
TOOL_CALL: dict[str, Any] = {"id": "1", "type": "function", "function": CALL}


def part(text: str, kind: str = "text") -> dict[str, str]:
    return {"type": kind, kind: text}


@pytest.mark.parametrize("role", ["developer", "system", "user", "assistant", "tool", "ipython"])
def test_content_is_always_there(role: str) -> None:
    for message in ({"role": role}, {"role": role, "content": None}, {"role": role, "content": ""}):
        assert conversation_of([message]) == [{"role": role, "content": ""}]
    named = {"role": role, "content": "x", "name": "n", "tool_call_id": "7", "refusal": None}
    assert conversation_of([named]) == [{k: v for k, v in named.items() if v is not None}]
    parts = [part("a"), part("b") | {"cache_control": {}}]
    [made] = conversation_of([{"role": role, "content": parts}])
    assert made == {"role": role, "content": [part("a"), part("b")]}


def test_calls_whose_content_is_null() -> None:
    calls = [TOOL_CALL, {"function": {"name": "g", "arguments": None}}, {"function": {"name": "h"}}]
    [made] = conversation_of([{"role": "assistant", "content": None, "tool_calls": calls}])
    assert made["content"] == ""
    functions = [call["function"] for call in made["tool_calls"]]
    assert functions == [CALL, {"name": "g", "arguments": {}}, {"name": "h", "arguments": {}}]
    nothing: tuple[Any, ...] = (None, [])
    for none in nothing:
        [made] = conversation_of([{"role": "assistant", "content": "x", "tool_calls": none}])
        assert made == {"role": "assistant", "content": "x"}


def test_what_was_refused_is_text() -> None:
    said = {"role": "assistant", "content": None, "refusal": "no"}
    in_parts = {"role": "assistant", "content": [part("no", "refusal")]}
    assert [one["content"] for one in conversation_of([said, in_parts])] == ["no", [part("no")]]


def test_the_older_form_of_calls() -> None:
    asked = {"role": "assistant", "content": None, "function_call": CALL}
    found = {"role": "function", "name": "f", "content": "12"}
    first, second = conversation_of([asked, found])
    [call] = first["tool_calls"]
    assert call["function"] == CALL and "function_call" not in first
    assert second == {"role": "tool", "name": "f", "content": "12", "tool_call_id": call["id"]}
    both = {**asked, "tool_calls": [TOOL_CALL]}
    assert conversation_of([both])[0]["tool_calls"] == [TOOL_CALL]


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"role": None}, "role"),
        ({"role": 5}, "role"),
        ({"content": 5}, "content"),
        ({"content": {"type": "text"}}, "content"),
        ({"content": ["x"]}, "content.0"),
        ({"content": [part("a"), {"type": "image_url"}]}, "content.1.type"),
        ({"content": [{"text": "x"}]}, "content.0.type"),
        ({"content": [{"type": []}]}, "content.0.type"),
        ({"content": [{"type": "text", "text": None}]}, "content.0.text"),
        ({"content": [{"type": "refusal", "refusal": 1}]}, "content.0.refusal"),
        ({"refusal": 3}, "content"),
        ({"tool_calls": "x"}, "tool_calls"),
        ({"tool_calls": ["x"]}, "tool_calls.0.function"),
        ({"tool_calls": [{"type": "custom", "custom": {"name": "f"}}]}, "tool_calls.0.function"),
        ({"tool_calls": [{"function": {}}]}, "tool_calls.0.function.name"),
        ({"tool_calls": [{"function": {**CALL, "arguments": 5}}]},
         "tool_calls.0.function.arguments"),
        ({"function_call": "auto"}, "tool_calls.0.function"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named(fields: dict[str, Any], named: str) -> None:
    with pytest.raises(PromptError) as raised:
        conversation_of([{"role": "user"}, {"role": "assistant", **fields}])
    assert raised.value.field == f"messages.1.{named}"


def rendered(source: str, *messages: dict[str, Any]) -> str:
    return ChatTemplate({"default": source}, {}).render(
        conversation_of(messages), add_generation_prompt=False, tools=None, variables={}
    )


def test_what_templates_are_given_of_it() -> None:
    """In one text, so that one process does: parts, roles and arguments."""
    texts = [part("a"), part("b")]
    arguments: list[Any] = ['{"a": 1}', {"b": None}, "", " ", None, '{"cut', "[1]", "[" * 100_000]
    calls = [{"function": {"name": "f", "arguments": one}} for one in arguments]
    text = rendered(
        "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
        "{% for call in messages[-1].tool_calls %}"
        "{{ call.function.arguments | tojson | truncate(12) }};{% endfor %}",
        {"role": "developer", "content": "be kind"},
        {"role": "user", "content": texts},
        {"role": "assistant", "content": None, "tool_calls": calls},
    )
    assert text == (
        'system:be kind;user:a\nb;assistant:;{"a": 1};{"b": null};{};{};{};"{\\"cut";"[1]";'
        '"[[[[[[[[...;'
    )


def test_a_template_that_knows_developers_and_parts() -> None:
    text = rendered(
        "{% for m in messages %}{% if m.role == 'developer' %}D{% endif %}{{ m.role }}"
        "{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}"
        "<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}",
        {"role": "developer", "content": [part("a"), part("b")]},
        {"role": "tool", "content": [part("a"), part("b")]},
    )
    assert text == "Ddeveloper<a><b>toola\nb"


HERMES = {
    "one": ('<tool_call>\n{"name": "f", "arguments": {"a": "}<{"}}\n</tool_call>', "", 1),
    "text before": ('Sure. <tool_call>{"name": "f", "arguments": {}}</tool_call>', "Sure. ", 1),
    "two": (
        '<tool_call>{"name": "f", "arguments": {"x": [1, {"y": 2}]}}</tool_call>\n'
        '<tool_call>{"arguments": {"b": "\\"}"}, "name": "g"}</tool_call>\n',
        "",
        2,
    ),
    "none": ("a < b <tool", "a < b <tool", 0),
    "not JSON": ("<tool_call>nonsense</tool_call>", "<tool_call>nonsense</tool_call>", 0),
    "no name": ('<tool_call>{"a": 1}</tool_call>.', '<tool_call>{"a": 1}</tool_call>.', 0),
    "cut off": ('<tool_call>\n{"name": "f", "arguments": {"a": 1', "", 1),
    "cut off early": ('x<tool_call>\n{"na', 'x<tool_call>\n{"na', 0),
    "text after": ('<tool_call>{"name": "f", "arguments": {}}</tool_call> ok', " ok", 1),
}
LLAMA = {
    "one": ('{"name": "f", "parameters": {"a": "}{"}}', "", 1),
    "tag": ('<|python_tag|>{"name": "f", "parameters": {}}', "", 1),
    "two": ('{"name": "f", "parameters": {}}; {"name": "g", "parameters": {"a": 1}}', "", 2),
    "text": ("Hello {world}", "Hello {world}", 0),
    "other JSON": ('{"a": {"b": 1}} and', '{"a": {"b": 1}} and', 0),
    "blank": ("  ", "  ", 0),
}
CASES = [("hermes", *case) for case in HERMES.values()] + [
    ("llama3_json", *case) for case in LLAMA.values()
]


def read(parser: str, pieces: list[str]) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    message = ChoiceMessage(PARSERS[parser]())
    deltas = [d for piece in pieces for d in message.read(piece, ends=False)]
    deltas += message.read("", ends=True)
    return message.whole(), deltas


def shape(message: dict[str, Any]) -> tuple[str, list[tuple[str, str]]]:
    calls = [c["function"] for c in message.get("tool_calls", ())]
    return message["content"] or "", [(c["name"], c["arguments"]) for c in calls]


def put_together(deltas: list[dict[str, Any]]) -> tuple[str, list[tuple[str, str]]]:
    """What a client makes of the deltas."""
    content, calls = "", dict[int, list[str]]()
    for delta in deltas:
        content += delta.get("content", "")
        for change in delta.get("tool_calls", ()):
            function = change["function"]
            if "name" in function:
                assert change["index"] == len(calls) and change["id"] and change["type"]
                calls[change["index"]] = [function["name"], ""]
            calls[change["index"]][1] += function["arguments"]
    return content, [(name, arguments) for name, arguments in calls.values()]


@pytest.mark.parametrize(("parser", "text", "content", "num_calls"), CASES)
def test_whole_text(parser: str, text: str, content: str, num_calls: int) -> None:
    message, deltas = read(parser, [text])
    assert (message["content"] or "") == content
    assert len(message.get("tool_calls", ())) == num_calls
    if num_calls and "cut" not in text and text.count("{") == text.count("}"):
        for call in message["tool_calls"]:
            assert isinstance(json.loads(call["function"]["arguments"]), dict)
    assert put_together(deltas) == shape(message)


@given(st.sampled_from(CASES), st.lists(st.integers(0, 120), max_size=12))
def test_cuts_do_not_matter(case: tuple[str, str, str, int], cuts: list[int]) -> None:
    parser, text, *_ = case
    places = [0, *sorted(min(cut, len(text)) for cut in cuts), len(text)]
    pieces = [text[a:b] for a, b in zip(places, places[1:], strict=False)]
    message, deltas = read(parser, pieces)
    assert shape(message) == shape(read(parser, [text])[0])
    assert put_together(deltas) == shape(message)


@given(
    st.sampled_from(sorted(PARSERS)), st.text('<>/tool_call{}":, nameargutsfx1\\\n', max_size=80)
)
def test_no_text_is_lost_or_invented(parser: str, text: str) -> None:
    message, deltas = read(parser, list(text))
    assert put_together(deltas) == shape(message)
    if not message.get("tool_calls"):
        assert message["content"] == text


def test_a_named_call_is_all_arguments() -> None:
    message = ChoiceMessage(ArgumentsParser("f"))
    deltas = [d for piece in ('{"a"', "", ": 1}") for d in message.read(piece, ends=False)]
    assert put_together(deltas) == ("", [("f", '{"a": 1}')])


# The processes that fill chat templates. The guarded bugs: a template that never ends or takes
# all memory, one render that holds up the others, a process that outlives its owner or has its
# keys.
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


def warm() -> tuple[Renderers, Any]:
    """Renderers with their only process."""
    renderers = Renderers()
    renderers.warm_up()
    return renderers, only_process(renderers)


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
    renderers, process = warm()
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
    renderers, process = warm()
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
    renderers, process = warm()
    ours, theirs = socket.socketpair()
    with process._link, ours, theirs:
        process._link = ours
        theirs.sendall(answer())
        theirs.shutdown(socket.SHUT_WR)
        assert process.ask(PLAIN, lambda: True) is None
