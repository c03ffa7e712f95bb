"""The words of a command as a launch: which engine it starts, its options, the words between.

Knows the names of servers and of their images. Starts nothing.
"""

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from foretoken.config.other_engines import find_other
from foretoken.lab.launch.launch import ENGINES, Form, Launch, LaunchPart
from foretoken.lab.launch.shell import ASSIGNED, Word
from foretoken.lab.launch.variables import first_word, owner_of, set_before, words_that_set

FLAG = re.compile(r"^--?[a-zA-Z]")
_SERVERS = {
    "llama-server": "llama.cpp",
    "llama-cli": "llama.cpp",
    "llama-speculative": "llama.cpp",
    "llama-server.exe": "llama.cpp",
    "trtllm-serve": "tensorrt-llm",
}
_MODULES = {"vllm.entrypoints": "vllm", "sglang.launch_server": "sglang"}
IMAGES = {
    "vllm/vllm-openai": "vllm",
    "vllm-openai": "vllm",
    "lmsysorg/sglang": "sglang",
    "ggml-org/llama.cpp": "llama.cpp",
    "ggerganov/llama.cpp": "llama.cpp",
    "tensorrt-llm/release": "tensorrt-llm",
}
"""Parts of the names of images, and the engine that they start."""
_COMPLETED = {
    ("sglang", "speculative-algo"): "speculative-algorithm",
    ("sglang", "tensor-parallel"): "tensor-parallel-size",
    ("sglang", "mem-fraction"): "mem-fraction-static",
    ("vllm", "tensor-parallel"): "tensor-parallel-size",
    ("vllm", "gpu-memory-util"): "gpu-memory-utilization",
    ("vllm", "speculative-conf"): "speculative-config",
}
"""Beginnings that people type, of options that argparse completes."""
_SWITCH = re.compile(r"(enable|disable|no|use|skip)-|trust-remote-code$|enforce-eager$|metrics$")
_DOCKER_SWITCHES = ("--rm", "-d", "--detach", "-i", "--interactive", "-t", "--tty", "--init",
             "--privileged")  # fmt: skip
"""Options of `docker run` that have no value."""
_MOST_LOOSE_WORDS = 2
"""Words without an option that may stand beside options alone; more make a sentence."""
_REDIRECTS = re.compile(r"\d*[<>]|&>|&$")


def engine_of_image(image: str) -> str:
    """The engine whose server an image starts, `unknown` if that is not known."""
    return next((engine for part, engine in IMAGES.items() if part in image), "unknown")


def launch_of(
    words: Sequence[Word], engine: str = "auto", *, loose: bool = False, form: Form | None = None
) -> Launch | None:
    """The launch that a command is; None if it starts no server.

    Args:
        words: the command.
        engine: whose rules count; `auto`: by what the command says.
        loose: whether options alone are enough, without the name of a server.
        form: what the words were written in.
    """
    own, num_before = _server(words)
    if own == "unknown":  # what it sets for an unknown program says whose options these are
        num_before = words.index(first_word(words))
    num_words = next((i for i, word in enumerate(words) if _redirects(word)), len(words))
    if own == "unknown" and not loose:
        return None
    parts = tuple(_parts(words[num_before:num_words]))
    options = {part.name: part.value for part in parts if part.name}
    before = words[:num_before]
    if own == "unknown":
        own = guess_engine(options) if engine == "auto" else engine
        own = next(_owners(before), own) if own == "unknown" else own
        is_prose = FLAG.match(words[0].text) and len(parts) - len(options) > _MOST_LOOSE_WORDS
        if own == "unknown" or not (options or any(_owners(before))) or is_prose:
            return None
    elif engine != "auto":
        own = engine
    return Launch(
        engine=own,
        parts=(*set_before(before, own), *(_completed(part, own) for part in parts)),
        before=tuple(before),
        after=tuple(words[num_words:]),
        form=form or Form(),
    )


def _owners(words: Sequence[Word]) -> Iterator[str]:
    """The engines that variables before a command are for."""
    found = ((one.name, owner_of(one.name)) for one in words_that_set(words))
    return (own for name, own in found if own and find_other("variables", name, own))


def _redirects(word: Word) -> bool:
    return bool(_REDIRECTS.match(word.raw))


def guess_engine(options: Mapping[str, object]) -> str:
    """Whose options these are, by those about speculation."""
    for name in options:
        head = name.partition(".")[0]
        for engine in ENGINES[:-1]:
            row = find_other("flags", head, engine)
            if row is not None and len(head) > 4:
                return engine
    if any(name in ("md", "ngl", "hfd") for name in options):
        return "llama.cpp"
    if any(name.startswith(("spec", "tensor-parallel", "ngram-prompt")) for name in options):
        return "vllm"
    return "unknown"


def _server(words: Sequence[Word]) -> tuple[str, int]:
    """The engine that a command starts, and how many words there are up to its name.

    The last name counts: an image comes before the command that runs in it.
    """
    found = ("unknown", 0)
    for index, word in enumerate(words):
        if ASSIGNED.match(word.text):
            continue
        name = word.text.rsplit("/", 1)[-1]
        following = words[index + 1].text if index + 1 < len(words) else ""
        if name in ("vllm", "foretoken", "sglang") and following == "serve":
            found = name, index + 2
        elif name in _SERVERS:
            extra = int(name == "trtllm-serve" and following == "serve")
            found = _SERVERS[name], index + 1 + extra
        elif any(word.text.startswith(module) for module in _MODULES):
            module = next(module for module in _MODULES if word.text.startswith(module))
            found = _MODULES[module], index + 1
        elif found[0] == "unknown" and engine_of_image(word.text) != "unknown":
            if index == 0 or not _waits_for_value(words[index - 1].text):
                found = engine_of_image(word.text), index + 1
    return found


def _waits_for_value(word: str) -> bool:
    """Whether the word behind one of `docker run` may be its value and no image."""
    has_its_own = "=" in word or re.match(r"-\w\w", word)  # `-p80:80`; or two switches, `-it`
    return bool(FLAG.match(word)) and not has_its_own and word not in _DOCKER_SWITCHES


def _parts(words: Sequence[Word]) -> list[LaunchPart]:
    """Options with their values, and the words that belong to none."""
    found: list[LaunchPart] = []
    waiting = list(words)
    while waiting:
        word = waiting.pop(0)
        if not FLAG.match(word.text):
            found.append(LaunchPart(value=word.text, raw=word.raw))
            continue
        flag, equals, value = word.text.partition("=")
        name = flag.lstrip("-")
        name = name.replace("_", "-") if "." not in name else name
        if equals:
            raw = word.raw.partition("=")[2] if word.raw.startswith(flag + "=") else ""
            found.append(LaunchPart(name=name, written=flag, value=value, raw=raw))
        elif waiting and _is_value(name, waiting[0].text):
            given = waiting.pop(0)
            found.append(LaunchPart(name=name, written=flag, value=given.text, raw=given.raw))
        else:
            found.append(LaunchPart(name=name, written=flag))
    return found


def _completed(part: LaunchPart, engine: str) -> LaunchPart:
    """An option by its whole name."""
    return replace(part, name=_COMPLETED.get((engine, part.name), part.name))


def _is_value(name: str, text: str) -> bool:
    """Whether a word behind an option is its value."""
    if FLAG.match(text):
        return False
    if _SWITCH.match(name):
        return text.lower() in ("true", "false") or text.replace(".", "").isdigit()
    return True
