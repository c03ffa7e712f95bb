"""What control did, and why, in words and numbers for people."""
