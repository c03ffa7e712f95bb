"""Is what a server answers right? Checks of its answers, with speculation on against off.

`checks` has what is looked at, `run` starts, asks and judges.
"""
