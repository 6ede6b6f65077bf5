"""Texts through a model: batch by batch, or layer by layer where its weights stay on disk."""
