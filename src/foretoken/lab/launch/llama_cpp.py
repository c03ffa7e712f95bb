"""llama.cpp's server: told by a type of drafts, with flags of its own for each look-up."""

from foretoken.config.method_registry import DraftingMethod, NgramSettings
from foretoken.lab.launch.drafting import (
    DraftingSetup,
    LaunchEngine,
    Told,
    todays_word,
    told_keys,
    told_word,
)
from foretoken.lab.launch.launch import LaunchPart

_CLOSEST = {"suffix": "ngram-map-k"}
"""Methods that it has not, and the word for what is most like them."""


def _word(method: DraftingMethod) -> str:
    return todays_word("llama.cpp", method) or _CLOSEST.get(method.name, "")


def _tell(drafting: DraftingSetup) -> Told:
    word, given, keys = _word(drafting.known), dict(drafting.flags), dict(drafting.keys)
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
    word=_word,
    tell=_tell,
)
