"""For the front of several replicas: what it says of a request, what a replica tells it."""
