"""Drafter networks that read a target's hidden states; the same code serves and trains.

A file or folder with a method's name is that method. Those named `..._head` are the contracts of a
kind: one hidden state (MLP, Medusa), keys and values of its own, and of these chains (EAGLE).
Blocks are in `dflash/`. Networks are given how to attend, so that training (rows of a batch) and
serving (paged KV) differ only in that; they know nothing of requests, pages or verification.
"""
