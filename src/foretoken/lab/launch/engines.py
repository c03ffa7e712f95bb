"""The engines that launches are read and written for, and how each is told to draft.

vLLM is told in one JSON object; SGLang by an algorithm, the steps of a draft and the rows to
verify; llama.cpp by a type of drafts, with flags of its own for each look-up; OpenVINO GenAI in a
script.
"""

import re
from typing import Any

from foretoken.config.methods import DraftingMethod, NgramSettings, known_methods
from foretoken.config.other_engines import find_other
from foretoken.config.reader import defaults_of
from foretoken.errors import ConfigError
from foretoken.lab.launch.drafting import (
    LENGTHS,
    NAMES,
    DraftingSetup,
    LaunchEngine,
    Told,
    Unsaid,
    todays_word,
    told_keys,
    told_word,
)
from foretoken.lab.launch.launch import (
    DRAFT_OPTIONS,
    METHOD_OPTIONS,
    SHORT,
    Launch,
    LaunchPart,
    in_json,
    number,
)

_IN_PARALLEL = "parallel"
_JSON_FLAGS = r"speculative-|speculative-config\.|spec-|num-speculative|sc($|\.)"


def _vllm_word(method: DraftingMethod) -> str:
    name = "draft_model" if method.name == _IN_PARALLEL else method.name
    row = find_other("methods", name, "vllm")
    return name if row is not None and not row.gone else ""


def _tell_vllm(drafting: DraftingSetup) -> Told:
    found: dict[str, Any] = {"method": _vllm_word(drafting.known)}
    found |= {"model": drafting.model} if drafting.model else {}
    found["num_speculative_tokens"] = drafting.num_drafts
    keys = dict(drafting.keys)
    if drafting.method == _IN_PARALLEL:
        keys["parallel_drafting"] = True
    if drafting.known.settings is NgramSettings:
        keys = defaults_of(NgramSettings) | keys  # vLLM's own look for five tokens in a row
    told = list(told_keys("vllm", keys))
    found |= {part.name: part.value for part in told if isinstance(part, LaunchPart)}
    drafts = [count for _, _, count in drafting.ranges]
    falls = drafts == sorted(drafts, reverse=True)
    if drafts and falls:
        found["num_speculative_tokens_per_batch_size"] = [list(one) for one in drafting.ranges]
    yield LaunchPart.flag("--speculative-config", found)
    yield from (one for one in told if isinstance(one, Unsaid))
    if not falls:
        why = "vLLM's lengths may only fall as the load rises; its longest is written"
        yield Unsaid(drafting.ranges_key, why)


VLLM = LaunchEngine(
    name="vllm",
    program=("vllm", "serve"),
    programs=("vllm serve",),
    module="vllm.entrypoints",
    images=("vllm/vllm-openai", "vllm-openai"),
    variables="VLLM_",
    completed={
        "tensor-parallel": "tensor-parallel-size",
        "gpu-memory-util": "gpu-memory-utilization",
        "speculative-conf": "speculative-config",
    },
    drafting=_JSON_FLAGS,
    schedule="falling",
    word=_vllm_word,
    tell=_tell_vllm,
)


def _sglang_word(method: DraftingMethod) -> str:
    looks_up = method.drafts_with == "text" and method.is_built
    return todays_word("sglang", method) or ("NGRAM" if looks_up else "")  # its one look-up


def _tell_sglang(drafting: DraftingSetup) -> Told:
    method, count, keys = drafting.known, drafting.num_drafts, dict(drafting.keys)
    word = _sglang_word(method)
    yield from told_word("sglang", "--speculative-algorithm", word, method)
    if drafting.model:
        yield LaunchPart.flag("--speculative-draft-model-path", drafting.model)
    if method.drafts_with != "text" and not method.in_one_pass:
        yield LaunchPart.flag("--speculative-num-steps", keys.pop("tree_depth", count))
        yield LaunchPart.flag("--speculative-eagle-topk", keys.pop("tree_top_k", 1))
    if word == "DSPARK":
        yield LaunchPart.flag("--speculative-dspark-block-size", count)
    else:  # it counts the root
        yield LaunchPart.flag("--speculative-num-draft-tokens", count + 1)
    yield from (LaunchPart.flag(flag, value or True) for flag, value in drafting.flags)
    yield from told_keys("sglang", keys)


SGLANG = LaunchEngine(
    name="sglang",
    program=("python", "-m", "sglang.launch_server"),
    model_flag="--model-path",
    programs=("sglang serve",),
    module="sglang.launch_server",
    images=("lmsysorg/sglang",),
    variables="SGLANG_",
    completed={
        "speculative-algo": "speculative-algorithm",
        "tensor-parallel": "tensor-parallel-size",
        "mem-fraction": "mem-fraction-static",
    },
    drafting="speculative-",
    word=_sglang_word,
    tell=_tell_sglang,
)


def _llama_word(method: DraftingMethod) -> str:
    closest = "ngram-map-k" if method.name == "suffix" else ""  # which it has not
    return todays_word("llama.cpp", method) or closest


def _tell_llama(drafting: DraftingSetup) -> Told:
    word, given, keys = _llama_word(drafting.known), dict(drafting.flags), dict(drafting.keys)
    yield from told_word("llama.cpp", "--spec-type", word, drafting.known)
    # Each look-up has a flag for its length, and drafts 48 tokens at a time without it.
    flag = "--spec-draft-n-max" if word.startswith("draft-") else f"--spec-{word}-size-m"
    yield LaunchPart.flag(flag, str(drafting.num_drafts))
    if drafting.model:
        yield LaunchPart.flag("--spec-draft-model", drafting.model)
    if drafting.known.drafts_with == "text":
        # Its own default looks for twelve tokens in a row, which text hardly ever repeats.
        shortest = keys.pop("prompt_lookup_min", NgramSettings().prompt_lookup_min)
        given = {f"--spec-{word}-size-n": str(shortest)} | given
    yield from (LaunchPart.flag(flag, value or True) for flag, value in given.items())
    yield from told_keys("llama.cpp", keys)


LLAMA_CPP = LaunchEngine(
    name="llama.cpp",
    program=("llama-server",),
    model_flag="--model",
    programs=("llama-server", "llama-server.exe", "llama-cli", "llama-speculative"),
    images=("ggml-org/llama.cpp", "ggerganov/llama.cpp"),
    variables="LLAMA_ARG_",
    drafting=r"(no-)?spec-|draft|model-draft$|md$|lookup-cache",
    word=_llama_word,
    tell=_tell_llama,
)


def _tell_openvino(drafting: DraftingSetup) -> Told:
    keys = dict(drafting.keys)
    if "draft_confidence_threshold" not in keys:  # which it takes in place of a number
        yield LaunchPart.flag("config.num_assistant_tokens", drafting.num_drafts)
    if drafting.known.drafts_with == "text":
        keys.setdefault("prompt_lookup_max", NgramSettings().prompt_lookup_max)
    yield from told_keys("openvino", keys)


OPENVINO = LaunchEngine(
    name="openvino",
    word=lambda method: method.name if method.name in ("draft_model", "eagle3", "ngram") else "",
    tell=_tell_openvino,
)
FORETOKEN = LaunchEngine(
    name="foretoken",
    program=("foretoken", "serve"),
    programs=("foretoken serve",),
    drafting=_JSON_FLAGS + r"|(no-)?adaptive-speculation",
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
