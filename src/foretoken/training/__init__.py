"""Training: language models from scratch, and drafters for a target.

Owns corpora, losses, loops, checkpoints and export. It does not know about serving.
"""
