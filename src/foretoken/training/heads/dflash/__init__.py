"""Training of heads that fill in blocks: what DFlash and DSpark share, their files, and DFlash."""
