"""From a server's command to the setting that is proven best, or to "leave it off".

`server_command.py` says what is worth trying and writes commands, `settings.py` has what can be set
and what one start tells, `search.py` says what all starts together tell, which setting that makes
best, which start comes next and what the final A/B says, `answer.py` what it comes to. A server
under test is real (`real.py`) or simulated (`benchmarks/simulate`).
"""
