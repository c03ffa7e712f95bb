"""Building blocks that model files put together: attention, MLP, rotary positions."""
