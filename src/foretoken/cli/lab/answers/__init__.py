"""Commands that ask whether what a server answers is right."""
