"""From the records of a run to numbers: summaries, gains, step times, break-even, what-if.

Pure functions over `records`; measures nothing and gives no verdict.
"""
