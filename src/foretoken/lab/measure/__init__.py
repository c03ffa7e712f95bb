"""Measuring servers: prompts, arrivals, blocks of both arms, grids.

Every module here takes time on a clock or prepares what does. Arithmetic is in `analysis` and
`stats`, what is written to disk in `records`.
"""
