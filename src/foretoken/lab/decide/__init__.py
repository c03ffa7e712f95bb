"""From a measured A/B to a verdict: ship, do not ship, or not yet.

Reads summaries and a policy file; measures nothing. Every rule answers pass, fail or inconclusive
with its number, its interval and how much more to measure.
"""
