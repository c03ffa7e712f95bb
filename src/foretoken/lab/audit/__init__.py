"""Is what a server answers right? Checks of its answers, with speculation on against off.

`run` asks and judges, `checks` has one module per thing that is looked at.
"""
