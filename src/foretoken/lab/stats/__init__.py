"""Statistics over arrays: intervals, ratios of two arms, permutation tests, shrinkage, drift.

Pure and seeded. Knows no requests, no servers and no files.
"""
