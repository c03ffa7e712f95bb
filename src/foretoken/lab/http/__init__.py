"""Asking an OpenAI-style server: timed requests, its answers, and what it says about drafts."""
