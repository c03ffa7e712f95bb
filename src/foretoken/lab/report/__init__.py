"""One self-contained HTML page about one or several A/Bs.

Reads what runs left behind and their verdicts; measures nothing. The only part of the lab that
needs matplotlib (`pip install "foretoken[report]"`).
"""
