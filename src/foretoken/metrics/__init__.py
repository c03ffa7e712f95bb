"""What the engine counts, and how it is read.

`from foretoken.v1.metrics.reader import Counter, Gauge, Histogram, Vector` is the line of a
script for vLLM, with our name.
"""

from foretoken.metrics.engine_metrics import EngineMetrics, PlainEstimate, Window
from foretoken.metrics.reader import Counter, Gauge, Histogram, Metric, Vector

__all__ = [
    "Counter",
    "EngineMetrics",
    "Gauge",
    "Histogram",
    "Metric",
    "PlainEstimate",
    "Vector",
    "Window",
]
