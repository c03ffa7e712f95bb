"""The path of vLLM's `vllm.v1.metrics.reader`, for scripts that change the package's name alone."""

from foretoken.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = ["Counter", "Gauge", "Histogram", "Metric", "Vector"]
