"""Checks of launches of llama.cpp's server and of Foretoken."""

from collections.abc import Iterator

from foretoken.config import EngineConfig
from foretoken.errors import ConfigError
from foretoken.lab.findings import Finding
from foretoken.lab.lint.launches import Launch, LaunchCheck, engine_table, number

_LLAMA = ("llama.cpp",)
_DRAFTS = ("spec-draft-model", "md", "model-draft", "hfd", "hf-repo-draft")


def speculates(launch: Launch) -> bool:
    """Whether a launch of any engine turns speculation on."""
    if launch.engine != "llama.cpp":
        return bool(launch.speculation)
    kinds = str(launch.options.get("spec-type", "none"))
    return kinds != "none" or any(n in launch.options for n in (*_DRAFTS, "spec-default"))


def _llama_types(launch: Launch) -> Iterator[Finding]:
    known = engine_table("llama.cpp")["known"]
    kinds = launch.options.get("spec-type")
    for kind in str(kinds).split(",") if isinstance(kinds, str) else ():
        if kind.strip() not in known["types"]:
            yield Finding(
                check="llama_types",
                level="error",
                where="--spec-type",
                message=f"{kind!r} is unknown",
                remedy=", ".join(known["types"]),
            )
    drafting = [name for name in launch.options if name.startswith("spec-draft-")]
    if drafting and not speculates(launch):
        yield Finding(
            check="llama_types",
            level="warning",
            where=f"--{drafting[0]}",
            message="nothing drafts: neither a draft model nor --spec-type is given",
        )
    sampling = launch.options.get("spec-draft-sampling")
    if sampling is not None and sampling not in known["samplings"]:
        yield Finding(
            check="llama_types",
            level="error",
            where="--spec-draft-sampling",
            message=f"{sampling!r} is unknown",
            remedy=", ".join(known["samplings"]),
        )


def _llama_defaults(launch: Launch) -> Iterator[Finding]:
    defaults = engine_table("llama.cpp")["defaults"]
    if not speculates(launch):
        return
    for name, default in defaults.items():
        given = number(launch.options.get(name))
        if name == "spec-draft-n-max" and given is not None and given >= 4 * default:
            yield Finding(
                check="llama_defaults",
                level="note",
                where=f"--{name}",
                message=f"{given} was the default once; today it is {default}. Rows beyond what "
                "is accepted are wasted",
            )


def _n_min_discards(launch: Launch) -> Iterator[Finding]:
    low = number(launch.options.get("spec-draft-n-min"))
    high = number(launch.options.get("spec-draft-n-max")) or 3
    if low is None or low == 0:
        return
    too_high = low > high
    yield Finding(
        check="n_min_discards",
        level="error" if too_high else "warning",
        where="--spec-draft-n-min",
        message=f"it is above --spec-draft-n-max ({high}): no draft is ever used"
        if too_high
        else f"drafts shorter than {low} are thrown away after they were paid for; it does not "
        "make drafts longer",
        remedy="--spec-draft-n-min 0",
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


def _foretoken(launch: Launch) -> Iterator[Finding]:
    """Foretoken's own settings know best what they allow."""
    if launch.broken:
        yield Finding(
            check="foretoken_settings",
            level="error",
            where="speculative_config",
            message=f"not a JSON object: {launch.broken}",
        )
    try:
        EngineConfig.from_kwargs(
            model=launch.model or "demo",
            speculative_config=dict(launch.speculation) if launch.speculation else None,
        )
    except ConfigError as error:
        yield Finding(
            check="foretoken_settings",
            level="error",
            where=error.field,
            message=f"got {error.given!r}",
            remedy=error.allowed,
        )


OTHER_CHECKS = (
    LaunchCheck("llama_types", _LLAMA, _llama_types),
    LaunchCheck("llama_defaults", _LLAMA, _llama_defaults),
    LaunchCheck("n_min_discards", _LLAMA, _n_min_discards),
    LaunchCheck("llama_other", _LLAMA, _llama_other),
    LaunchCheck("foretoken_settings", ("foretoken",), _foretoken),
)
