"""Whole steps of a model on a GPU: their buffers, layers and recordings."""
