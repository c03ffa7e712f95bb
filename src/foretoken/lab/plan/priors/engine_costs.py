"""What an engine's own work adds to a step, which no data sheet of a device says.

Every number is an assumption from published paces without drafts and from how the engine's kernels
are built; `lab decide --fit` replaces all of it with a server's own step times.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineCost:
    """Host time and kernels of one engine."""

    step_s: float = 0.0
    """Scheduling and sampling around each pass of the target."""
    draft_s: float = 0.0
    """The same around each pass of a drafter."""
    layer_s: float = 0.0
    """Launch time per layer; 0: the device's, with captured graphs."""
    exchanges: int = 2
    """Exchanges of a layer between ranks that share it."""
    exchange_s: float = 10e-6
    """What one takes at least."""
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
