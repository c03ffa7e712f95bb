"""Methods that draft with a language model of their own."""
