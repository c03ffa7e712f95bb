"""One file per group of URLs."""
