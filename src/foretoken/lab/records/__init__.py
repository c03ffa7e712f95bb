"""What a run leaves behind, as values and as files, and the proxy that records live traffic."""
