"""The blocks that decoder-only models are put together from."""
