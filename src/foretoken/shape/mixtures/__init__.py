"""Mixtures of experts: the record of what they differ in, and the families that have them."""
