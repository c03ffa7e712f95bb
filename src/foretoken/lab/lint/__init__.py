"""Reading how a server is started, asked and watched, and saying what will not work.

Works on text: command lines, YAML, JSON, dashboards, recorded requests. Starts nothing and asks no
server. What each engine knows is data, in the TOML files beside the code.
"""
