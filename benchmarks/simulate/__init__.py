"""Serving on a virtual clock: the real scheduler and the real control over modelled step times.

A simulated run takes a second where a real one takes an hour, on machines that nobody has at hand.
`machine.py` says what steps and servers take, `traffic.py` who asks for what and which drafts are
right, `arms.py` who decides how far to draft, `serving.py` runs one, `compare.py` sets two beside
each other; `python -m benchmarks.simulate` prints it. Three more test the lab: `ab_draws.py` draws
A/Bs whose truth is known, `decide_rehearsal.py` judges them, `tune_rehearsal.py` searches servers
that `tune_answers.py` simulates.
"""
