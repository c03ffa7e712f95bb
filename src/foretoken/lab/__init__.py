"""The lab: plan, measure and decide whether to speculate, for any OpenAI-style server.

Speaks HTTP and reads files; imports neither torch nor the engine. `plan` and `lint` come before a
measurement, and `commands` writes what they would have you type. `measure` takes it (over `http`,
or against `mock`), `records` keeps it, `analysis` and `stats` make numbers of it, `decide` and
`report` say what they mean.
"""
