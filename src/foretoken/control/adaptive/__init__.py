"""Each step planned anew from what is expected of it: the best of all lengths, a guard, trials."""
