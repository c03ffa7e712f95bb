"""Several drafters in one engine: who is asked, and what is made of the answers."""
