"""Tensor operations with a reference twin beside each fast path."""
