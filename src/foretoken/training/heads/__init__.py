"""Training of head networks on a target's own text and hidden states, captured as they are used."""
