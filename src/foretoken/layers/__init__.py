"""The parts that a decoder is built of: attention, MLP, norms, rotary positions."""
