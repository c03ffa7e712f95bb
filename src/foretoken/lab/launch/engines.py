"""The engines that launches are read and written for, each in a file of its own."""

import re

from foretoken.config.method_registry import DraftingMethod, known_methods
from foretoken.config.other_engines import find_other
from foretoken.errors import ConfigError
from foretoken.lab.launch.drafting import LENGTHS, NAMES, DraftingSetup, LaunchEngine, Told, Unsaid
from foretoken.lab.launch.launch import (
    DRAFT_OPTIONS,
    METHOD_OPTIONS,
    SHORT,
    Launch,
    LaunchPart,
    in_json,
    number,
)
from foretoken.lab.launch.llama_cpp import LLAMA_CPP
from foretoken.lab.launch.openvino import OPENVINO
from foretoken.lab.launch.sglang import SGLANG
from foretoken.lab.launch.vllm import JSON_FLAGS, VLLM

FORETOKEN = LaunchEngine(
    name="foretoken",
    program=("foretoken", "serve"),
    programs=("foretoken serve",),
    drafting=JSON_FLAGS + r"|(no-)?adaptive-speculation",
    off=("--speculative-config", "none"),
    fixed=("--no-adaptive-speculation",),
    schedule="any",
    word=lambda method: method.name if method.is_built else "",
    tell=lambda it: iter([LaunchPart.flag("--speculative-config", it.as_keys())]),
)
TENSORRT_LLM = LaunchEngine(
    name="tensorrt-llm",
    programs=("trtllm-serve serve", "trtllm-serve"),
    images=("tensorrt-llm/release",),
)
ENGINES = {one.name: one for one in (VLLM, SGLANG, LLAMA_CPP, TENSORRT_LLM, FORETOKEN, OPENVINO)}
READ = tuple(name for name, one in ENGINES.items() if one.programs)
_LENGTHS = re.compile(
    r"(draft(-n|-max)?|spec-draft-n-max|spec-ngram-[a-z0-9-]+-size-m)$|"
    r"speculative-(num-steps|num-draft-tokens|(dspark|dflash)-block-size)$"
)


def refusal(engine: str, method: DraftingMethod) -> str:
    """Why an engine does not draft so; empty if it does."""
    if ENGINES[engine].word(method):
        return ""
    row = find_other("methods", method.name, engine)
    if engine == "vllm" and row is not None and row.gone:
        return f"not with vllm: {row.why}"
    return f"{engine} does not draft with {method.name}"


def tell(engine: str, drafting: DraftingSetup) -> Told:
    """How an engine is told to draft.

    Raises:
        ConfigError: it has no such method.
    """
    if refused := refusal(engine, drafting.known):
        raise ConfigError("speculative_config.method", drafting.method, f"another: {refused}")
    own = ENGINES[engine]
    assert own.tell is not None, "only for engines that commands are written for"
    told = [*own.tell(drafting)]
    if own.schedule == "one" and drafting.ranges:
        whose = NAMES[engine].removesuffix(" GenAI")
        why = f"{whose} drafts equally far at every load; its longest is written"
        told.append(Unsaid(drafting.ranges_key, why))
    return iter(told)


def given(launch: Launch) -> DraftingSetup | None:
    """What a launch drafts with, as far as it says, 0 drafts where it does not say how many; None
    where nothing drafts, or with a method that is not known here."""
    engine, config, options = ENGINES[launch.engine], dict(launch.speculation), launch.options
    model = next((options[name] for name in DRAFT_OPTIONS if name in options), None)
    model = config.pop("model", None) or config.pop("speculative_model", None) or model
    word = config.pop("method", None) or config.pop("decoding_type", None)
    word = word or next((options[name] for name in METHOD_OPTIONS if name in options), None)
    row = find_other("methods", word, launch.engine)
    method = (row.method or row.name) if row else word or ("draft_model" if model else None)
    named = [one for one in known_methods() if method in (one.name, engine.word(one))]
    if not named:
        return None
    flags = [
        (part.written, "" if part.value is True else str(part.value))
        for part in launch.arguments
        if launch.engine == "llama.cpp" and re.match(engine.drafting, part.name)
        if not is_told(launch, part)
    ]
    keys = {name: value for name, value in config.items() if name not in LENGTHS}
    # The last token is among what is verified, and in a block of DFlash.
    verified = number(options.get("speculative-num-draft-tokens"))
    verified = verified or number(options.get("speculative-dflash-block-size"))
    said = [
        number(launch.speculation.get("num_speculative_tokens")),
        number(config.get("max_draft_len")),
        verified - 1 if verified else None,
        number(options.get("speculative-dspark-block-size")),
        None if named[0].in_one_pass else number(options.get("speculative-num-steps")),
    ]
    if launch.engine == "llama.cpp":
        said = [number(value) for name, value in options.items() if _LENGTHS.match(name)]
    count = min(max(next((one for one in said if one), 0), 0), 128)
    return DraftingSetup(named[0].name, str(model) if model else None, keys, tuple(flags), count)


def is_told(launch: Launch, part: LaunchPart) -> bool:
    """Whether an option says the method, the model or the length of drafts, or holds all keys."""
    apart = (*METHOD_OPTIONS, *DRAFT_OPTIONS)
    is_key = in_json(part.name) or (launch.engine == "vllm" and part.name in SHORT)
    return is_key or part.name in apart or bool(_LENGTHS.match(part.name))
