"""From a server's command to the setting that is proven best, or to "leave it off".

`candidates.py` says what is worth trying, `settings.py` what can be set, `visits.py` what one start
of a server tells, `beliefs.py` what all starts together tell, `search.py` which setting that makes
best, which start comes next and what the final A/B says. A server under test is real (`real.py`) or
simulated (`benchmarks/simulate`); the search does not know which. `server_command.py` writes
commands, `journal.py` keeps what was measured, `answer.py` says it.
"""
