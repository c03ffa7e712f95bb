"""Files that are not what the ending of their name says, so that a part of them was not read.

A document, a page or a line of a command may hold anything; a file of a program or of settings
either is one as a whole or fails where it is used, whatever else is found in it.
"""

import json
from collections.abc import Callable, Iterator
from pathlib import PurePath

import yaml

from foretoken.lab.findings import Finding
from foretoken.lab.launch.python import STARTS_SERVER, not_python
from foretoken.lab.launch.shell import SHELL_CHECK, open_quotations

UNREAD_CHECK = "unread"
_TEMPLATE = "{{"
"""Where charts and playbooks are filled in before anybody reads them as YAML."""


def unreadable(text: str, name: str) -> Iterator[Finding]:
    """What keeps a file of such a name from being read as a whole."""
    ending = PurePath(name).suffix.lower()
    check = _ENDINGS.get(ending)
    if check is None and text.startswith("#!") and "sh" in text.split("\n", 1)[0]:
        check = _no_shell
    if check is not None:
        yield from check(text)


def _no_shell(text: str) -> Iterator[Finding]:
    for line, words in open_quotations(text):
        if STARTS_SERVER.search(words) is None:
            continue  # such as a text that stands in the script
        yield Finding(
            check=SHELL_CHECK,
            level="error",
            where=f"line {line}",
            message=f"a quotation has no end, so that it was not read: {words}",
            remedy="the quotation mark that is missing",
        )


def _no_json(text: str) -> Iterator[Finding]:
    try:
        json.loads(text)
    except ValueError as error:
        if all(map(_is_json, filter(str.strip, text.splitlines()))):
            return  # a document a line
        yield _unread(f"is no JSON, so that it was not read as such: {error}")


def _is_json(line: str) -> bool:
    try:
        json.loads(line)
    except ValueError:
        return False
    return True


def _no_yaml(text: str) -> Iterator[Finding]:
    if _TEMPLATE in text:
        return
    try:
        list(yaml.parse(text, Loader=yaml.SafeLoader))
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"line {mark.line + 1}" if mark is not None else "file"
        said = getattr(error, "problem", None) or str(error).splitlines()[0]
        yield _unread(f"is no YAML, so that it was not read as such: {said}", where)


def _unread(message: str, where: str = "file") -> Finding:
    return Finding(check=UNREAD_CHECK, level="error", where=where, message=message)


_ENDINGS: dict[str, Callable[[str], Iterator[Finding]]] = {
    ".py": not_python,
    ".sh": _no_shell,
    ".bash": _no_shell,
    ".json": _no_json,
    ".ipynb": _no_json,
    ".yaml": _no_yaml,
    ".yml": _no_yaml,
}
