"""Text and token ids: encoding, texts that grow by the token, stop strings, chat templates.

Knows no model and no request's sampling.
"""
