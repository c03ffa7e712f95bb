"""What a measured number must be read with: versions, processor, threads. Reads, never changes."""

import platform
from typing import Any

import foretoken


def describe_environment() -> dict[str, Any]:
    """Versions and machine as plain data for JSON."""
    import torch

    from foretoken.hardware import Hardware
    from foretoken.kernels.library import describe_kernels

    hardware = Hardware.detect()
    return {
        "foretoken": foretoken.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "cpu": hardware.cpu_name,
        "cores": hardware.num_cores,
        "threads": torch.get_num_threads(),
        "kernels": describe_kernels(),
        "gpu": torch.cuda.get_device_name(0) if torch.cuda.is_available() else None,
    }
