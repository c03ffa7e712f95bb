"""Checks of names that are gone, or never were: flags, keys, methods and values of any engine."""

from collections.abc import Iterator

from foretoken.config.methods import known_methods
from foretoken.config.other_engines import OtherName, find_other, other_names, todays_names
from foretoken.errors import nearest
from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import (
    METHOD_OPTIONS,
    SHORT,
    Launch,
    LaunchCheck,
    engine_table,
    flag_name,
    gone_value,
    gone_values,
    typed,
)
from foretoken.lab.lint.translate import method_by_name, schedule_of
from foretoken.lab.launch.values import is_unsaid, json_for_shell, json_text
from foretoken.lab.lint.variables import VARIABLE_CHECK

_ENGINES = ("vllm", "sglang", "llama.cpp", "tensorrt-llm")
_SHORTEST = 4
_LOOK_UPS = tuple(method.name for method in known_methods() if method.drafts_with == "text")


def _removed_flag(launch: Launch) -> Iterator[Finding]:
    version = engine_table(launch.engine)["version"]
    for part in launch.arguments:
        row = flag_name(launch.engine, part.name) if part.name else None
        if row is not None and row.gone:
            why = f" ({row.why})" if row.why else ""
            yield Finding(
                check="removed_flag",
                level="error",
                where=part.written,
                message=f"was removed{why}; {launch.engine} {version} does not start with it",
                remedy=_successor(row, launch, part.value),
            )


def _successor(row: OtherName, launch: Launch, value: object) -> str:
    """What to type today, with the value that was given."""
    name = row.successor
    if name.startswith("flag:"):
        return f"--{name[5:].replace('_', '-')} {'' if value is True else value}".strip()
    if not name.startswith("key:"):
        return name or "leave it out"
    key, given = name[4:], typed(value)
    if key == "num_speculative_tokens_per_batch_size":
        drafts = launch.options.get("num-speculative-tokens", 5)
        drafts = (launch.speculation or {}).get("num_speculative_tokens", drafts)
        given = schedule_of(given, drafts)
    gone = gone_value("vllm", key, given)
    given = given if gone is None else gone.now
    if row.kind == "keys":
        return f"{json_text({key: given})[1:-1]}"
    if key == "model" and isinstance(given, str) and given.strip("[]") in _LOOK_UPS:
        key, given = "method", given.strip("[]")
    if launch.form.kind in ("shell", "list", "exec"):
        return f"--speculative-config {json_for_shell({key: given})}"
    return f"speculative_config={json_text({key: given})}"


def _unknown_flag(launch: Launch) -> Iterator[Finding]:
    known = [f"--{r.name.replace('_', '-')}" for r in other_names()
             if (r.engine, r.kind) == (launch.engine, "flags")]  # fmt: skip
    for part in launch.arguments:
        if flag_name(launch.engine, part.name) is not None or not part.written:
            continue
        other = _of_another(part.name)
        if other is not None or part.name.startswith(("spec-", "speculative")):
            near = nearest(part.written, known)
            whose = f": it is one of {other.engine}" if other is not None else ""
            yield Finding(
                check="unknown_flag",
                level="error",
                where=part.written,
                message=f"{launch.engine} knows no such option about speculation{whose}",
                remedy=_in_config(launch, other, part.value)
                or (f"did you mean {near}?" if near else ""),
            )


def _of_another(name: str) -> OtherName | None:
    """An option by which another engine drafts; short ones may mean something else."""
    row = find_other("flags", name)
    return row if row is not None and len(name) > _SHORTEST and (row.key or row.method) else None


def _in_config(launch: Launch, other: OtherName | None, value: object) -> str:
    """The key of vLLM's that says the same as an option of another engine; empty: none."""
    if other is None or launch.engine != "vllm" or not other.key:
        return ""
    row = find_other("keys", other.key, "vllm")
    if row is None or row.gone:
        return ""
    given = {other.key: typed(value)}
    if launch.form.kind in ("shell", "list", "exec"):
        return f"--speculative-config {json_for_shell(given)}"
    return f"speculative_config={json_text(given)}"


def _removed_key(launch: Launch) -> Iterator[Finding]:
    known = [r.name for r in other_names() if (r.engine, r.kind) == (launch.engine, "keys")]
    for key, value in (launch.speculation or {}).items():
        row = find_other("keys", key, launch.engine)
        if row is None:
            near = nearest(key, known)
            remedy, message = f"did you mean {near}?" if near else "", "knows no such key"
        elif row.gone:
            remedy = _successor(row, launch, value)
            message = "has it no more" + (f": {row.why}" if row.why else "")
        else:
            continue
        yield Finding(
            check="removed_key",
            level="error",
            where=f"speculative_config.{key}",
            message=f"{launch.engine} {message}",
            remedy=remedy,
        )


def _removed_method(launch: Launch) -> Iterator[Finding]:
    for where, word in _methods(launch):
        if is_unsaid(word):
            continue
        row = find_other("methods", word, launch.engine)
        if row is None:
            words = ", ".join(todays_names("methods", launch.engine))
            yield _method(where, "error", f"{word} is no method of {launch.engine}", words)
        elif row.gone and row.method and launch.engine == "vllm":
            yield _method(where, "warning", f"{word} is an old name", row.method)
        elif row.gone:
            instead = row.now or (
                "a draft model or an EAGLE head where there is one; without one: ngram"
            )
            why = row.why or f"{word} was renamed"
            yield _method(where, "error", why, instead)


def _methods(launch: Launch) -> Iterator[tuple[str, str]]:
    """Where a method is named, and its word."""
    for key in ("method", "decoding_type"):
        word = (launch.speculation or {}).get(key)
        if isinstance(word, str):
            yield f"speculative_config.{key}", word
    config = launch.speculation or {}
    if launch.engine == "vllm" and "method" not in config and isinstance(config.get("model"), str):
        yield "speculative_config.model", method_by_name(config["model"])
    for part in launch.parts:
        if part.name in METHOD_OPTIONS and isinstance(part.value, str):
            where = f"--{part.name}" if part.place is None else part.written
            yield from ((where, word.strip()) for word in part.value.split(","))


def _method(where: str, level: str, message: str, remedy: str) -> Finding:
    return Finding(check="removed_method", level=level, where=where, message=message, remedy=remedy)


def _removed_value(launch: Launch) -> Iterator[Finding]:
    values = {**launch.options, **(launch.speculation or {})}
    for key, value, gone in gone_values("vllm"):
        if values.get(key) == value:
            yield Finding(
                check="removed_value",
                level="error",
                where=key,
                message=f"{key} {value} is gone",
                remedy=gone.remedy or gone.now,
            )


def _given_twice(launch: Launch) -> Iterator[Finding]:
    for flag in launch.given_twice:
        yield Finding(
            check="given_twice",
            level="error",
            where=f"--{flag}",
            message=f"{SHORT[flag]} stands in --speculative-config too, which vLLM refuses",
            remedy=f"leave --{flag} out",
        )


NAME_CHECKS = (
    LaunchCheck("removed_flag", _ENGINES, _removed_flag),
    LaunchCheck("unknown_flag", ("vllm", "sglang", "llama.cpp"), _unknown_flag),
    LaunchCheck("removed_key", ("vllm", "tensorrt-llm"), _removed_key),
    LaunchCheck("removed_method", _ENGINES, _removed_method),
    LaunchCheck("removed_value", ("vllm",), _removed_value),
    LaunchCheck("given_twice", ("vllm",), _given_twice),
    VARIABLE_CHECK,
)
"""Checks of a launch as it was written; all others look at it in today's names."""
