"""Finding launches in what people have: scripts, containers, manifests, settings, Python.

Each module knows one way of writing; `source` knows which one a text is. Judges nothing.
"""
