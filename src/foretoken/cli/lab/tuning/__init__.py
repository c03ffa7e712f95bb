"""`foretoken lab tune`: the command, and what it shows."""
