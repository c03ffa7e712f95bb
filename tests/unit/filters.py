"""The filters that the compiled draw and the compiled rejection rules are compared under."""

FILTERS: list[tuple[float, int, float] | None] = [
    None, (0.0, 50, 1.0), (0.0, 1, 1.0), (0.05, 0, 1.0), (0.0, 0, 0.9), (0.02, 40, 0.8),
    (0.0, 300, 0.1), (0.0, 2000, 1.0), (0.0, 0, 0.99999),
]  # fmt: skip
"""min_p, top_k and top_p; None: nothing is filtered."""
