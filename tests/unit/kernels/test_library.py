"""The kernels' library and pool. The guarded bugs: an item done twice or never, a stale library,
a mistyped FORETOKEN_KERNELS that silently chooses something."""

import ctypes
import importlib.util
import logging
import os
import platform
import re
import subprocess
import sys
from collections.abc import Sequence
from importlib import util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from foretoken import LLM, SamplingParams
from foretoken.errors import ConfigError
from foretoken.kernels import build, structures
from foretoken.kernels.library import (
    _BY_ARCHITECTURE,
    LEVELS,
    Library,
    describe_kernels,
    find_library,
)
from foretoken.kernels.threads import StepThreads
from foretoken.kernels.triton import found as triton_found
from foretoken.runtime.batch import Batch

TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)


@pytest.fixture
def library() -> Library:
    found = find_library()
    if found is None:
        pytest.skip("no kernels here")
    return found


def test_sources_compile_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    """Every other test of kernels would be skipped if they did not."""
    try:
        build.compiler()
    except build.BuildError:
        pytest.skip("no compiler here")
    assert build.build_library().is_file()
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("items", [0, 1, 2, 3, 64, 1000])
def test_every_item_is_done_once(library: Library, threads: int, items: int) -> None:
    before = library.handle.ft_threads()
    library.handle.ft_set_threads(threads)
    parallel = library.function("ft_parallel", (TASK, ctypes.c_void_p, ctypes.c_int64))
    try:
        for _ in range(20):
            done: list[tuple[int, int]] = []
            task = TASK(lambda _, item, worker, done=done: done.append((item, worker)))
            parallel(task, None, items)
            assert sorted(item for item, _ in done) == list(range(items))
            assert {worker for _, worker in done} <= set(range(threads))
    finally:
        library.handle.ft_set_threads(before)


def test_a_forked_child_has_a_pool_of_its_own(library: Library) -> None:
    code = f"""
import ctypes, os, sys
lib = ctypes.CDLL({library.handle._name!r})
TASK = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_int64, ctypes.c_int)
lib.ft_parallel.argtypes = (TASK, ctypes.c_void_p, ctypes.c_int64)
lib.ft_set_threads(3)
def run():
    done = []
    lib.ft_parallel(TASK(lambda c, i, w: done.append(i)), None, 50)
    return sorted(done) == list(range(50))
assert run()
child = os.fork()
if child == 0:
    os._exit(0 if run() else 1)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) or not run())
"""
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", code], timeout=60)
    assert done.returncode == 0


def test_level_is_at_most_the_machines(library: Library) -> None:
    assert LEVELS.index(library.level) <= library.handle.ft_cpu_level()
    assert library.handle.ft_level() == LEVELS.index(library.level)


