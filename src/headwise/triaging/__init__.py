"""Triage: why a head is ill, measured by what interventions on it cost."""
