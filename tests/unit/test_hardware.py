"""What is read of the machine, and what `auto` comes to on it. The guarded bugs: a container's
limits are not seen, a system that says nothing."""

import ctypes
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from foretoken import hardware, placement
from foretoken.checkpoint import packaged_model
from foretoken.config import EngineConfig, resolve
from foretoken.config.memory import Drafting, HeadMemory, ModelMemory
from foretoken.config.resolve import ResolvedConfig
from foretoken.engine import wiring
from foretoken.errors import ConfigError, NotYetError
from foretoken.hardware import Gpus, Hardware, anonymous_memory, map_file, usable_cores
from foretoken.placement import cores_of, keep_to, keeps_to_one_node, numa_nodes, usable_nodes
from foretoken.shape import ModelShape
from foretoken.shape.memory_formula import RANK_BYTES, WeightCounts
from foretoken.shape.mixtures.experts import Experts


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in the place of /: what is not written there is not there."""
    monkeypatch.setattr(hardware, "Path", lambda path: tmp_path / str(path).lstrip("/"))
    return tmp_path


def write(root: Path, **contents: str) -> None:
    """`cpu_max`: the cgroup's cpu.max, and so on."""
    for name, content in contents.items():
        folder = root / ("proc" if name in ("cpuinfo", "meminfo") else "sys/fs/cgroup")
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name.replace("_", ".")).write_text(content)


def cores(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: set(range(count)))


