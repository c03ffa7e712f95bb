"""Paths of vLLM's package that scripts import from; each module names where its things live."""
