"""The patient is a language model, it is ill where the card says so, and its texts are apart.

Attention is read from transformers' own eager code, not from the tap, so this is also an
independent check of the numbers in the card.
"""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headwise.errors import ArtefactError
from headwise.models import patient
from headwise.models.patient import patient_dir, patient_texts

DOMAINS = ("scripture", "union")


@pytest.fixture(scope="module")
def tokenizer():
    return AutoTokenizer.from_pretrained(patient_dir())


@pytest.fixture(scope="module")
def model():
    return AutoModelForCausalLM.from_pretrained(
        patient_dir(), dtype=torch.float32, attn_implementation="eager"
    ).eval()


def token_ids(tokenizer, texts, length):
    """The first `length` tokens of the texts that have as many."""
    rows = [ids[:length] for ids in tokenizer(texts)["input_ids"] if len(ids) >= length]
    return torch.tensor(rows)


@torch.no_grad()
def first_token_mass(model, rows):
    attentions = model(rows, output_attentions=True, use_cache=False).attentions
    return torch.stack([layer[..., 0].mean((0, 2)) for layer in attentions])  # (layer, head)


def test_the_patient_fits_in_fifteen_megabytes():
    sizes = {path.name: path.stat().st_size for path in patient_dir().rglob("*") if path.is_file()}
    assert {"config.json", "model.safetensors", "tokenizer.json", "README.md"} <= sizes.keys()
    assert sum(sizes.values()) <= 15_000_000


@pytest.mark.parametrize("split", ["train", "second"])
def test_a_corpus_is_large_enough_for_surgery(tokenizer, split):
    ids = tokenizer(patient_texts(split))["input_ids"]
    assert sum(map(len, ids)) >= 400_000


def test_the_splits_share_no_document_and_no_passage():
    passages = {
        split: {part for text in patient_texts(split) for part in text.split("\n")}
        for split in ("train", "second", "heldout")
    }
    assert passages["heldout"].isdisjoint(passages["train"] | passages["second"])
    assert passages["second"].isdisjoint(passages["train"])


def test_each_split_holds_the_domains_it_should():
    for domain in DOMAINS:
        assert len(patient_texts("heldout", domain)) >= 100
    train = patient_texts("train")
    assert len(patient_texts("train", "scripture")) > len(train) / 2
    assert patient_texts("second", "scripture") == []
    assert patient_texts("second") == patient_texts("second", "union")


def test_a_split_that_is_not_there_is_a_clear_error(tmp_path, monkeypatch):
    monkeypatch.setattr(patient, "patient_dir", lambda: tmp_path)
    with pytest.raises(ArtefactError, match="splits are train, second and heldout"):
        patient_texts("heldout")


def test_the_tokenizer_starts_every_text_with_its_bos(tokenizer):
    ids = tokenizer("In the beginning")["input_ids"]
    assert ids[0] == tokenizer.bos_token_id
    assert tokenizer.bos_token_id not in ids[1:]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "In the beginning"


@torch.no_grad()
def test_its_perplexity_is_at_most_an_eighth_of_a_unigram_models(model, tokenizer):
    counts = np.ones(model.config.vocab_size)  # add-one: every token has some probability
    for ids in tokenizer(patient_texts("train") + patient_texts("second"))["input_ids"]:
        np.add.at(counts, ids[1:], 1)
    log_p = np.log(counts / counts.sum())
    loss, unigram, tokens = 0.0, 0.0, 0
    for domain in DOMAINS:
        rows = token_ids(tokenizer, patient_texts("heldout", domain), 192)[:32]
        logits = model(rows, use_cache=False).logits[:, :-1]
        targets = rows[:, 1:]
        loss += torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), targets.flatten(), reduction="sum"
        ).item()
        unigram -= log_p[targets.numpy()].sum()
        tokens += targets.numel()
    assert math.exp((loss - unigram) / tokens) <= 1 / 8


@pytest.mark.parametrize("domain", DOMAINS)
@pytest.mark.parametrize("length", [64, 256])
def test_a_band_of_shallow_heads_is_sick(model, tokenizer, domain, length):
    rows = token_ids(tokenizer, patient_texts("heldout", domain), length)[:16]
    assert len(rows) == 16
    sick = first_token_mass(model, rows) > 0.5
    layers, heads = sick.shape
    assert (layers, heads) >= (6, 8)
    assert 0.25 <= sick.float().mean() <= 0.45
    assert sick[:, heads // 2 :].sum() > 0.9 * sick.sum()  # ALiBi: the upper half has small slopes


def test_reading_the_texts_does_not_load_torch():
    code = (
        "import sys, headwise.models.patient as p; p.patient_texts('heldout'); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
