"""What the engine counts, and how it is read.

`from foretoken.metrics.reader import Counter, Gauge, Histogram, Vector` stands for the same line of
a script for vLLM.
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
