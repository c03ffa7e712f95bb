"""Checks of recorded requests and of names of metrics.

Turning speculation on can break clients that worked before: requests with some sampling
parameters are then refused. The share of such requests in real traffic is what counts.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from foretoken.config.other_engines import todays_names
from foretoken.errors import nearest
from foretoken.lab.findings import Finding
from foretoken.lab.launch.sources import find_metric, whole_metric
from foretoken.lab.lint.names import engine_table

REFUSED_CHECK = "refused_parameter"
METRIC_CHECK = "metric_name"
_PREFIXES = {
    "vllm:": "vllm",
    "llamacpp:": "llama.cpp",
    "sglang:": "sglang",
    "trtllm_": "tensorrt-llm",
}
"""How the metrics of an engine begin."""
_ABOUT_DRAFTS = re.compile(r"[:_](spec|speculative|draft\w*|accept\w*)(_|$)")


def _parameters_of(request: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling parameters of a request body or of a recorded one, nested ones included."""
    found: dict[str, Any] = {}
    for holder in (request, *(request.get(n) or {} for n in ("body", "parameters", "extra_body"))):
        if isinstance(holder, Mapping):
            found.update(holder)
    return found


def refused_counts(requests: Iterable[Mapping[str, Any]], engine: str) -> dict[str, int]:
    """Parameter -> requests that the engine refuses once speculation is on."""
    refused = engine_table(engine).get("refused_with_speculation", {})
    counts = dict.fromkeys(refused, 0)
    for request in requests:
        parameters = _parameters_of(request)
        for name in refused:
            value = parameters.get(name)
            counts[name] += value > 0 if isinstance(value, int | float) else bool(value)
    return {name: count for name, count in counts.items() if count}


def check_requests(requests: Sequence[Mapping[str, Any]], engine: str) -> Iterator[Finding]:
    """What happens to these requests when speculation is turned on."""
    reasons = engine_table(engine).get("refused_with_speculation", {})
    for name, count in refused_counts(requests, engine).items():
        share = f"{count} of {len(requests)} requests ({count / len(requests):.1%})"
        remedy = "route them to a server without speculation, or drop the parameter"
        message = f"{share} set it: {reasons[name]}"
        yield Finding.of(REFUSED_CHECK, "error", name, message, remedy)
    old = sum(any(str(key).startswith("speculative.") for key in r) for r in requests)
    if old and engine == "llama.cpp":
        message = f"{old} requests set draft lengths per request: current builds ignore that"
        yield Finding.of(REFUSED_CHECK, "warning", "speculative.*", message)
    several = sum((_parameters_of(r).get("n") or 1) != 1 for r in requests)
    if several and engine == "vllm":
        message = f"{several} requests ask for several answers: they report no acceptance"
        yield Finding.of(REFUSED_CHECK, "note", "n", message)


def check_metrics(names: Iterable[str], engine: str, *, exported: bool) -> Iterator[Finding]:
    """Names of metrics that are gone, or that a query would not find.

    Args:
        names: as they stand in a dashboard or a script.
        engine: whose server is asked: under `foretoken`, names of any other engine are answered.
        exported: whether they are asked of a server, where counters end in `_total`.
    """
    counters = engine_table("vllm")["counters"]
    for name in names:
        whole, row = whole_metric(name), find_metric(name)
        if row is not None and row.gone and not (row.kept and engine == "foretoken"):
            now = row.now or "nothing"
            if ":" not in name and name.partition("vllm_")[1]:
                now = now.replace("vllm:", f"{name.partition('vllm_')[0]}vllm_")
            yield _metric(name, "error", "no such metric any more: a query finds nothing"
                          + (f"; {row.why}" if row.why else ""), now)  # fmt: skip
        elif row is None and whole == name and _ABOUT_DRAFTS.search(name):
            yield from _never(name)
        elif row is not None and row.say and engine == "foretoken":
            yield _metric(name, "error", f"{row.engine} has it, Foretoken has not", row.say)
        elif exported and whole in counters and whole == name:
            yield _metric(name, "warning", "counters are exported with _total", f"{name}_total")


def _never(name: str) -> Iterator[Finding]:
    """A name about speculation that its engine has not, and never had."""
    owner = next((own for start, own in _PREFIXES.items() if name.startswith(start)), None)
    if owner is None:
        return
    known = todays_names("metrics", owner)
    if f"{name}_total" not in known and any(one.startswith(name) for one in known):
        return  # the beginning of several, as queries and scripts have it
    near = nearest(name, known)
    yield _metric(
        name,
        "error" if owner in ("vllm", "llama.cpp") else "warning",
        f"{owner} {engine_table(owner)['version']} is not known to have such a metric",
        f"did you mean {near}?" if near else f"one of {', '.join(known)}",
    )


def _metric(name: str, level: str, message: str, remedy: str) -> Finding:
    return Finding.of(METRIC_CHECK, level, name, message, remedy)
