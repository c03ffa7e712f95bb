"""The router's decisions: which replica a request goes to, and what becomes of it if that one dies.

Pure: no clock, no connection, no thread. Whoever runs it reads the time, asks replicas how they
are, and sends what it is told to. Knows token ids and their pages, neither text nor models.

- `view`: what is known of a replica, and which of them may serve
- `prompt` and `prefix_index`: the beginnings of prompts, and who is known to hold them
- `choosing`: one replica for one request, and why
- `relay`: one streamed request over the lives of several replicas
"""
