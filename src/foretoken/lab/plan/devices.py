"""The table of devices, from data sheets, and what an engine's own work adds to a step, which no
data sheet says: assumptions from published paces without drafts and from how its kernels are built;
`lab decide --fit` replaces them with a server's own step times.
"""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib import resources
from typing import Any

from foretoken.errors import ConfigError, one_of
from foretoken.hardware import Hardware


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """One accelerator, or one CPU socket. Bytes, bytes per second, operations per second."""

    name: str
    kind: str
    advertised_bytes: int
    """The decimal gigabytes of the product's name."""
    memory_bytes: int
    bandwidth: float
    flops: dict[str, float]
    """Peak dense matrix operations by operand type; multiply-adds count two."""
    link: float
    step_s_per_layer: float
    """Time per layer below which a decoding step does not go; an assumption."""
    source: str

    def flops_for(self, compute: str) -> float:
        """Operations per second with operands of type `compute`, or the next wider type."""
        for name in (compute, "fp8", "int8", "bf16"):
            if name in self.flops and (name == compute or compute == "fp4"):
                return self.flops[name]
        return self.flops["bf16"]


@cache
def _table() -> dict[str, dict[str, Any]]:
    text = resources.files(__package__).joinpath("devices.toml").read_text("utf-8")
    return tomllib.loads(text)


@cache
def known_devices() -> dict[str, Device]:
    return {
        name: Device(
            name=name,
            kind=row.get("kind", "gpu"),
            advertised_bytes=round(row["advertised_gb"] * 1e9),
            memory_bytes=row["memory_mib"] << 20,
            bandwidth=row["bandwidth_gb_s"] * 1e9,
            flops={kind: value * 1e12 for kind, value in row["tflops"].items()},
            link=row.get("link_gb_s", 0) * 1e9,
            step_s_per_layer=row["step_us_per_layer"] * 1e-6,
            source=row["source"],
        )
        for name, row in _table().items()
    }


def find_device(name: str) -> Device:
    """A device of the table, or `this`: the CPU of this machine, its speed an assumption.

    Raises:
        ConfigError: nothing of that name.
    """
    wanted = name.lower().replace("_", "-")
    if wanted == "this":
        return _this_machine()
    found = known_devices()
    # What people say when they mean one of several devices is the one that they mostly have.
    wanted = next((n for n, row in _table().items() if wanted in row.get("also", ())), wanted)
    if wanted in found:
        return found[wanted]
    close = [known for known in found if wanted in known or known in wanted]
    if len(close) == 1:
        return found[close[0]]
    raise ConfigError("--device", name, one_of(wanted, close or (*found, "this")))


def _this_machine() -> Device:
    hardware = Hardware.detect()
    wide = 128 if "avx512_bf16" in hardware.cpu_flags else 32
    wide = 1024 if "amx_bf16" in hardware.cpu_flags else wide
    return Device(
        name=f"this ({hardware.cpu_name}, {hardware.num_cores} cores)",
        kind="cpu",
        advertised_bytes=hardware.free_memory,
        memory_bytes=hardware.free_memory,
        bandwidth=min(20e9 * hardware.num_cores, 400e9),
        flops={"bf16": 2.5e9 * wide * hardware.num_cores},
        link=0.0,
        step_s_per_layer=30e-6,
        source="detected; assumed: 20 GB/s and 2.5 GHz per core (--bandwidth-gb-s overrides it)",
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Host time and kernels of one engine."""

    step_s: float = 0.0
    """Scheduling and sampling around each pass of the target."""
    draft_s: float = 0.0
    layer_s: float = 0.0
    """Launch time per layer; 0: the device's, with captured graphs."""
    exchanges: int = 2
    """Exchanges of a layer between ranks that share it."""
    exchange_s: float = 10e-6
    reread_share: float = 0.0
    """Share of the weights' reading that each further row repeats, of weights below 16 bit: such
    kernels unpack a weight again for every row, so each row to verify costs time of its own."""


ENGINE_COSTS = {
    "vllm": EngineCost(step_s=1.0e-3, draft_s=0.6e-3),
    "sglang": EngineCost(step_s=0.5e-3, draft_s=0.25e-3),
    "tensorrt-llm": EngineCost(step_s=0.3e-3, draft_s=0.15e-3),
    "transformers": EngineCost(step_s=2e-3, draft_s=2e-3, layer_s=0.7e-3),
    "llama.cpp": EngineCost(step_s=0.3e-3, draft_s=0.2e-3, reread_share=0.2),
    "vllm-metal": EngineCost(step_s=1.0e-3, draft_s=0.5e-3, reread_share=0.3),
    "mlx": EngineCost(step_s=1e-3, draft_s=0.5e-3, reread_share=0.8),
    "foretoken": EngineCost(exchanges=4, exchange_s=20e-6),
}
"""By engine; Foretoken's own work is small beside what a processor computes. Its exchanges were
measured (benchmarks/LOG.md)."""
