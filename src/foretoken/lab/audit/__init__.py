"""Is what a server answers right? Checks of its answers, with speculation on against off.

`checks` and `copies` have what is looked at, `pressure` looks again under load and at each draft
length, `drafts` watches acceptance; `run` starts, asks and judges, `page` says it on one page.
"""