@pytest.mark.parametrize(
    ("quota", "expected"),
    [("max 100000", 8), ("150000 100000", 2), ("50000 100000", 1), ("1600000 100000", 8)],
)
def test_cores_of_a_container(
    quota: str, expected: int, files: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cores(8, monkeypatch)
    write(files, cpu_max=quota)
    assert usable_cores() == expected


def test_memory_of_a_container(files: Path) -> None:
    write(files, meminfo="MemTotal: 9000 kB\nMemAvailable: 4000 kB\n")
    assert Hardware.detect().free_memory == 4000 << 10
    write(files, memory_max="max", memory_current="5")
    assert Hardware.detect().free_memory == 4000 << 10
    write(files, memory_max="3000000", memory_current="1000000")
    assert Hardware.detect().free_memory == 2_000_000
    write(files, memory_current="4000000")
    assert Hardware.detect().free_memory == 0, "more is used than is allowed"
    write(files, memory_stat="anon 7\ninactive_file 1400000\nactive_file 100000\nfile 9000000")
    assert Hardware.detect().free_memory == 500_000, "the kernel forgets files first"


def test_groups_within_groups(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Slices of systemd and jobs of a batch system, of both versions: the tightest counts. A path
    that a container does not see is its root."""
    cores(8, monkeypatch)
    names = files / "proc" / "self" / "cgroup"
    names.parent.mkdir(parents=True)
    names.write_text("4:memory:/jobs/one\n2:cpu,cpuacct:/jobs/one\n0::/user.slice/own.scope\n")
    mounted = files / "sys" / "fs" / "cgroup"
    said = {
        "user.slice/memory.max": "5000000",
        "user.slice/memory.current": "1000000",
        "user.slice/own.scope/memory.max": "max",
        "user.slice/own.scope/memory.current": "900000",
        "user.slice/own.scope/cpu.max": "max 100000",
        "memory/jobs/one/memory.limit_in_bytes": "9223372036854771712",
        "memory/jobs/one/memory.usage_in_bytes": "900000",
        "cpu/jobs/one/cpu.cfs_quota_us": "-1",
        "cpu/jobs/one/cpu.cfs_period_us": "100000",
    }

    def say() -> tuple[int, int]:
        for name, text in said.items():
            (mounted / name).parent.mkdir(parents=True, exist_ok=True)
            (mounted / name).write_text(text)
        found = Hardware.detect()
        return found.free_memory, found.num_cores

    assert say() == (4_000_000, 8)
    said["memory/jobs/memory.limit_in_bytes"] = "3000000"
    said["memory/jobs/memory.usage_in_bytes"] = "2000000"
    said["memory/jobs/memory.stat"] = "total_inactive_file 400000"
    said["cpu/jobs/cpu.cfs_quota_us"] = "250000"
    said["cpu/jobs/cpu.cfs_period_us"] = "100000"
    assert say() == (1_400_000, 3)
    names.write_text("4:memory:/elsewhere\n2:cpu:/elsewhere\n0::/elsewhere\n")
    assert say() == (8 << 30, 8), "nothing of the others' counts"
    said["memory/memory.limit_in_bytes"], said["memory/memory.usage_in_bytes"] = "700000", "1"
    assert say() == (699_999, 8)
    names.write_text("garbage\n\n0::/../..\n")
    assert say() == (699_999, 8)


@pytest.mark.parametrize(
    ("flags", "expected"), [("fpu avx2", False), ("fpu avx512_bf16", True), ("amx_bf16", True)]
)
def test_what_the_processor_can(flags: str, expected: bool, files: Path) -> None:
    write(files, cpuinfo=f"model name\t: A CPU\nflags\t: {flags}\n\nmodel name\t: other\n")
    found = Hardware.detect()
    assert found.cpu_name == "A CPU" and found.has_bf16 is expected


@pytest.mark.parametrize(("features", "expected"), [("asimd bf16 i8mm", True), ("asimd", False)])
def test_what_an_arm_processor_can(features: str, expected: bool, files: Path) -> None:
    write(files, cpuinfo=f"processor\t: 0\nFeatures\t: {features}\n")
    assert Hardware.detect().has_bf16 is expected


def test_a_system_that_says_nothing(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sched_getaffinity")
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    found = Hardware.detect()
    assert (found.cpu_name, found.num_cores, found.cpu_flags) == ("unknown", 1, frozenset())
    assert found.free_memory == 8 << 30
    assert anonymous_memory() is None


def test_without_glibc_the_heap_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    with hardware.lean_heap():
        pass


# Cores that a process keeps to. The guarded bugs: a list that is read as another one, a process
# that goes on with all cores although it was told otherwise.
@pytest.fixture
def nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A machine with two nodes of cores and one of memory alone."""
    for node, text in {0: "0-3,8-11\n", 1: "4-7,12-15\n", 2: "\n"}.items():
        folder = tmp_path / f"node{node}"
        folder.mkdir()
        (folder / "cpulist").write_text(text)
    monkeypatch.setattr(placement, "NODES", tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0", {0}), ("0-2", {0, 1, 2}), ("0-1,4-5", {0, 1, 4, 5}), ("3, 1,1", {1, 3})],
)
def test_lists(text: str, expected: set[int]) -> None:
    assert cores_of(text) == expected


@pytest.mark.parametrize("text", ["", "a", "2-1", "1-", "-1", "0,,1", "0-99999999999", "numa"])
def test_what_names_no_core(text: str) -> None:
    with pytest.raises(ConfigError, match="--cpus"):
        cores_of(text)


def test_nodes(nodes: Path) -> None:
    assert set(numa_nodes()) == {0, 1}
    assert cores_of("numa:1") == {4, 5, 6, 7, 12, 13, 14, 15}
    for missing in ("numa:2", "numa:", "numa:x"):
        with pytest.raises(ConfigError, match=r"numa: and one of 0, 1"):
            cores_of(missing)


@pytest.mark.parametrize(
    ("allowed", "expected"),
    [
        (set(range(16)), {0: {0, 1, 2, 3, 8, 9, 10, 11}, 1: {4, 5, 6, 7, 12, 13, 14, 15}}),
        ({2, 5}, {0: {2}, 1: {5}}),
        ({0, 1}, {0: {0, 1}}),
    ],
)
def test_nodes_of_what_is_allowed(
    nodes: Path, monkeypatch: pytest.MonkeyPatch, allowed: set[int], expected: dict[int, set[int]]
) -> None:
    """By a container or `--cpus`; a node of which nothing is left is none."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: allowed)
    assert usable_nodes() == expected
    assert keeps_to_one_node() == (len(expected) == 1)


def test_a_system_without_nodes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(placement, "NODES", tmp_path)
    assert numa_nodes() == {0: frozenset(range(os.cpu_count() or 1))}
    assert not keeps_to_one_node()


def test_cores_that_are_not_allowed() -> None:
    most = max(os.sched_getaffinity(0))
    with pytest.raises(ConfigError, match=str(most + 1)):
        keep_to(frozenset({most, most + 1}))


@pytest.mark.slow
@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="one core")
def test_threads_started_before_and_later_keep_to_them() -> None:
    code = (
        "import os, sys, threading; from foretoken.placement import *; found = []\n"
        "done = threading.Event(); early = threading.Thread(target=done.wait, daemon=True)\n"
        "early.start()\n"
        "def look():\n"
        "    one = threading.Thread(target=lambda: found.extend(os.sched_getaffinity(0)))\n"
        "    one.start(); one.join()\n"
        "keep_to(cores_of(sys.argv[1]))\n"
        "import torch; look(); print(*found, *os.sched_getaffinity(early.native_id))\n"
        "print(torch.get_num_threads()); done.set()"
    )
    core = max(os.sched_getaffinity(0))
    source = str(Path(placement.__file__).parents[1])
    done = subprocess.run(
        [sys.executable, "-c", code, str(core)],
        capture_output=True, text=True, check=True, timeout=120,
        env={**os.environ, "PYTHONPATH": source},
    )  # fmt: skip
    assert done.stdout.split() == [str(core), str(core), "1"]


DEMO = ModelShape.from_config(packaged_model("demo"))
OTHERS = replace(DEMO, rope=None)
"""Run by transformers."""
NONE: tuple[str, ...] = ()
KERNELS = ("cpu",)
AVX2, AVX512 = frozenset({"avx2", "fma"}), frozenset({"avx512_bf16"})


def resolved(
    flags: frozenset[str], packs: tuple[str, ...], shape: ModelShape = DEMO, dtype: str = "auto"
) -> ResolvedConfig:
    machine = Hardware(cpu_name="any", num_cores=2, free_memory=2**34, cpu_flags=flags)
    return resolve(EngineConfig(model="demo", dtype=dtype), machine, shape, packs=packs)


@pytest.mark.parametrize(
    ("flags", "packs", "dtype", "invariant"),
    [
        (AVX512, KERNELS, "bfloat16", True),
        (AVX2, KERNELS, "bfloat16", True),
        (AVX512, NONE, "bfloat16", True),
        (AVX2, NONE, "float32", False),
    ],
)
def test_kernels_need_no_instruction_for_16_bits(
    flags: frozenset[str], packs: tuple[str, ...], dtype: str, invariant: bool
) -> None:
    found = resolved(flags, packs)
    assert (found.dtype, found.batch_invariant) == (dtype, invariant)


@pytest.mark.parametrize(("packs", "invariant"), [(KERNELS, True), (NONE, False)])
def test_a_float32_checkpoint_stays_so(packs: tuple[str, ...], invariant: bool) -> None:
    found = resolved(AVX2, packs, replace(DEMO, dtype="float32"))
    assert (found.dtype, found.batch_invariant) == ("float32", invariant)


def test_kernels_have_no_float16() -> None:
    assert not resolved(AVX2, KERNELS, dtype="float16").batch_invariant


@pytest.mark.parametrize(("flags", "dtype"), [(AVX2, "float32"), (AVX512, "bfloat16")])
def test_what_transformers_runs_needs_the_instruction(flags: frozenset[str], dtype: str) -> None:
    """Between our layers are PyTorch's operations."""
    found = resolved(flags, KERNELS, OTHERS)
    assert found.dtype == dtype and found.batch_invariant == (dtype == "bfloat16")


EVEN = replace(DEMO, num_attention_heads=8, num_key_value_heads=2, vocab_size=4096)
"""By 2 and 4, in everything that NCCL gathers; at 4 ranks two have each key head."""
MIXED = Experts(
    count=8, used=2, width=64, layers=(True,) * EVEN.num_hidden_layers, shared="always",
    shared_width=10,
)  # fmt: skip
FOUR = Gpus(count=4, free_memory=4 << 30, has_nccl=True)
CPU = Hardware(cpu_name="any", num_cores=2, free_memory=2**34, cpu_flags=frozenset({"avx512_bf16"}))


def resolve_for(
    shape: ModelShape = EVEN,
    *,
    gpus: Gpus | None = FOUR,
    packs: tuple[str, ...] = ("cpu",),
    drafting: Drafting | None = None,
    **settings: Any,
) -> ResolvedConfig:
    config = EngineConfig(model="demo", **settings)
    return resolve(config, CPU, shape, drafting=drafting, packs=packs, gpus=gpus)


@pytest.mark.parametrize("probed", [True, False])
@pytest.mark.parametrize(("dtype", "ranks"), [("auto", 1), ("float32", 1), ("auto", 2)])
def test_a_gpu_keeps_bits_where_a_probe_found_it_so(dtype: str, ranks: int, probed: bool) -> None:
    """In 16 bits, also of several; said either way. Who asks for it has it anywhere."""
    gpus = replace(FOUR, name="A card, compute capability 9.0", keeps_bits=probed)
    found = resolve_for(gpus=gpus, dtype=dtype, tensor_parallel_size=ranks)
    assert found.batch_invariant == found.has_bits_of_one == (probed and dtype == "auto")
    words = "on" if found.batch_invariant else "off (same tokens up to rounding)"
    assert f"batch_invariant {words}" in found.describe()
    assert "on cuda (A card, compute capability 9.0)" in found.describe()
    assert resolve_for(gpus=gpus, dtype=dtype, batch_invariant=True).batch_invariant
    mixed = resolve_for(
        replace(EVEN, experts=MIXED), gpus=gpus, dtype=dtype, tensor_parallel_size=ranks
    )
    assert mixed.has_bits_of_one == found.has_bits_of_one


def test_a_gpu_that_pytorch_has_no_code_for() -> None:
    """Refused where it is asked for, and left alone where it is not."""
    why = "compute capability 5.0; this PyTorch is built for sm_75, sm_90"
    gpus = replace(FOUR, why_not=why)
    assert resolve_for(gpus=gpus).device == "cpu"
    with pytest.raises(ConfigError, match=r"device: got 'cuda'; allowed: cpu: compute capab") as e:
        resolve_for(gpus=gpus, device="cuda")
    assert why in str(e.value)


@pytest.mark.parametrize(
    ("capability", "built", "fits"),
    [
        ((9, 0), ["sm_80", "sm_90"], True),
        ((8, 9), ["sm_80", "sm_90"], True),
        ((9, 0), ["sm_80", "compute_80"], True),
        ((7, 0), ["sm_75", "sm_80"], False),
        ((12, 0), ["sm_80", "sm_90a"], False),
    ],
)
def test_which_gpus_pytorch_has_code_for(
    capability: tuple[int, int], built: list[str], fits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built)
    assert (wiring._why_not(*capability) is None) == fits


@pytest.mark.parametrize("ranks", [2, 4])
def test_devices_that_are_there_take_a_rank_each(ranks: int) -> None:
    found = resolve_for(tensor_parallel_size=ranks)
    assert found.device == "cuda" and not found.batch_invariant
    assert f"on cuda in {ranks} processes (same tokens as one up to rounding)" in found.describe()


@pytest.mark.parametrize(
    ("given", "field", "said"),
    [
        ({"tensor_parallel_size": 8}, "tensor_parallel_size", "1 to 4, the CUDA devices"),
        (
            {"tensor_parallel_size": 2, "gpus": replace(FOUR, has_nccl=False)},
            "tensor_parallel_size",
            "built without NCCL",
        ),
        ({"tensor_parallel_size": 2, "packs": ()}, "tensor_parallel_size", "one is lost"),
        (
            {"tensor_parallel_size": 2, "shape": replace(EVEN, vocab_size=4095)},
            "tensor_parallel_size",
            "divides the model's vocabulary 4095",
        ),
        (
            {
                "tensor_parallel_size": 4,
                "shape": replace(EVEN, num_attention_heads=6, intermediate_size=510),
            },
            "tensor_parallel_size",
            "query heads 6 and intermediate size 510",
        ),
        (
            {"tensor_parallel_size": 4, "shape": replace(EVEN, experts=MIXED)},
            "tensor_parallel_size",
            "width of the shared expert 10",
        ),
        (
            {"tensor_parallel_size": 2, "shape": replace(EVEN, num_key_value_heads=3)},
            "tensor_parallel_size",
            "key heads 3",
        ),
        ({"pipeline_parallel_size": 2}, "pipeline_parallel_size", "1 on cuda"),
    ],
)
def test_what_devices_cannot_share_is_refused_by_name(
    given: dict[str, Any], field: str, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as found:
        resolve_for(**given)
    assert found.value.field == field
    resolve_for(
        **{**given, "device": "cpu", "tensor_parallel_size": 2, "pipeline_parallel_size": 1}
    )


@pytest.mark.parametrize("setting", ["tensor_parallel_size", "pipeline_parallel_size"])
def test_on_a_cpu_kernels_are_not_needed_but_bits_are_not_promised(setting: str) -> None:
    given: dict[str, Any] = {"gpus": None, setting: 2}
    without = resolve_for(**given, packs=())
    assert "in 2 processes (same tokens as one up to rounding)" in without.describe()
    assert "in 2 processes, " in resolve_for(**given).describe()
    assert not resolve_for(**given, dtype="float16").has_bits_of_one


def test_models_of_transformers_are_not_shared() -> None:
    foreign = replace(EVEN, rope=None)
    assert not foreign.is_own
    with pytest.raises(NotYetError, match="runs through transformers"):
        resolve_for(foreign, tensor_parallel_size=2)


DRAFT = ModelMemory(shape=EVEN)
HEAD = HeadMemory(counts=WeightCounts(0, 0, 1000, 10), borrows_head=True)


@pytest.mark.parametrize("ranks", [2, 4])
def test_each_device_has_memory_of_its_own(ranks: int) -> None:
    """All is counted for the first, which has all of a draft beside its share of the target."""
    drafting = Drafting(models=(DRAFT,), heads=(HEAD,), features_per_token=384, lookahead=3)
    settings: dict[str, Any] = {"drafting": drafting, "max_num_seqs": 4}
    one = resolve_for(**settings).budget.need
    found = resolve_for(tensor_parallel_size=ranks, **settings).budget
    need, counts = found.need, EVEN.weight_counts()
    copies = ranks // min(ranks, 2)
    assert found.free == int(0.9 * FOUR.free_memory)
    assert need.kv_per_token == one.kv_per_token * copies // ranks
    assert need.draft_kv_per_token == one.draft_kv_per_token
    assert need.draft_weights == one.draft_weights
    exchanged = (384 + 2048) * 4 * EVEN.hidden_size * (2 * 4 + 1) // ranks
    assert need.activations == one.activations + exchanged
    assert need.workspace == one.workspace
    key_rows = (copies - 1) * EVEN.num_hidden_layers * 2 * EVEN.kv_size * EVEN.hidden_size
    shared = counts.head * (not EVEN.tie_word_embeddings) + counts.matrices + key_rows
    whole = counts.table + counts.rest
    assert need.weights == pytest.approx(2 * (whole + shared / ranks), abs=2)


def test_a_draft_that_is_shared_has_a_share_there() -> None:
    for ranks, part in ((1, 1), (2, 2)):
        drafting = Drafting(models=(ModelMemory(shape=EVEN, ranks=ranks),), lookahead=3)
        need = resolve_for(tensor_parallel_size=2, drafting=drafting).budget.need
        assert need.draft_kv_per_token * part == 2 * need.kv_per_token


def test_processes_on_a_cpu_share_its_memory() -> None:
    one = resolve_for(gpus=None).budget.need
    both = resolve_for(gpus=None, tensor_parallel_size=2)
    need = both.budget.need
    assert need.kv_per_token == one.kv_per_token
    assert need.activations == 2 * one.activations
    assert need.workspace - one.workspace >= RANK_BYTES
    assert need.weights > one.weights
    assert "of 2 processes together" in both.describe_memory()[0]
    on_cuda = resolve_for(tensor_parallel_size=2).describe_memory()[0]
    assert "of the first of 2 devices" in on_cuda


def test_gpus_by_the_name_that_the_driver_gives(files: Path) -> None:
    assert Gpus.names() == []
    for at, name in (("0000:18:00.0", "NVIDIA One"), ("0000:01:00.0", "NVIDIA Two")):
        folder = files / "proc/driver/nvidia/gpus" / at
        folder.mkdir(parents=True)
        (folder / "information").write_text(f"Model: \t {name}\nIRQ:   1\n")
    assert Gpus.names() == ["NVIDIA Two", "NVIDIA One"]


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere it is counted as memory")
def test_a_file_larger_than_any_memory_is_mapped(tmp_path: Path) -> None:
    """Weights that memory has no room for; what is written to them stays here."""
    path, size = tmp_path / "large", 1 << 43
    with path.open("w+b") as file:
        try:
            file.truncate(size)
        except OSError:
            pytest.skip("no such files here")
        file.write(b"weights")
        file.flush()
        mapped = map_file(file.fileno())
        assert mapped[:8] == b"weights\0" and len(mapped) == size
        mapped[0:1] = b"W"
        file.seek(0)
        assert file.read(1) == b"w" and mapped[0:1] == b"W"
        mapped.close()
