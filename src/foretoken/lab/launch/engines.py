"""How vLLM, SGLang, llama.cpp and Foretoken are told to draft.

Each writer takes one `DraftingSetup` and gives the words of its engine. OpenVINO GenAI, which is
told in Python, has a file of its own. Which methods an engine has is in the configuration's tables.
"""

from collections.abc import Callable
from typing import Any

from foretoken.config.methods import DraftingMethod, NgramSettings
from foretoken.config.other_engines import find_other, other_names
from foretoken.config.reader import defaults_of
from foretoken.errors import ConfigError
from foretoken.lab.launch.options import ENGINE_NAMES, told_key
from foretoken.lab.launch.drafting import DraftingSetup, Told

ENGINES = ("vllm", "sglang", "llama.cpp", "openvino", "foretoken")
"""Those that commands are written for."""
_OPENVINO = ("draft_model", "eagle3", "ngram")
_IN_PARALLEL = "parallel"
_SGLANG_LOOK_UP = "NGRAM"
"""Its one look-up, for all of ours."""
_SGLANG_DSPARK = "DSPARK"


def refusal(engine: str, method: DraftingMethod) -> str:
    """Why an engine of ENGINES does not draft so; empty if it does."""
    refused = f"{engine} does not draft with {method.name}"
    if engine == "vllm":
        known = find_other("methods", _vllm_method(method.name), engine)
        if known is None:
            return refused
        return f"not with vllm: {known.why}" if known.gone else ""
    if engine == "foretoken":
        has_it = method.is_built
    elif engine == "llama.cpp":
        has_it = bool(method.plan and method.plan.llama_cpp)
    elif engine == "sglang":
        has_it = bool(_sglang_word(method))
    else:
        has_it = method.name in _OPENVINO
    return "" if has_it else refused


def tell(engine: str, speculation: DraftingSetup) -> Told:
    """What to type for an engine with a command line.

    Raises:
        ConfigError: it has no such method.
    """
    method = speculation.drafting
    if refused := refusal(engine, method):
        raise ConfigError("speculative_config.method", method.name, f"another: {refused}")
    return _WRITERS[engine](speculation)


def _foretoken(speculation: DraftingSetup) -> Told:
    return Told.flag("--speculative-config", speculation.as_keys())


def _vllm_method(name: str) -> str:
    """Our word for a method, or the one under which vLLM has it."""
    return "draft_model" if name == _IN_PARALLEL else name


def _vllm(speculation: DraftingSetup) -> Told:
    found: dict[str, Any] = {"method": _vllm_method(speculation.method)}
    found |= {"model": speculation.model} if speculation.model else {}
    found["num_speculative_tokens"] = speculation.num_drafts
    keys = dict(speculation.keys)
    if speculation.method == _IN_PARALLEL:
        keys["parallel_drafting"] = True
    if speculation.drafting.settings is NgramSettings:
        keys = defaults_of(NgramSettings) | keys  # vLLM's own look for five tokens in a row
    lost = Told()
    for key, value in keys.items():
        said = told_key("vllm", key, value)
        found |= {part.name: part.value for part in said.parts}
        lost += Told(unsaid=said.unsaid)
    if _falls(speculation):
        found["num_speculative_tokens_per_batch_size"] = [list(one) for one in speculation.ranges]
    elif speculation.ranges:
        lost += _one_length(speculation, "vLLM's lengths may only fall as the load rises")
    return Told.flag("--speculative-config", found) + lost


def _falls(speculation: DraftingSetup) -> bool:
    drafts = [count for _, _, count in speculation.ranges]
    return bool(drafts) and drafts == sorted(drafts, reverse=True)


def _one_length(speculation: DraftingSetup, why: str) -> Told:
    return Told.not_said(speculation.ranges_key, f"{why}; its longest is written")


def _llama_cpp(speculation: DraftingSetup) -> Told:
    plan = speculation.drafting.plan
    assert plan is not None and plan.llama_cpp is not None, "refusal looks"
    word, given = plan.llama_cpp, dict(speculation.flags)
    told = Told.flag("--spec-type", word) + _closest("llama.cpp", word, speculation.drafting)
    flag, count = plan.llama_cpp_drafts(speculation.num_drafts)
    told += Told.flag(flag, count)
    if speculation.model:
        told += Told.flag("--spec-draft-model", speculation.model)
    keys = dict(speculation.keys)
    if speculation.drafting.drafts_with == "text":
        size = f"--spec-{word}-size-n"
        # Its own default looks for twelve tokens in a row, which text hardly ever repeats.
        shortest = keys.pop("prompt_lookup_min", NgramSettings().prompt_lookup_min)
        given = {size: str(shortest)} | given
    told += Told.flags((flag, value or True) for flag, value in given.items())
    return told + _keys("llama.cpp", keys) + _without_ranges("llama.cpp", speculation)


def _closest(engine: str, word: str, method: DraftingMethod) -> Told:
    """That a word means another method, where the engine has none for this one."""
    row = find_other("methods", word, engine)
    if row is not None and row.method == method.name:
        return Told()
    why = f"{ENGINE_NAMES[engine]} has no {method.name}; {word} is the closest that it has"
    return Told.not_said("method", why)


def _keys(engine: str, keys: dict[str, Any]) -> Told:
    return sum((told_key(engine, key, value) for key, value in keys.items()), Told())


def _without_ranges(engine: str, speculation: DraftingSetup) -> Told:
    if not speculation.ranges:
        return Told()
    return _one_length(speculation, f"{engine} drafts equally far at every load")


def _sglang_word(method: DraftingMethod) -> str:
    """SGLang's word for a method; empty: it has none."""
    words = [
        row.name
        for row in other_names()
        if (row.engine, row.kind, row.method) == ("sglang", "methods", method.name) and not row.gone
    ]
    looks_up = method.drafts_with == "text" and method.is_built
    return words[0] if words else _SGLANG_LOOK_UP if looks_up else ""


def _sglang(speculation: DraftingSetup) -> Told:
    word = _sglang_word(speculation.drafting)
    told = Told.flag("--speculative-algorithm", word)
    told += _closest("sglang", word, speculation.drafting)
    if speculation.model:
        told += Told.flag("--speculative-draft-model-path", speculation.model)
    keys = dict(speculation.keys)
    told += _sglang_lengths(speculation, word, keys)
    told += Told.flags((flag, value or True) for flag, value in speculation.flags)
    return told + _keys("sglang", keys) + _without_ranges("SGLang", speculation)


def _sglang_lengths(speculation: DraftingSetup, word: str, keys: dict[str, Any]) -> Told:
    """How far to draft, of `keys` too, which are taken out."""
    count, method = speculation.num_drafts, speculation.drafting
    if word == _SGLANG_DSPARK:
        return Told.flag("--speculative-dspark-block-size", count)
    told = Told()
    if method.drafts_with != "text" and not method.in_one_pass:
        depth, top_k = keys.pop("tree_depth", count), keys.pop("tree_top_k", 1)
        told += Told.flag("--speculative-num-steps", depth)
        told += Told.flag("--speculative-eagle-topk", top_k)
    return told + Told.flag("--speculative-num-draft-tokens", count + 1)  # it counts the root


_WRITERS: dict[str, Callable[[DraftingSetup], Told]] = {
    "foretoken": _foretoken,
    "vllm": _vllm,
    "llama.cpp": _llama_cpp,
    "sglang": _sglang,
}
