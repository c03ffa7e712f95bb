"""Drafter networks that read a target's hidden states; the same code serves and trains.

A network is an `nn.Module` whose parameters have the names of its published checkpoint format. It
is given how to attend, so that training (rows of a batch) and serving (paged KV) differ only in
that function. Networks know nothing of requests, pages or verification.
"""
