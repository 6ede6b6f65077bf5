"""Texts in, token batches out; corpora for training."""
