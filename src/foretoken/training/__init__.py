"""Training drafters for a target, measuring what they are worth, and `foretoken quantize`.

Knows nothing of serving. `runs` is where to begin.
"""
