"""Checks of launches of llama.cpp's server, of SGLang and of Foretoken."""

from collections.abc import Iterator

from foretoken.config import EngineConfig
from foretoken.config.auto import auto_drafters
from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.launch.launch import (
    DRAFT_OPTIONS,
    Launch,
    LaunchCheck,
    engine_table,
    in_json,
    number,
)
from foretoken.lab.lint.translate import drafts_blocks
from foretoken.lab.launch.values import Expression

_LLAMA = ("llama.cpp",)
_MOST, _FEWEST = "spec-draft-n-max", "spec-draft-n-min"


def speculates(launch: Launch) -> bool:
    """Whether a launch of any engine turns speculation on."""
    if launch.engine == "sglang":
        return "speculative-algorithm" in launch.options
    if launch.engine != "llama.cpp":
        return bool(launch.speculation) or launch.unread
    kinds = str(launch.options.get("spec-type", "none"))
    return kinds != "none" or any(n in launch.options for n in (*DRAFT_OPTIONS, "spec-default"))


def _llama_types(launch: Launch) -> Iterator[Finding]:
    drafting = [name for name in launch.options if name.startswith("spec-draft-")]
    if drafting and not speculates(launch):
        yield Finding(
            check="llama_types",
            level="warning",
            where=f"--{drafting[0]}",
            message="nothing drafts: neither a draft model nor --spec-type is given",
        )
    sampling = launch.options.get("spec-draft-sampling")
    known = engine_table("llama.cpp")["samplings"]
    if sampling is not None and sampling not in known:
        yield Finding(
            check="llama_types",
            level="error",
            where="--spec-draft-sampling",
            message=f"{sampling!r} is unknown",
            remedy=", ".join(known),
        )


def _llama_defaults(launch: Launch) -> Iterator[Finding]:
    default = _default_most()
    given = number(launch.options.get(_MOST))
    if speculates(launch) and given is not None and given >= 4 * default:
        yield Finding(
            check="llama_defaults",
            level="note",
            where=f"--{_MOST}",
            message=f"{given} was the default once; today it is {default}. Rows beyond what "
            "is accepted are wasted",
        )


def _default_most() -> int:
    return int(engine_table("llama.cpp")["defaults"][_MOST])


def _n_min_discards(launch: Launch) -> Iterator[Finding]:
    low = number(launch.options.get(_FEWEST))
    high = number(launch.options.get(_MOST)) or _default_most()
    if not low:
        return
    too_high = low > high
    yield Finding(
        check="n_min_discards",
        level="error" if too_high else "warning",
        where=f"--{_FEWEST}",
        message=f"it is above --{_MOST} ({high}): no draft is ever used"
        if too_high
        else f"drafts shorter than {low} are thrown away after they were paid for; it does not "
        "make drafts longer",
        remedy=f"--{_FEWEST} 0",
    )


def _llama_other(launch: Launch) -> Iterator[Finding]:
    options = launch.options
    synthetic = [name for name in options if name.startswith("spec-synth-")]
    if synthetic:
        yield _other("warning", synthetic[0], "forced acceptance writes garbage: only to measure")
    if "spec-draft-conf-min" in options:
        yield _other("warning", "spec-draft-conf-min", "documented, but builds do not parse it")
    if "mmproj" in options and speculates(launch):
        yield _other("warning", "mmproj", "requests with images fail while a draft is in use")
    if speculates(launch) and "metrics" not in options:
        yield _other("note", "metrics", "without --metrics nobody sees the acceptance")


def _other(level: str, flag: str, message: str) -> Finding:
    return Finding(check="llama_other", level=level, where=f"--{flag}", message=message)


def _sglang_shape(launch: Launch) -> Iterator[Finding]:
    options = launch.options
    steps, rows, top_k = (
        number(options.get(f"speculative-{name}"))
        for name in ("num-steps", "num-draft-tokens", "eagle-topk")
    )
    if drafts_blocks(launch):
        if steps not in (None, 1):
            yield _sglang("warning", "num-steps", "a block comes of one pass: SGLang takes 1, "
                          "whatever is given", "leave it out")  # fmt: skip
    elif top_k == 1 and steps is not None and rows not in (None, steps + 1):
        yield _sglang("warning", "num-draft-tokens", f"along a chain SGLang takes steps + 1 "
                      f"({steps + 1}), whatever is given", str(steps + 1))  # fmt: skip
    drafts = [name for name in options if name.startswith("speculative-")]
    if drafts and not speculates(launch):
        yield _sglang("warning", drafts[0].removeprefix("speculative-"), "nothing drafts: no "
                      "algorithm is given", "--speculative-algorithm EAGLE3")  # fmt: skip
    if not speculates(launch):
        return
    for name in ("accept-threshold-single", "accept-threshold-acc"):
        threshold = options.get(f"speculative-{name}", "1")
        if isinstance(threshold, str) and threshold.replace(".", "", 1).isdigit():
            if float(threshold) < 1:
                yield _sglang("warning", name, "below 1 it is lossy: outputs change", "1.0")
    if "max-running-requests" not in options:
        yield Finding(
            check="sglang_shape",
            level="note",
            where="--max-running-requests",
            message="speculation sets it to 48 where it is not given",
        )


def _sglang(level: str, flag: str, message: str, remedy: str) -> Finding:
    return Finding(
        check="sglang_shape",
        level=level,
        where=f"--speculative-{flag}",
        message=message,
        remedy=remedy,
    )


def _foretoken(launch: Launch) -> Iterator[Finding]:
    """Foretoken's own settings know best what they allow.

    Commands are judged by their own parser, where there is one (`lint`).
    """
    if launch.broken:
        yield Finding(
            check="foretoken_settings",
            level="error",
            where="speculative_config",
            message=f"not a JSON object: {launch.broken}",
        )
        return
    given = {p.written: p.value for p in launch.parts if p.name and not in_json(p.name)}
    if launch.form.kind != "python" or any(isinstance(v, Expression) for v in given.values()):
        given = {}
    given |= {"model": launch.model or "demo", "speculative_config": launch.speculation}
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
    return Finding(check="speculation", level="note", message=message)


def settings_finding(error: ConfigError) -> Finding:
    """What a setting that Foretoken refuses says."""
    return Finding(
        check="foretoken_settings",
        level="error",
        where=error.field,
        message=f"got {error.given!r}",
        remedy=error.allowed.partition("; `foretoken lab lint")[0],
    )


OTHER_CHECKS = (
    LaunchCheck("llama_types", _LLAMA, _llama_types),
    LaunchCheck("llama_defaults", _LLAMA, _llama_defaults),
    LaunchCheck("n_min_discards", _LLAMA, _n_min_discards),
    LaunchCheck("llama_other", _LLAMA, _llama_other),
    LaunchCheck("sglang_shape", ("sglang",), _sglang_shape),
    LaunchCheck("foretoken_settings", ("foretoken",), _foretoken),
)
