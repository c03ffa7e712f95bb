"""What tests of Triton kernels share: the interpreter as a tensor core adds, and the compiler.

`make test-gpu-kernels` runs them, twice: with TRITON_INTERPRET=1 those that run kernels, without it
those that compile them. Where there is a GPU the former run on it.
"""

import importlib
import importlib.metadata
import importlib.util
import os
import re
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from torch import Tensor

from foretoken.kernels.gpu_kernels import GpuKernels
from foretoken.kernels.library import TWINS, VARIABLE

GPU: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda" if GPU else "cpu")
INTERPRETED: Final = os.environ.get("TRITON_INTERPRET") == "1"
HAS_TRITON: Final = importlib.util.find_spec("triton") is not None
_TESTED: Final = (3, 9)
"""Older interpreters stumble over today's numpy, and older compilers are called otherwise."""
_CHAIN: Final = 16
"""Products that a tensor core adds to a sum at once."""


def _is_older() -> bool:
    if not HAS_TRITON:
        return True
    major, minor = importlib.metadata.version("triton").split(".")[:2]
    return (int(major), int(minor)) < _TESTED


runs = pytest.mark.skipif(
    not HAS_TRITON or (not GPU and (not INTERPRETED or _is_older())),
    reason="no GPU, and no Triton interpreter: make test-gpu-kernels",
)
compiles = pytest.mark.skipif(
    INTERPRETED or _is_older(), reason="no Triton compiler, 3.9 or newer: make test-gpu-kernels"
)


def triton_kernels(**options: Any) -> GpuKernels:
    """The kernels of this device, or of an H100 in the interpreter."""
    module = importlib.import_module("foretoken.kernels.triton.launches")
    capability = torch.cuda.get_device_capability() if GPU else (9, 0)
    found: GpuKernels = module.TritonKernels(capability, **options)
    return found


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def _floats(handle: Any) -> Any:
    """Values of an operand as float32, which is exact."""
    import numpy as np
    import triton.language as tl

    data = handle.data
    if handle.dtype.scalar == tl.bfloat16:
        return (data.astype(np.uint32) << 16).view(np.float32)
    return data.astype(np.float32)


def _as_bfloat16(numbers: Any) -> Any:
    """The bits of the nearest bfloat16, of two the even one."""
    import numpy as np

    bits = numbers.astype(np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(numbers), 0x7FC0, rounded).astype(np.uint16)


