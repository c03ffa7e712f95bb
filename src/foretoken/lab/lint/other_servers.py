"""Checks of launches of llama.cpp's server, of SGLang and of Foretoken."""

from collections.abc import Iterator
from dataclasses import replace

from foretoken.config import EngineConfig
from foretoken.config.auto import auto_drafters
from foretoken.config.methods import known_methods
from foretoken.config.other_engines import find_other
from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import DRAFT_OPTIONS, Launch, in_json
from foretoken.lab.launch.values import Expression, number
from foretoken.lab.lint.names import engine_table

OTHER_CHECKS = (
    *("llama_types", "llama_defaults", "n_min_discards", "llama_other", "sglang_shape"),
    "foretoken_settings",
)
_MOST, _FEWEST = "spec-draft-n-max", "spec-draft-n-min"
_STEPS, _ROWS, _TOP_K = (
    f"speculative-{name}" for name in ("num-steps", "num-draft-tokens", "eagle-topk")
)


def speculates(launch: Launch) -> bool:
    """Whether a launch of any engine turns speculation on."""
    options = launch.options
    if launch.engine == "sglang":
        return "speculative-algorithm" in options
    if launch.engine != "llama.cpp":
        return bool(launch.speculation) or launch.unread
    named = str(options.get("spec-type", "none")) != "none"
    return named or any(name in options for name in (*DRAFT_OPTIONS, "spec-default"))


def check_llama_cpp(launch: Launch) -> Iterator[Finding]:
    """Everything about a launch of llama.cpp's server in today's names."""
    options, drafts, table = launch.options, speculates(launch), engine_table("llama.cpp")
    drafting = [name for name in options if name.startswith("spec-draft-")]
    if drafting and not drafts:
        message = "nothing drafts: neither a draft model nor --spec-type is given"
        yield Finding.of("llama_types", "warning", f"--{drafting[0]}", message)
    sampling, known = options.get("spec-draft-sampling"), table["samplings"]
    if sampling is not None and sampling not in known:
        message = f"{sampling!r} is unknown"
        yield Finding.of("llama_types", "error", "--spec-draft-sampling", message, ", ".join(known))
    default, most = int(table["defaults"][_MOST]), number(options.get(_MOST))
    if drafts and most is not None and most >= 4 * default:
        message = (
            f"{most} was the default once; today it is {default}. Rows beyond what is accepted are "
            "wasted"
        )
        yield Finding.of("llama_defaults", "note", f"--{_MOST}", message)
    fewest = number(options.get(_FEWEST))
    if fewest:
        level = "error" if fewest > (most or default) else "warning"
        message = (
            f"drafts shorter than {fewest} are thrown away after they were paid for; it does not "
            "make drafts longer"
        )
        if level == "error":
            message = f"it is above --{_MOST} ({most or default}): no draft is ever used"
        yield Finding.of("n_min_discards", level, f"--{_FEWEST}", message, f"--{_FEWEST} 0")
    for level, name, message in _llama_other(launch):
        yield Finding.of("llama_other", level, f"--{name}", message)


def _llama_other(launch: Launch) -> Iterator[tuple[str, str, str]]:
    options, drafts = launch.options, speculates(launch)
    for name in [name for name in options if name.startswith("spec-synth-")][:1]:
        yield "warning", name, "forced acceptance writes garbage: only to measure"
    if "spec-draft-conf-min" in options:
        yield "warning", "spec-draft-conf-min", "documented, but builds do not parse it"
    if "mmproj" in options and drafts:
        yield "warning", "mmproj", "requests with images fail while a draft is in use"
    if drafts and "metrics" not in options:
        yield "note", "metrics", "without --metrics nobody sees the acceptance"


def drafts_blocks(launch: Launch) -> bool:
    """Whether SGLang drafts whole blocks in one pass, for which it has no steps."""
    row = find_other("methods", launch.options.get("speculative-algorithm"), "sglang")
    return any(row and one.name == row.method and one.in_one_pass for one in known_methods())


