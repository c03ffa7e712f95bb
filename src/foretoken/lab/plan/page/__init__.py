"""A plan on one page, and all that stands behind it. Computes nothing but what would fit."""
