"""A target of one's own: prompts from files, answers and hidden states from our engine."""
