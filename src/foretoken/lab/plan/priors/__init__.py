"""What is expected of a drafter before anything is measured, from what others measured.

Numbers lie in toml files with their sources; here is how one expectation is made of them.
"""
