"""Models that learn from every step: of time, of acceptance, of how long outputs become."""
