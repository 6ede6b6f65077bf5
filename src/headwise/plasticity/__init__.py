"""Attention plasticity: capture queries and keys, and measure how easily preferences change."""
