"""Deciding how far to speculate, per sequence and step."""
