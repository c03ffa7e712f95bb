"""A server without a model whose latencies and acceptance are known, to check the lab against."""
