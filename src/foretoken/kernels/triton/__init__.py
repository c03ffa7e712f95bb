"""Kernels in Triton for NVIDIA GPUs: device code by what it computes, and `launches`, which fulfils
the contract of `kernels.gpu_kernels`. Importing any but `found` imports triton."""
