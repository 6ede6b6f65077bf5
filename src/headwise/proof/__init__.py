"""Proof: what every head is worth, and what really changed."""