def check_sglang(launch: Launch) -> Iterator[Finding]:
    """Everything about a launch of SGLang in today's names."""
    for level, name, message, remedy in _sglang(launch):
        yield Finding.of("sglang_shape", level, f"--{name}", message, remedy)


def _sglang(launch: Launch) -> Iterator[tuple[str, str, str, str]]:
    options = launch.options
    steps, rows, top_k = (number(options.get(name)) for name in (_STEPS, _ROWS, _TOP_K))
    if drafts_blocks(launch):
        if steps not in (None, 1):
            message = "a block comes of one pass: SGLang takes 1, whatever is given"
            yield "warning", _STEPS, message, "leave it out"
    elif top_k == 1 and steps is not None and rows not in (None, steps + 1):
        message = f"along a chain SGLang takes steps + 1 ({steps + 1}), whatever is given"
        yield "warning", _ROWS, message, str(steps + 1)
    if not speculates(launch):
        for name in [name for name in options if name.startswith("speculative-")][:1]:
            message = "nothing drafts: no algorithm is given"
            yield "warning", name, message, "--speculative-algorithm EAGLE3"
        return
    for name in ("accept-threshold-single", "accept-threshold-acc"):
        threshold = options.get(f"speculative-{name}", "1")
        if isinstance(threshold, str) and threshold.replace(".", "", 1).isdigit():
            if float(threshold) < 1:
                message = "below 1 it is lossy: outputs change"
                yield "warning", f"speculative-{name}", message, "1.0"
    if "max-running-requests" not in options:
        message = "speculation sets it to 48 where it is not given"
        yield "note", "max-running-requests", message, ""


def mended_sglang(launch: Launch) -> Launch:
    """SGLang's launch with the number of rows that a chain has, and without steps of blocks."""
    options = launch.options
    steps, rows, top_k = (number(options.get(name)) for name in (_STEPS, _ROWS, _TOP_K))
    if drafts_blocks(launch):
        return launch if steps in (None, 1) else launch.without(_STEPS)
    if top_k != 1 or steps is None or rows in (None, steps + 1):
        return launch
    right = str(steps + 1)
    return launch.having(
        replace(part, value=right, raw="") if part.name == _ROWS else part for part in launch.parts
    )


def mended_llama_cpp(launch: Launch) -> Launch:
    """llama.cpp's launch without a least length, which only throws drafts away."""
    return launch.without(_FEWEST) if number(launch.options.get(_FEWEST)) else launch


def check_foretoken(launch: Launch) -> Iterator[Finding]:
    """Foretoken's own settings know best what they allow.

    Commands are judged by their own parser, where there is one (`lint`).
    """
    if launch.broken:
        message = f"not a JSON object: {launch.broken}"
        yield Finding.of("foretoken_settings", "error", "speculative_config", message)
        return
    given = {p.written: p.value for p in launch.parts if p.name and not in_json(p.name)}
    if launch.form.kind != "python" or any(isinstance(v, Expression) for v in given.values()):
        given = {}
    given |= {"model": launch.model or "demo", "speculative_config": launch.speculation or None}
    try:
        EngineConfig.from_kwargs(**given)
    except ConfigError as error:
        yield settings_finding(error)


def speculation_finding(config: EngineConfig, *, by_default: bool) -> Finding:
    """Whether a server with these settings speculates, and with what.

    Args:
        config: its settings.
        by_default: whether nobody said anything about speculation.
    """
    spec = config.speculative_config
    drafters = spec.drafters if spec else auto_drafters(config.model) if by_default else ()
    named = ", ".join(f"{one.label} (up to {one.num_speculative_tokens})" for one in drafters)
    message = f"speculates with {named}" if named else "speculation is off"
    if by_default:
        message += ": all that there is for the model, where it never changes a token"
    return Finding.of("speculation", "note", "", message)


def settings_finding(error: ConfigError) -> Finding:
    """What a setting that Foretoken refuses says."""
    remedy = error.allowed.partition("; `foretoken lab lint")[0]
    message = f"got {error.given!r}"
    return Finding.of("foretoken_settings", "error", error.field, message, remedy)
