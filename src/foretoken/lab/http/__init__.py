"""Asking an OpenAI-style server: timed requests, its answers, and what it says about drafts.

Knows how servers speak. Knows no load, no statistics and no files.
"""
