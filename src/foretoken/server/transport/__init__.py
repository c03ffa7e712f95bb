"""Bytes in and out: connections, bodies, streams of events, and how the listening ends."""
