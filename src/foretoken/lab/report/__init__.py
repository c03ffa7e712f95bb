"""One self-contained HTML file about one or several A/Bs, and the same as PNG, CSV and JSON lines.

Reads what runs left behind and asks `deciding` for the verdict; measures nothing. The only part of
the lab that needs matplotlib (`pip install "foretoken[report]"`).
"""