@pytest.fixture
def tensor_cores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Products of the interpreter as a tensor core makes them: onto the sum that is there, by so
    many inputs at once, every place alike. NumPy's BLAS, which the interpreter takes, may give a
    row of a tile other bits at another place of it, knows no bfloat16, and adds a block to itself
    before it adds it to the sum. To bfloat16 numbers are rounded, not cut off. Nor does a GPU warn
    of what is not finite. Keys and values in int8 lie as on one."""
    monkeypatch.setenv(VARIABLE, TWINS)
    if GPU or not HAS_TRITON:
        yield
        return
    import numpy as np

    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    language: Any = importlib.import_module("triton.language")

    def create_dot(
        self: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any
    ) -> Any:
        left, right, total = _floats(a), _floats(b), d.data
        for at in range(0, left.shape[1], _CHAIN):
            rows, columns = left[:, at : at + _CHAIN, None], right[None, at : at + _CHAIN]
            total = total + (rows * columns).sum(1)
        return interpreter.TensorHandle(total, d.dtype.scalar)

    cast_impl = interpreter.InterpreterBuilder.cast_impl

    def cast(self: Any, src: Any, dst_type: Any) -> Any:
        if dst_type.scalar != language.bfloat16 or src.dtype.scalar == language.bfloat16:
            return cast_impl(self, src, dst_type)
        return interpreter.TensorHandle(_as_bfloat16(src.data), dst_type.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)
    monkeypatch.setattr(interpreter.InterpreterBuilder, "cast_impl", cast)
    with np.errstate(all="ignore"):
        yield


@dataclass(frozen=True, slots=True)
class Compiled:
    """What became of a kernel: numbers of the machine code."""

    registers: int
    """Of a thread."""
    threads: int
    """Of a program."""
    shared: int
    """Bytes of shared memory of a program."""
    instructions: Counter[str]
    """By name without what follows its first dot, and wide loads by name and width."""
    ptx: str

    @property
    def spills(self) -> int:
        """Instructions that read or write registers that were put aside."""
        return self.instructions["STL"] + self.instructions["LDL"]

    @property
    def matrix_classes(self) -> set[str]:
        """Which classes of matrix instructions there are."""
        return {"HMMA", "HGMMA", "UTCHMMA", "IMMA", "QGMMA", "UTCQMMA"} & self.instructions.keys()

    @property
    def wide_loads(self) -> int:
        """Loads of 16 bytes, and copies of as many into shared memory."""
        return self.instructions["LDG.128"] + self.instructions["LDGSTS.128"]


@dataclass(frozen=True, slots=True)
class Launch:
    """What a kernel was to be launched with."""

    kernel: Any
    arguments: tuple[Any, ...]
    constants: dict[str, Any]
    options: dict[str, Any]


class Compiler:
    """Machine code for GPUs that are not there, of launches as `TritonKernels` makes them."""

    def __init__(self, capability: int, folder: Path) -> None:
        """Compile for a capability such as 90; files go to `folder`."""
        triton: Any = importlib.import_module("triton")
        self.capability = capability
        self._tools = Path(triton.__file__).parent / "backends/nvidia/bin"
        self._folder = folder

    def launches(self, call: Callable[[GpuKernels], None]) -> list[Launch]:
        """What a call launches, whose tensors may be of the meta device."""
        module = importlib.import_module("foretoken.kernels.triton.launches")
        made: list[Launch] = []

        kernels = module.TritonKernels(divmod(self.capability, 10))
        kernels._start = lambda kernel, grid, *more: made.append(Launch(kernel, *more))
        call(kernels)
        return made

    def __call__(self, launch: Launch) -> Compiled:
        """Compile as the launch would: what of its arguments is a multiple of 16 is known to be."""
        compiler: Any = importlib.import_module("triton.compiler")
        backends: Any = importlib.import_module("triton.backends.compiler")
        types, constants, wide = dict[str, str](), dict(launch.constants), list[str]()
        pairs = zip(launch.kernel.params, launch.arguments, strict=False)
        for parameter, value in pairs:
            name, free = parameter.name, parameter.do_not_specialize
            if value is None or (isinstance(value, int) and value == 1 and not free):
                constants[name] = value
                continue
            types[name] = _type(value)
            if isinstance(value, Tensor) or (_type(value) == "i32" and not value % 16 and not free):
                wide.append(name)
        place = {name: (at,) for at, name in enumerate(launch.kernel.arg_names)}
        source = compiler.ASTSource(
            fn=launch.kernel,
            signature=types | dict.fromkeys(constants, "constexpr"),
            constexprs={place[name]: value for name, value in constants.items()},
            attrs={place[name]: [["tt.divisibility", 16]] for name in wide},
        )
        target = backends.GPUTarget("cuda", self.capability, 32)
        made = compiler.compile(source, target=target, options=launch.options)
        file = self._folder / "kernel.cubin"
        file.write_bytes(made.asm["cubin"])
        use = self._ask("cuobjdump", "--dump-resource-usage", file)
        found = re.search(r"REG:(\d+)", use)
        assert found is not None, use
        code = self._ask("nvdisasm", "-c", file)
        threads = 32 * launch.options["num_warps"]
        return Compiled(int(found[1]), threads, made.metadata.shared, _count(code), made.asm["ptx"])

    def _ask(self, tool: str, option: str, file: Path) -> str:
        asked = [str(self._tools / tool), option, str(file)]
        return subprocess.run(asked, check=True, capture_output=True, text=True).stdout


def _type(value: Any) -> str:
    """An argument's type in Triton's words."""
    if not isinstance(value, Tensor):
        return "fp32" if isinstance(value, float) else "i32"
    kinds = {
        torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16", torch.int8: "i8",
        torch.uint8: "u8", torch.int32: "i32", torch.float64: "fp64",
    }  # fmt: skip
    return f"*{kinds[value.dtype]}"


def _count(code: str) -> Counter[str]:
    found: Counter[str] = Counter()
    for name in re.findall(r"^\s+(?:/\*\w+\*/\s+)?(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", code, re.M):
        found[name.split(".")[0]] += 1
        for width in (".64", ".128"):
            if name.startswith("LDG") and width in name:
                found[name.split(".")[0] + width] += 1
    return found
