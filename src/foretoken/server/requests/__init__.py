"""One accepted request from its body to its answer."""
