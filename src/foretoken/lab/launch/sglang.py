"""SGLang: told by an algorithm, the steps of a draft, and the rows to verify."""

from foretoken.config.method_registry import DraftingMethod
from foretoken.lab.launch.drafting import (
    DraftingSetup,
    LaunchEngine,
    Told,
    todays_word,
    told_keys,
    told_word,
)
from foretoken.lab.launch.launch import LaunchPart

_LOOK_UP = "NGRAM"
"""Its one look-up, for all of ours."""
_DSPARK = "DSPARK"


def _word(method: DraftingMethod) -> str:
    looks_up = method.drafts_with == "text" and method.is_built
    return todays_word("sglang", method) or (_LOOK_UP if looks_up else "")


def _tell(drafting: DraftingSetup) -> Told:
    method, count, keys = drafting.known, drafting.num_drafts, dict(drafting.keys)
    word = _word(method)
    yield from told_word("sglang", "--speculative-algorithm", word, method)
    if drafting.model:
        yield LaunchPart.flag("--speculative-draft-model-path", drafting.model)
    if method.drafts_with != "text" and not method.in_one_pass:
        yield LaunchPart.flag("--speculative-num-steps", keys.pop("tree_depth", count))
        yield LaunchPart.flag("--speculative-eagle-topk", keys.pop("tree_top_k", 1))
    if word == _DSPARK:
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
    word=_word,
    tell=_tell,
)
