"""`foretoken train auto`: which drafter is worth the hours that there are, and training it."""
