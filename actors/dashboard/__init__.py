"""The dashboard: a flight as a time line, and what became of each request in it.

`FlightView` makes the picture of the records, without I/O; `dynbus dashboard` shows it in a browser
and `dynbus top` in a terminal.
"""
