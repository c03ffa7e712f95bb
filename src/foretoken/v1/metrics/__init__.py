"""The path of vLLM's `vllm.v1.metrics`."""
