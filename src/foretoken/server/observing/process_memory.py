"""Memory of the process and of its device: how much there is in use, and giving back what is not.

Knows no request. glibc keeps what a burst of requests freed; `keep_trimmed` hands it back to the
system, so that the process's size says what it needs.
"""

import asyncio

import torch

from foretoken.hardware import anonymous_memory, trim_heap


def device_bytes(device: str) -> int:
    """Bytes that PyTorch holds on a CUDA device; on a CPU the process's own (0 if unknown)."""
    if device.startswith("cuda"):
        return torch.cuda.memory_reserved(device)
    return anonymous_memory() or 0


async def keep_trimmed(every_s: float) -> None:
    """Trim again and again, off the loop; to be cancelled."""
    while True:
        await asyncio.sleep(every_s)
        await asyncio.to_thread(trim_heap)
