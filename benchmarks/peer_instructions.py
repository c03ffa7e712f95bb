"""Instruction sets that engines of `peers.py` are held to, as on processors with nothing above.

Each engine is told in its own words: ours by FORETOKEN_KERNELS, oneDNN (OpenVINO, and products of
PyTorch in vLLM) and PyTorch by theirs, llama.cpp by being compiled for it. What has no such switch
stays as it is, which `STAYS` says. Knows nothing of what is measured.
"""

from collections.abc import Mapping

NATIVE = "native"
AVX2 = "avx2"
AVX_VNNI = "avxvnni"
CHOICES = (NATIVE, AVX2, AVX_VNNI)
VARIABLES: Mapping[str, Mapping[str, str]] = {
    NATIVE: {},
    AVX2: {
        "FORETOKEN_KERNELS": "avx2",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2",
    },
    AVX_VNNI: {
        "FORETOKEN_KERNELS": "avxvnni",
        "ATEN_CPU_CAPABILITY": "avx2",
        "ONEDNN_MAX_CPU_ISA": "AVX2_VNNI",
    },
}
"""For the process of every engine."""
_GGML = ("SSE42", "AVX", "AVX2", "BMI2", "FMA", "F16C")
LLAMA_CPP: Mapping[str, tuple[str, ...]] = {
    NATIVE: ("-DGGML_NATIVE=ON",),
    AVX2: ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in _GGML)),
    AVX_VNNI: ("-DGGML_NATIVE=OFF", *(f"-DGGML_{name}=ON" for name in (*_GGML, "AVX_VNNI"))),
}
"""Options with which its library of products is compiled."""
STAYS = {
    "openvino": "its own generated code as far as it does not ask oneDNN what there is",
    "onnxruntime": "all of it: it asks the processor",
    "vllm": "its own kernels: it asks the processor",
}
"""What an engine goes on using of the processor's own instructions."""


def suffix_of(instructions: str) -> str:
    """What a name ends with of that which is kept apart for these instructions."""
    return "" if instructions == NATIVE else f"-{instructions}"
