"""Tool calls: which grammar forces them, and how they are read while text arrives."""
