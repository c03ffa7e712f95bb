"""Chat templates filled in jinja2's sandbox. Run as a module, this file is a process that does it.

Templates come with models and are not trusted: the sandbox keeps them from files and code, the
process from everybody else's time and memory. Owns jinja2 as transformers sets it up, and the shape
in which a template reads messages. Imports no torch and no transformers.
Invariants: every order has one answer; the process ends with its input, and after the processor
time that an order has.
"""

import functools
import json
import marshal
import os
import resource
import signal
import socket
import sys
from collections.abc import Callable
from contextlib import suppress
from datetime import datetime
from typing import Any, final

import jinja2
import jinja2.debug  # imported by jinja2 itself only at the first error
from jinja2 import meta, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

from foretoken.text.renderers import ANSWER, MOST_CHARACTERS, ORDER

MOST_BYTES = 512 << 20
"""Address space of the process."""
_SHORT_S = 0.1
"""Seconds of processor time that a render has on a par with everybody else."""
_STEP = 10
"""Of niceness: a tenth of what others have, where all want a processor."""
_LONGEST_REASON = 500
_REASONING = ("reasoning_content", "thinking", "reasoning")
"""Names under which clients send an answer's reasoning; templates read the first or the second."""


def answer_to(order: bytes) -> tuple[bool, bytes]:
    """Whether an order was refused, and the text, or why there is none."""
    try:
        source, given = marshal.loads(order)
        text = _names(source) if given is None else _compiled(source).fill(given)
        if len(text) <= MOST_CHARACTERS:
            return False, text.encode("utf-8", "surrogatepass")
        reason = f"what becomes a text of at most {MOST_CHARACTERS} characters"
    except MemoryError:
        reason = f"what is rendered within {MOST_BYTES >> 20} MiB of memory"
    except Exception as error:  # noqa: BLE001 - a template can raise whatever Python has
        reason = f"what the template takes: {str(error) or type(error).__name__}"
    return True, reason[:_LONGEST_REASON].encode("utf-8", "surrogatepass")


@final
class _Template:
    """One template, and what of a message it reads."""

    def __init__(self, source: str) -> None:
        self._template = _environment().from_string(source)
        self._knows_developers = "developer" in source
        self._reads_parts = _reads_parts(_environment().parse(source))

    def fill(self, given: dict[str, Any]) -> str:
        given["messages"] = [self._message(message) for message in given["messages"]]
        return self._template.render(given)

    def _message(self, message: dict[str, Any]) -> dict[str, Any]:
        """A message without what is None, its fields as the template reads them."""
        fields = {name: value for name, value in message.items() if value is not None}
        reasoning = next((fields[name] for name in _REASONING if name in fields), None)
        if reasoning is not None:
            fields = {"thinking": reasoning, **fields, "reasoning_content": reasoning}
        if fields.get("role") == "developer" and not self._knows_developers:
            fields["role"] = "system"
        content, calls = fields.get("content"), fields.get("tool_calls")
        if isinstance(content, list) and (fields.get("role") == "tool" or not self._reads_parts):
            texts = [part.get("text") if isinstance(part, dict) else part for part in content]
            fields["content"] = "\n".join(text for text in texts if isinstance(text, str))
        if isinstance(calls, list):
            fields["tool_calls"] = [_call(call) for call in calls]
        return fields


@functools.lru_cache(8)
def _compiled(source: str) -> _Template:
    return _Template(source)


def _reads_parts(tree: nodes.Template) -> bool:
    """Whether a template goes through the parts of a message's content by itself."""
    named = {
        one.target.name
        for one in tree.find_all(nodes.Assign)
        if isinstance(one.target, nodes.Name) and _is_content(one.node)
    }
    given = {one.name for macro in tree.find_all(nodes.Macro) for one in macro.args}
    named |= given & {"content"}
    loops = [loop.iter for loop in tree.find_all(nodes.For)]
    return any(_is_content(one) or (isinstance(one, nodes.Name) and one.name in named)
               for one in map(_unfiltered, loops))  # fmt: skip


def _unfiltered(node: nodes.Node) -> nodes.Node:
    while isinstance(node, nodes.Filter) and node.node is not None:
        node = node.node
    return node


def _is_content(node: nodes.Node) -> bool:
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    key = node.arg if isinstance(node, nodes.Getitem) else None
    return isinstance(key, nodes.Const) and key.value == "content"


def _call(call: Any) -> Any:
    """A tool call whose arguments are an object: clients send its JSON."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"])}}


def _arguments(given: Any) -> Any:
    """What was given as it is, if it is no JSON of an object: models write such calls too."""
    if given is None or (isinstance(given, str) and not given.strip()):
        return {}
    found = None
    if isinstance(given, str):
        with suppress(ValueError, RecursionError):
            found = json.loads(given)
    return found if isinstance(found, dict) else given


def _names(source: str) -> str:
    """The variables that a template reads and does not set."""
    return "\n".join(sorted(meta.find_undeclared_variables(_environment().parse(source))))


@final
class _GenerationBlock(Extension):
    """`{% generation %}`: marks the answers for training, and prints what is in it."""

    tags = {"generation"}

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        content = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        block = nodes.CallBlock(self.call_method("_print"), [], [], content)
        return block.set_lineno(line)

    def _print(self, caller: Callable[[], str]) -> str:
        return caller()


@final
class _Variables(Namespace):
    """`namespace()`, without names that begin with an underscore."""

    def __setitem__(self, name: str, value: object) -> None:
        if name.startswith("_"):
            raise SecurityError(f"a template may not set {name!r}")
        super().__setitem__(name, value)


def _namespace(*args: Any, **kwargs: Any) -> _Variables:
    made = _Variables()
    for name, value in dict(*args, **kwargs).items():
        made[name] = value
    return made


def _fail(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as it is; jinja2's own filter writes it for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


@functools.cache
def _environment() -> ImmutableSandboxedEnvironment:
    """jinja2 as chat templates expect it."""
    made = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[_GenerationBlock, loopcontrols]
    )
    made.filters["tojson"] = _to_json
    made.globals["raise_exception"] = _fail
    made.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    made.globals["namespace"] = _namespace
    return made


def main(link: socket.socket) -> None:
    """Answer order after order, each within its time; past that the kernel ends the process. One
    that takes long steps back behind whatever else runs, and is the last: there is no way forward.
    """
    last = False

    def step_back(*_: object) -> None:
        nonlocal last
        last = True
        os.nice(_STEP)

    signal.signal(signal.SIGVTALRM, step_back)
    orders = link.makefile("rb")
    while len(head := orders.read(ORDER.size)) == ORDER.size:
        seconds, length = ORDER.unpack(head)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        signal.setitimer(signal.ITIMER_VIRTUAL, _SHORT_S)
        refused, answer = answer_to(orders.read(length))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.setitimer(signal.ITIMER_PROF, 0)
        link.sendall(ANSWER.pack(refused, last, len(answer)))
        link.sendall(answer)


def _confine() -> None:
    """Take the bounds that hold whatever is ordered."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the owner, who ends us
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGPROF, signal.SIGVTALRM})
    resource.setrlimit(resource.RLIMIT_AS, (MOST_BYTES, MOST_BYTES))
    with suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")  # short of memory, the kernel is to end us and not the owner


if __name__ == "__main__":
    _environment()
    _confine()
    with suppress(ConnectionError):  # the owner has gone
        main(socket.socket(fileno=os.dup(sys.stdin.fileno())))
