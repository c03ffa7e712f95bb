"""Operations on tensors: each a plain reference and, where it pays, a fast twin of it."""
