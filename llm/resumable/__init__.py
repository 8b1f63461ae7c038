"""Streams of answers that their clients resume at any front end, also when one is killed.

What is stored of a stream is its request and what its engine made, not its events: those are made
again of that, byte for byte, by its teller. What nobody could tell again is not told: items
are stored first.
"""
