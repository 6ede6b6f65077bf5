"""Campaigns against headwise: kills, corruptions, fuzzed inputs and a soak, bounded and seeded.

`python -m campaigns NAME --count N --seed S` prints a table of what was tried, what survived, what
gave a wrong result (or a traceback) and what was lost (or hung). The last two must be zero.
"""
