"""How far to speculate: what a step takes, what is kept of drafts, and the plan of each step.

Everything here is arithmetic on plain numbers and requests, without torch: the engine, the planner,
the replay and the simulator use the same models of time (`cost`) and of acceptance (`acceptance`).
"""
