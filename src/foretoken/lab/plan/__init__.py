"""Planning before anything is measured: memory, predicted speed, methods, checks, commands.

Arithmetic on a model's shape and a device's data sheet. Every number that is an assumption is
named as one in the result. Knows no server and measures nothing.
"""
