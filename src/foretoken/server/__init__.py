"""The HTTP face: OpenAI's API over one engine, and everything to watch it by.

`foretoken.server.run.serve` starts it. Knows nothing of models or of how steps work.
"""
