"""The engine and all that makes one: requests, wiring, times of steps, who drives it."""
