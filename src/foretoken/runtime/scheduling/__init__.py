"""Who runs in a step, with how many tokens and which pages, and what the step's results change."""
