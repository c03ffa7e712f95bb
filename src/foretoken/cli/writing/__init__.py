"""Commands that write with a model as it goes: `generate` and `chat`, and what they share."""
