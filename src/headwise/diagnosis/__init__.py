"""Diagnosis: every head's measures and class."""
