"""Sequences, batches, the scheduler, the runner and the verifier: the parts of one step."""
