"""`foretoken quantize`: a 16-bit or 32-bit checkpoint becomes one of 8-bit or 4-bit matrices."""
