"""Pruning: which heads can go, and which key/value groups need no long memory, proven."""
