"""Python source code that is on every machine: the standard library, and prompts cut from it."""
