"""Suffix decoding: drafts by frequency from what was written before."""
