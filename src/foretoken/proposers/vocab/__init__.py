"""Two tokenizers: what their tokens have in common, and text cut from one into the other."""
