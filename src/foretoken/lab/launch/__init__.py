"""The one writer of commands: how every engine is told what to serve and how to draft.

`plan`, `tune`, `lint` and `export` decide what a command says; here is how it is said. What engines
call an option is data, in `options.toml`. Starts nothing and judges nothing.
"""
