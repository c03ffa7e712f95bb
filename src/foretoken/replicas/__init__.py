"""Several replicas of one model behind one address.

Each replica is a whole `foretoken.server` in a process of its own. The front listens where clients
ask: it authenticates once, gives each request an id and a key for its noise, chooses a replica
(`foretoken.router`), and has a stream whose replica dies go on at another one. Ray Serve starts
replicas, starts them again, and adds and ends them; only `on_ray` knows it.
"""
