"""`foretoken lab`: one file per subcommand, put together in `app`.

Owns options and printing; what a command does is in `foretoken.lab`. Imports stay in the
functions, so that help is instant.
"""
