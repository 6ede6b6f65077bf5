"""The text that heads are triaged on by default."""

from __future__ import annotations

from headwise.texts.corpus import validation_documents
from headwise.texts.text_sets import TextSet, bundled_texts, default_corpus


def triage_texts(model_name: str) -> TextSet:
    """Text that is neither trained nor evaluated on: the patient's own validation documents.

    Other models have no corpus here; for them it is the bundled set.
    """
    if model_name != "patient":
        return bundled_texts()
    texts = validation_documents(default_corpus(model_name).texts)
    return TextSet("patient-validation", tuple(texts))
