"""Whole commands: a program, its model, the options of the server, and how it drafts.

Of engines with a command line; a script for OpenVINO GenAI is written elsewhere. The text itself is
that of `lint`, which gives commands back corrected.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, final

from foretoken.lab.launch.engines import tell
from foretoken.lab.launch.options import told_option
from foretoken.lab.launch.drafting import DraftingSetup, Told, Unsaid, in_groups
from foretoken.lab.launch.launch import Form, Launch, LaunchPart
from foretoken.lab.launch.shell import Word
from foretoken.lab.launch.write import written

_PROGRAMS = {
    "vllm": ("vllm", "serve"),
    "sglang": ("python", "-m", "sglang.launch_server"),
    "llama.cpp": ("llama-server",),
    "foretoken": ("foretoken", "serve"),
}
_MODEL_FLAG = {"sglang": "--model-path", "llama.cpp": "--model"}
"""Of engines whose model stands behind a flag; of the others it is a word by itself."""
_GGUF_KINDS = {
    "int8": "q8_0",
    "fp8": "q8_0",
    "int4": "q4_k_m",
    "nvfp4": "q4_k_m",
    "none": "bf16",
}
"""How a GGUF file of such weights is usually named."""
_CONVERTED = ("-bf16.gguf", "-fp16.gguf", "-fp32.gguf", "-q8_0.gguf")
"""How files end that llama.cpp's converter writes by itself."""


@final
@dataclass(frozen=True, slots=True)
class WrittenCommand:
    """A command or a script, ready to paste, and what it does not say."""

    text: str
    unsaid: tuple[Unsaid, ...] = ()

    @property
    def commented(self) -> str:
        """The text behind a comment for everything that it does not say."""
        return "\n".join([*(f"# {line}" for line in in_groups(self.unsaid)), self.text])


def write_command(
    engine: str, settings: Mapping[str, Any], speculation: DraftingSetup | None
) -> WrittenCommand:
    """The command that starts a server.

    Args:
        engine: one with a command line.
        settings: the model, and options under the names of `foretoken serve`.
        speculation: how it drafts; None: it does not.

    Raises:
        ConfigError: the engine has nothing like it, and would write something else.
    """
    told = Told()
    if engine == "llama.cpp":
        settings, speculation, told = _in_gguf(settings, speculation)
    flag = _MODEL_FLAG.get(engine)
    model = settings["model"]
    told = (Told.flag(flag, model) if flag else Told((LaunchPart(value=model),))) + told
    for name, value in settings.items():
        if name != "model":
            told += told_option(engine, name, value)
    if speculation is not None:
        told += tell(engine, speculation)
    elif engine == "foretoken":
        told += Told.flag("--speculative-config", "none")  # it speculates unless told otherwise
    if engine == "llama.cpp":
        told += Told.flag("--metrics")
    before = tuple(Word(word, "") for word in _PROGRAMS[engine])
    form = Form(variables="export")
    launch = Launch(engine=engine, parts=told.parts, before=before, form=form)
    return WrittenCommand(written(launch), told.unsaid)


def _in_gguf(
    settings: Mapping[str, Any], speculation: DraftingSetup | None
) -> tuple[dict[str, Any], DraftingSetup | None, Told]:
    """The same with GGUF files in place of models; a context holds all requests together."""
    kept = dict(settings)
    target, draft = str(kept["model"]), speculation.model if speculation else None
    kept["model"] = gguf_name(target, str(kept.pop("quantization", "none")))
    if "max_model_len" in kept:
        kept["max_model_len"] *= max(1, int(kept.get("max_num_seqs", 1)))
    told = _to_convert([(target, kept["model"])])
    if speculation is not None and draft:
        keys = dict(speculation.keys)
        file = gguf_name(draft, str(keys.pop("quantization", "none")))
        speculation = replace(speculation, model=file, keys=keys)
        told += _to_convert([(draft, file)])
    return kept, speculation, told


def _to_convert(files: Iterable[tuple[str, str]]) -> Told:
    lost = (Unsaid("model", _converted(model, file)) for model, file in files if file != model)
    return Told(unsaid=tuple(lost))


def _converted(model: str, file: str) -> str:
    by = "convert_hf_to_gguf.py writes it"
    if not file.endswith(_CONVERTED):
        by = "convert_hf_to_gguf.py and then llama-quantize write it"
    return f"{file} is {model} as llama.cpp's {by}"


def gguf_name(model: str, quantization: str) -> str:
    """The GGUF file of a model with such weights, as such files are usually named."""
    if model.endswith(".gguf"):
        return model
    kind = _GGUF_KINDS.get(quantization, quantization)
    return f"{model.rstrip('/').rsplit('/', 1)[-1]}-{kind}.gguf"
