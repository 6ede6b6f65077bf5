"""Watching heads while a model trains: the film of a run, its alarms and its trackers."""
