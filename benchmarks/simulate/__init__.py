"""Serving on a virtual clock: the real scheduler and the real control over modelled step times.

A simulated run takes a second where a real one takes an hour, on machines that nobody has at hand.
`machine.py` says what steps take, `server.py` what a server adds to them, `traffic.py` who asks for
what and which drafts are right, `arms.py` who decides how far to draft, `serving.py` runs one,
`compare.py` sets two beside each other.
"""
