"""Choosing: which treatment each head gets, how much of it, and whether any is better than none."""
