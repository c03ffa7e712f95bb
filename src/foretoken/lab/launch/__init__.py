"""Reads how a server is started, and writes it: in its own words and in those of other engines."""
