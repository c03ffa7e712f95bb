"""Checks of a plan: does the draft suit, does all of it fit, does the traffic pay for it."""