def test_a_structure_of_another_size_is_named(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    structures.check_sizes(library.handle)
    right = structures.SIZES["ft_linear"]
    monkeypatch.setitem(structures.SIZES, "ft_linear", right + 8)
    with pytest.raises(AssertionError, match=f"ft_linear: {right + 8} bytes .*{right} in C"):
        structures.check_sizes(library.handle)


@pytest.mark.parametrize("name", ["ft_linear", "ft_of_python_alone"])
def test_a_structure_that_one_side_lacks_is_named(
    library: Library, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    if name in structures.SIZES:
        monkeypatch.delitem(structures.SIZES, name)
    else:
        monkeypatch.setitem(structures.SIZES, name, 8)
    with pytest.raises(AssertionError, match=name):
        structures.check_sizes(library.handle)


def test_every_structure_is_in_the_table() -> None:
    package = Path(build.__file__).parents[1]
    sources = [path.read_text("utf-8") for path in sorted(package.rglob("*.py"))]
    written = sum(source.count("(ctypes.Structure):") for source in sources)
    assert written == len(structures.STRUCTURES) + 1, "each in kernels/structures.py, and _Size"


def in_fresh_process(value: str) -> "subprocess.CompletedProcess[str]":
    """What a new interpreter says about its kernels with FORETOKEN_KERNELS=value."""
    code = "from foretoken.kernels.library import find_library as f; k = f(); print(k and k.level)"
    source = Path(build.FOLDER).parents[1]
    environment = {**os.environ, "FORETOKEN_KERNELS": value, "PYTHONPATH": str(source)}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


def test_the_switch(library: Library) -> None:
    assert in_fresh_process("off").stdout.strip() == "None"
    assert in_fresh_process("portable").stdout.strip() == "portable"
    wrong = in_fresh_process("avx1024")
    assert ConfigError.__name__ in wrong.stderr
    assert "FORETOKEN_KERNELS: got 'avx1024'; allowed: auto, off" in wrong.stderr


def test_another_source_is_another_library(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    before = build.library_path()
    for path in build.NATIVE.glob("*.[ch]"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(build, "NATIVE", tmp_path)
    assert build.library_path() == before
    (tmp_path / "cpu.c").write_text("// changed\n")
    assert build.library_path() != before


def test_an_edit_compiles_what_it_touches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    try:
        build.compiler()
    except build.BuildError:
        pytest.skip("no compiler here")
    native = tmp_path / "native"
    native.mkdir()
    (native / "one.c").write_text('#include "one.h"\nint one(void) { return ONE; }\n')
    (native / "one.h").write_text('#include "deep.h"\n#define ONE DEEP\n')
    (native / "deep.h").write_text("#define DEEP 1\n")
    (native / "two.c").write_text("int two(void) { return 2; }\n")
    monkeypatch.setattr(build, "NATIVE", native)
    monkeypatch.setattr(build, "BUILT", tmp_path / "lib")

    def objects() -> dict[str, str]:
        build.build_library()
        found = sorted(path.name for path in (tmp_path / "lib" / "objects").iterdir())
        return dict(name.split("-") for name in found)

    first = objects()
    (native / "deep.h").write_text("#define DEEP 3\n")
    second = objects()
    assert set(first) == set(second) == {"one", "two"}
    assert first["one"] != second["one"] and first["two"] == second["two"]


def test_levels_are_numbered_as_in_c() -> None:
    header = (build.NATIVE / "foretoken.h").read_text("utf-8")
    enums = [re.findall(r"FT_(\w+)", names) for names in re.findall(r"enum \{(.*?)\}", header)]
    (x86,) = [names for names in enums if names[0] == "PORTABLE"]
    (arm,) = [names for names in enums if names[0] == "NEON"]
    assert _BY_ARCHITECTURE["x86_64"] == tuple(name.lower() for name in x86)
    assert _BY_ARCHITECTURE["aarch64"] == ("portable", *(name.lower() for name in arm))


@pytest.mark.parametrize("target", ["aarch64-linux-gnu", "x86_64-pc-linux-gnu", "riscv64-linux"])
def test_flags_are_of_what_the_compiler_compiles_for(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, target: str
) -> None:
    """A cross compiler got this machine's flags, and then, since it refused them, none."""
    fake, said = tmp_path / "cc", tmp_path / "said"
    fake.write_text(f"""#!/bin/sh
[ "$1" = -dumpmachine ] && {{ echo {target}; exit; }}
echo "$@" >> {said}
while [ "$1" != -o ]; do shift; done
: > "$2"
""")
    fake.chmod(0o755)
    monkeypatch.setenv("CC", str(fake))
    monkeypatch.setattr(build, "BUILT", tmp_path / "lib")
    build.build_library()
    compiled = said.read_text().splitlines()

    def flags(stem: str) -> list[str]:
        (line,) = [line for line in compiled if f"/{stem}.c " in line]
        return [word for word in line.split() if word.startswith("-m")]

    machine = target.split("-")[0]
    assert flags("linear_neon") == flags("linear_portable") == flags("cpu") == []
    assert ("-march=armv8.2-a+dotprod" in flags("linear_neondot")) == (machine == "aarch64")
    assert ("+bf16+i8mm" in "".join(flags("attention_neonbf16"))) == (machine == "aarch64")
    assert ("-mavx2" in flags("linear_avx2")) == (machine == "x86_64")
    assert ("-mavxvnni" in flags("linear_avxvnni")) == (machine == "x86_64")
    assert "-mavxvnni" not in flags("linear_avx2")
    assert ("-mavx512bf16" in flags("rows_avx512bf16")) == (machine == "x86_64")


def test_an_older_compiler_leaves_a_set_out_and_an_error_is_an_error(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A mistake in code of one instruction set once left that set out without a word."""
    try:
        real = build.compiler()
    except build.BuildError:
        pytest.skip("no compiler here")
    if build.architecture(platform.machine()) != "x86_64":
        pytest.skip("flags of x86")
    native, older = tmp_path / "native", tmp_path / "cc"
    native.mkdir()
    one = native / "one_avx2.c"
    one.write_text("#ifdef __AVX2__\nint one(void) { return ONE; }\n#endif\n")
    monkeypatch.setattr(build, "NATIVE", native)
    monkeypatch.setattr(build, "BUILT", tmp_path / "lib")

    def compile_by(refused: str) -> None:
        """As if compiler or assembler refused command lines of this pattern."""
        older.write_text(f"""#!/bin/sh
case "$*" in {refused}) echo "no such instruction" >&2; exit 1;; esac
exec {real} "$@"
""")
        older.chmod(0o755)
        monkeypatch.setenv("CC", str(older))
        assert build.build_library().is_file()

    with pytest.raises(build.BuildError, match="ONE"):
        build.build_library()
    compile_by("*-mavx2*")
    one.write_text("#ifdef __AVX2__\nint one(void) { return 1; }\n#endif\n")
    compile_by("*.o*-mavx2*")  # It makes assembly, but no object.


def test_no_compiler_is_said(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", "a-compiler-that-is-not-there")
    monkeypatch.setattr(build, "BUILT", tmp_path)
    with pytest.raises(build.BuildError, match="a-compiler-that-is-not-there not found"):
        build.build_library()


def test_without_a_library_one_line_says_what_it_costs_and_what_helps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """Installed without a compiler; a compiler that fails; and what `foretoken info` says."""
    monkeypatch.setattr(build, "library_path", lambda: tmp_path / "none.so")
    monkeypatch.delenv("FORETOKEN_KERNELS", raising=False)
    monkeypatch.setattr(build, "FOLDER", tmp_path / "a" / "b" / "c")
    assert "installed without a C compiler" in describe_kernels()
    assert find_library.__wrapped__() is None
    monkeypatch.undo()
    monkeypatch.setattr(build, "library_path", lambda: tmp_path / "none.so")
    monkeypatch.setattr(build, "compiler", lambda: "false")
    monkeypatch.setattr(build, "BUILT", tmp_path)
    monkeypatch.delenv("FORETOKEN_KERNELS", raising=False)
    assert describe_kernels() == "compiled at the first run"
    assert find_library.__wrapped__() is None
    warned = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert len(warned) == 2, warned
    for line in warned:
        assert "many times slower" in line and "Install gcc or clang" in line and "\n" not in line
        assert "--no-cache-dir" in line
    assert "installed without a C compiler" in warned[0] and "failed" in warned[1]


def test_inside_pytorch_has_one_thread_and_the_pool_its_own(library: Library) -> None:
    outside, most = torch.get_num_threads(), library.cores
    library.use_threads(1)
    with StepThreads(library, most):
        assert torch.get_num_threads() == 1
        assert library.handle.ft_threads() == most
    assert torch.get_num_threads() == outside


def test_an_error_gives_threads_back(library: Library) -> None:
    outside = torch.get_num_threads()
    torch.set_num_threads(2)
    with pytest.raises(ValueError), StepThreads(library, 2):
        raise ValueError
    assert torch.get_num_threads() == 2
    torch.set_num_threads(outside)


def test_without_kernels_nothing_changes() -> None:
    outside = torch.get_num_threads()
    torch.set_num_threads(2)
    with StepThreads(None, 1):
        assert torch.get_num_threads() == 2
    torch.set_num_threads(outside)


def test_one_thread_of_pytorch_in_every_step(
    library: Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The pool keeps the number that PyTorch had when the engine was made."""
    outside = torch.get_num_threads()
    torch.set_num_threads(2)
    with LLM("demo", speculative_config={"method": "ngram"}) as llm:
        seen: list[tuple[int, int]] = []
        runner = llm._engine.parts.runner
        settle = runner.settle

        def watched(batch: Batch, accepted: Sequence[tuple[int, ...] | None]) -> None:
            seen.append((torch.get_num_threads(), library.handle.ft_threads()))
            settle(batch, accepted)

        monkeypatch.setattr(runner, "settle", watched)
        torch.set_num_threads(3)
        llm.generate("def f():\n", SamplingParams(max_tokens=4), use_tqdm=False)
        assert seen and set(seen) == {(1, min(2, library.cores))}
        assert torch.get_num_threads() == 3
    torch.set_num_threads(outside)


# What `make check-arm` concludes. The guarded bugs: bits that differ and are not named, bits that
# may differ and are, and missing tools that look like a failure.
ROOT = Path(__file__).parents[3]


@pytest.fixture
def fuzz(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = util.spec_from_file_location("fuzz_kernels", ROOT / "scripts" / "fuzz_kernels.py")
    assert spec is not None and spec.loader is not None
    module = util.module_from_spec(spec)
    spec.loader.exec_module(module)
    monkeypatch.setattr(module.platform, "machine", lambda: "x86_64")
    return module


def hashes(*levels: str) -> list[dict[str, str]]:
    """Of each level the three hashes, one letter each."""
    return [dict(zip(("whole", "fused", "pairs"), level, strict=True)) for level in levels]


def test_what_is_promised_is_compared(fuzz: ModuleType) -> None:
    x86 = hashes("abc", "ade", "axy")
    assert fuzz.differences(x86, hashes("abc", "ade", "ade", "adz")) == []
    (whole,) = fuzz.differences(x86, hashes("abc", "ade", "nde"))
    assert whole == "level 2 of aarch64: integer weights"
    (plain,) = fuzz.differences(x86, hashes("anc", "ade"))
    assert plain == "level 0 of aarch64 and 0 of this machine: fused"
    (newest,) = fuzz.differences(x86, hashes("abc", "ade", "ade", "anz"))
    assert newest == "level 3 of aarch64 and 1 of this machine: fused"
    (pairs,) = fuzz.differences(x86, hashes("abc", "ade", "adn", "adz"))
    assert pairs == "level 2 of aarch64 and 1 of this machine: pairs"


def test_another_machine_has_no_avx2_to_compare_with(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fuzz.platform, "machine", lambda: "riscv64")
    assert fuzz.differences(hashes("abc", "axy"), hashes("abc", "ade")) == []
    assert len(fuzz.differences(hashes("abc", "axy"), hashes("nbc", "ade"))) == 1


def test_lines_of_the_program_are_read(fuzz: ModuleType, tmp_path: Path) -> None:
    program = tmp_path / "across"
    program.write_text("#!/bin/sh\necho across: level 0 whole 1a fused 2b pairs 3c\n")
    program.chmod(0o755)
    assert fuzz.hashes_of(program, []) == [{"whole": "1a", "fused": "2b", "pairs": "3c"}]


def test_missing_tools_are_a_skip_that_says_what_to_install(
    fuzz: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fuzz, "EMULATORS", ("an-emulator-that-is-not-there",))
    assert fuzz.emulated([]) == 0
    assert "skipped" in (said := capsys.readouterr().out)
    assert "gcc-aarch64-linux-gnu" in said and "qemu-user" in said


# Where Triton kernels may run. The guarded bugs: a GPU that cannot run them, or a machine that
# cannot build their launcher, is given them; `off` is not heeded.
@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine where everything is there; nothing is remembered from test to test."""
    monkeypatch.delenv("FORETOKEN_KERNELS", raising=False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (9, 0))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "triton" or None)
    monkeypatch.setattr(build, "compiler", lambda: "cc")
    monkeypatch.setattr(triton_found, "has_triton", triton_found.has_triton.__wrapped__)
    monkeypatch.setattr(triton_found, "say_which", triton_found.say_which.__wrapped__)
    return monkeypatch


def test_all_is_there(gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    assert triton_found.has_triton()
    with caplog.at_level(logging.INFO, "foretoken"):
        triton_found.say_which()
    assert "by Triton kernels" in caplog.text and "no time" in caplog.text


@pytest.mark.parametrize("lacking", ["off", "no triton", "8.0", "C compiler"])
def test_something_is_missing(
    lacking: str, gpu: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def no_compiler() -> str:
        raise build.BuildError("none")

    if lacking == "off":
        gpu.setenv("FORETOKEN_KERNELS", "off")
    elif lacking == "no triton":
        gpu.setattr(importlib.util, "find_spec", lambda name: None)
    elif lacking == "8.0":
        gpu.setattr(torch.cuda, "get_device_capability", lambda: (7, 5))
    else:
        gpu.setattr(build, "compiler", no_compiler)
    assert not triton_found.has_triton()
    with caplog.at_level(logging.INFO, "foretoken"):
        triton_found.say_which()
    assert "multiplied out" in caplog.text and lacking in caplog.text


def test_no_gpu(gpu: pytest.MonkeyPatch) -> None:
    gpu.setattr(torch.cuda, "is_available", lambda: False)
    assert not triton_found.has_triton()
