"""Pages of keys and values: who holds which, which can be shared, and the tensors themselves."""
