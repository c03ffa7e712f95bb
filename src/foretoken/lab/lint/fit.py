"""Whether the models of a launch fit together and fit the devices: asks the planner.

Only about models that the planner knows without a network. Measures nothing.
"""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from foretoken.checkpoint import PACKAGED
from foretoken.errors import ConfigError, ModelError
from foretoken.lab.findings import Finding
from foretoken.lab.launch.engines import DraftingSetup, given
from foretoken.lab.launch.launch import Launch, number
from foretoken.lab.plan.method_plans import planned_methods
from foretoken.lab.plan.planner import build_plan
from foretoken.lab.plan.setup import ENGINES as PLANNED
from foretoken.lab.plan.setup import PlanSettings, find_device
from foretoken.lab.plan.sizes import find_quantization, known_models, load_plan_model

PAIR_CHECKS = ("same_tokenizer", "kv_budget", "tp_symmetry", "ranks_divide", "long_context")
_TRANSLATES = ("use_heterogeneous_vocab", "use_string_matching")
"""Keys with which a draft may have another vocabulary."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where the launch runs; without a device only the models are compared."""

    device: str | None = None
    count: int = 1


def check_pair(launch: Launch, machine: Machine) -> Iterator[Finding]:
    """The plan's errors and warnings for this launch; a note where a device was given in vain."""
    drafting = _drafting(launch)
    why = f"the planner does not know {launch.model or 'the model'}"
    why += f" with {drafting.method}" if drafting else "'s method"
    if not launch.ranks_are_said:
        why = "the text does not say over how many devices the target is split"
    elif launch.unread:
        why = "the text does not say what it drafts with"
    unsized = next((name for name, bits in _stored(launch).items() if bits is None), "")
    if unsized:
        unsized = f"the {unsized.replace('_', ' ')} does not say how many bits a weight has"
    sized = machine.device is not None and not unsized
    found: tuple[Finding, ...] | None = None
    try:
        settings = planned_settings(launch, machine)
        if settings is not None:
            if launch.engine == "vllm" and "max-model-len" not in launch.options:
                # vLLM starts only where one request as long as the target reads has room.
                longest = load_plan_model(settings.target, "model").context
                settings = replace(settings, context=max(longest, settings.context))
            found = build_plan(settings).findings
    except (ConfigError, ModelError) as error:  # numbers that other checks have named
        if machine.device and error.given == machine.device:
            raise
        why = str(error)
    if machine.device and (found is None or unsized):
        message = f"memory was not checked: {unsized or why}"
        yield Finding("unplanned", "note", "", message)
    wanted: tuple[str, ...] = PAIR_CHECKS if sized else ("same_tokenizer", "ranks_divide")
    if any(launch.speculation.get(key) is True for key in _TRANSLATES):
        wanted = tuple(name for name in wanted if name != "same_tokenizer")
    for finding in found or ():
        if finding.check in wanted and finding.level in ("error", "warning"):
            yield finding


def why_not_loaded(launch: Launch, machine: Machine) -> Finding | None:
    """Why a launch does not load, as far as is known without starting it: what `lint` calls an
    error of the pair, and `plan` a reason to leave it off."""
    return next((one for one in check_pair(launch, machine) if one.level == "error"), None)


def planned_settings(launch: Launch, machine: Machine) -> PlanSettings | None:
    """The launch as settings of a plan; None where the planner does not know the models. Raises
    ConfigError at numbers that a plan does not take."""
    drafting = _drafting(launch)
    if launch.model is None or not is_known(launch.model) or drafting is None:
        return None
    if drafting.method not in planned_methods() or not launch.ranks_are_said or launch.unread:
        return None
    draft = drafting.model if drafting.method == "draft_model" else None
    if drafting.method == "draft_model" and not is_known(draft or ""):
        return None
    # At least one device for each rank, but for Foretoken's processes on a CPU, which they are
    # taken to share unless a machine is named.
    in_processes = launch.engine == "foretoken" and launch.ranks > 1
    device, count = machine.device or ("epyc-9755" if in_processes else "h100-sxm"), machine.count
    if not in_processes or find_device(device).kind != "cpu":
        count = max(count, launch.ranks)
    settings = PlanSettings(
        target=launch.model,
        draft=draft,
        method=drafting.method,
        engine=launch.engine if launch.engine in PLANNED else "vllm",
        device=device,
        count=count,
        tensor_parallel_size=launch.ranks,
        draft_tensor_parallel_size=number(drafting.keys.get("draft_tensor_parallel_size")) or 0,
        num_speculative_tokens=drafting.num_drafts,
        peak_concurrency=1,
    )
    return _with_options(settings, launch)


def _drafting(launch: Launch) -> DraftingSetup | None:
    return given(launch) or (None if launch.speculates else DraftingSetup("ngram"))


def _with_options(settings: PlanSettings, launch: Launch) -> PlanSettings:
    options = launch.options
    for name in ("max-model-len", "context-length", "max-seq-len"):
        text = str(options.get(name))
        factor = {"k": 1000, "K": 1024}.get(text[-1:], 1)  # `32k` and `32K`, as vLLM takes them
        length = (number(text[:-1] if factor > 1 else text) or 0) * factor
        if length > 0:
            settings = replace(settings, context=length)
            break
    share = options.get("gpu-memory-utilization")
    if launch.engine in ("sglang", "tensorrt-llm"):
        # They set a share apart by rules of their own.
        settings = replace(settings, utilization=1.0)
    elif isinstance(share, str) and share.replace(".", "", 1).isdigit():
        settings = replace(settings, utilization=min(1.0, float(share)))
    for name, quantization in _stored(launch).items():
        if quantization is not None:
            settings = replace(settings, **{name: quantization})  # type: ignore[arg-type]
    if str(options.get("kv-cache-dtype", "")).startswith("fp8"):
        settings = replace(settings, kv_cache_dtype="fp8")
    return settings


def _stored(launch: Launch) -> dict[str, str | None]:
    """Setting of a plan -> how a launch says that weights are stored; None: in a way of which the
    word does not say how many bits it has. What is not said is as the checkpoint has it."""
    said = {
        "quantization": launch.options.get("quantization"),
        "draft_quantization": launch.speculation.get("quantization"),
    }
    found: dict[str, str | None] = {}
    for name, word in said.items():
        if word in (None, "none", "None", "auto"):
            continue
        try:
            found[name] = find_quantization(str(word), name).name
        except ConfigError:
            found[name] = None
    return found


def is_known(name: str) -> bool:
    """Whether the planner has the sizes of a model, without a network."""
    if name in PACKAGED or (bool(name) and (Path(name) / "config.json").is_file()):
        return True
    known = known_models().items()
    return any(name.lower() in (hub.lower(), row["short"]) for hub, row in known)
