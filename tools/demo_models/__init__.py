"""How the packaged models are made, from the sources of the Python standard library alone."""
