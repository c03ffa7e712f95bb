"""Checks of names that are gone: flags, keys, methods and values of vLLM and llama.cpp."""

from collections.abc import Iterator

from foretoken.errors import nearest
from foretoken.lab.findings import Finding
from foretoken.lab.lint.launches import Launch, LaunchCheck, engine_table

_VLLM = ("vllm",)


def _removed_flag(launch: Launch) -> Iterator[Finding]:
    table = engine_table(launch.engine)
    for name in launch.options:
        if name not in table["removed_flags"]:
            continue
        successor = table["removed_flags"][name]
        yield Finding(
            check="removed_flag",
            level="error",
            where=f"--{name}",
            message=f"--{name} was removed; {launch.engine} {table['version']} does not start",
            remedy=f"--{successor}" if _is_flag(successor) else successor or "leave it out",
        )


def _is_flag(text: str) -> bool:
    return bool(text) and not text.startswith("nothing")


def _unknown_flag(launch: Launch) -> Iterator[Finding]:
    table = engine_table("vllm")
    known = table["known"]["flags"]
    for name in launch.options:
        head = name.partition(".")[0].replace("_", "-")
        gone = name in table["removed_flags"]
        if head.startswith(("spec-", "speculative")) and head not in known and not gone:
            yield Finding(
                check="unknown_flag",
                level="error",
                where=f"--{name}",
                message="vLLM knows no such option about speculation",
                remedy=f"--speculative-config, or one of {', '.join(known)}",
            )


def _removed_key(launch: Launch) -> Iterator[Finding]:
    table = engine_table("vllm")
    for key in launch.speculation or {}:
        if key in table["removed_keys"]:
            yield Finding(
                check="removed_key",
                level="error",
                where=f"speculative_config.{key}",
                message=f"{key} was removed",
                remedy=table["removed_keys"][key] or "leave it out",
            )
        elif key not in table["known"]["keys"]:
            near = nearest(key, table["known"]["keys"])
            yield Finding(
                check="removed_key",
                level="error",
                where=f"speculative_config.{key}",
                message="vLLM knows no such key",
                remedy=f"did you mean {near}?" if near else "",
            )


def _removed_method(launch: Launch) -> Iterator[Finding]:
    table = engine_table("vllm")
    method = (launch.speculation or {}).get("method")
    if method in table["removed_methods"]:
        yield Finding(
            check="removed_method",
            level="error",
            where="speculative_config.method",
            message=f"{method} was removed",
            remedy=table["removed_methods"][method],
        )
    elif isinstance(method, str) and method not in table["known"]["methods"]:
        mtp = method.endswith("_mtp")
        yield Finding(
            check="removed_method",
            level="warning" if mtp else "error",
            where="speculative_config.method",
            message=f"{method} is an old name" if mtp else f"{method} is no method of vLLM",
            remedy="mtp" if mtp else ", ".join(table["known"]["methods"]),
        )


def _removed_value(launch: Launch) -> Iterator[Finding]:
    values = {**launch.options, **(launch.speculation or {})}
    for pair, remedy in engine_table("vllm")["removed_values"].items():
        key, _, value = pair.partition("=")
        if values.get(key) == value:
            yield Finding(
                check="removed_value",
                level="error",
                where=key,
                message=f"{key} {value} is gone",
                remedy=remedy,
            )


NAME_CHECKS = (
    LaunchCheck("removed_flag", ("vllm", "llama.cpp"), _removed_flag),
    LaunchCheck("unknown_flag", _VLLM, _unknown_flag),
    LaunchCheck("removed_key", _VLLM, _removed_key),
    LaunchCheck("removed_method", _VLLM, _removed_method),
    LaunchCheck("removed_value", _VLLM, _removed_value),
)
