"""Values that cross the borders between parts: requests, sampling parameters, results, step counts.

Torch-free and frozen. Nothing here knows how a model runs; the device-side values are in
`foretoken.models.tensors`, the scheduler's own state is in `foretoken.runtime`.
"""

from foretoken.types.outputs import (
    CompletionOutput,
    DraftingTime,
    FinishReason,
    Logprob,
    Output,
    RequestMetrics,
    RequestOutput,
    StepStats,
    TokenSource,
)
from foretoken.types.params import SamplingParams
from foretoken.types.request import Request
from foretoken.types.resume import Resume
from foretoken.types.speculation import DEFAULT_GUARD, Speculation

__all__ = [
    "DEFAULT_GUARD",
    "CompletionOutput",
    "DraftingTime",
    "FinishReason",
    "Logprob",
    "Output",
    "Request",
    "RequestMetrics",
    "RequestOutput",
    "Resume",
    "SamplingParams",
    "Speculation",
    "StepStats",
    "TokenSource",
]
