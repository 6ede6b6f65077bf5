"""Small plans, corpora and jobs for the tests of surgery, training and repair."""

from __future__ import annotations

import hashlib
import random
from contextlib import contextmanager

import torch

from conftest import SENTENCES
from headwise.forward.interventions import ZERO, Variant
from headwise.forward.variant_losses import variant_losses
from headwise.heads import format_heads, select_heads
from headwise.models.architectures import geometry_of
from headwise.models.description import describe_model
from headwise.models.values import ModelInfo, PatchInfo
from headwise.surgery.job import Job
from headwise.surgery.operation import operate, unchanged
from headwise.surgery.plan import PlannedModel, SurgeryPlan
from headwise.surgery.recipe import Recipe
from headwise.surgery.settings import RepairRequest
from headwise.surgery.slice_training import make_masters
from headwise.surgery.values import RunSettings
from headwise.texts.batches import Batch, batches
from headwise.texts.corpus import Corpus
from headwise.texts.corpus_info import CorpusInfo
from headwise.texts.text_sets import TextSet
from headwise.values import from_plain

TINY_RECIPE = Recipe(
    name="tiny",
    steps=6,
    lr=1e-2,
    warmup=2,
    batch_size=2,
    accumulation=2,
    block=24,
    validate_every=3,
    validation_blocks=3,
    save_every=2,
    map_every=2,
)


def plan_for(model, targets="L0H1,L1H0-1", watched="", **options):
    """A plan for a loaded model; every head that is no target counts as healthy."""
    described = describe_model(model, "tiny")
    shape = {key: getattr(described, key) for key in ("num_layers", "num_heads", "layers")}
    chosen = select_heads(targets, **shape)
    healthy = set(select_heads("all", **shape)) - set(chosen)
    return SurgeryPlan(
        model=PlannedModel(**{key: getattr(described, key) for key in PlannedModel.model_fields}),
        targets=format_heads(chosen),
        watched=watched,
        healthy=format_heads(healthy),
        **options,
    )


def random_ids(length, seed=0, vocabulary=97):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, vocabulary, (length,), generator=generator).tolist()


def random_batch(lengths=(24, 17, 9), seed=0, vocabulary=97) -> Batch:
    texts = [random_ids(n, seed * 100 + i, vocabulary) for i, n in enumerate(lengths)]
    return next(batches(texts, len(texts)))


def random_corpus(train=8, validation=2, length=16, vocabulary=97) -> Corpus:
    blocks = [random_batch((length, length - 3), seed, vocabulary) for seed in range(train)]
    held = [random_batch((length,), 1000 + seed, vocabulary) for seed in range(validation)]
    return Corpus(CorpusInfo("random"), tuple(blocks), tuple(held))


def small_texts(count=120) -> TextSet:
    """Distinct short documents, enough for a validation split by hash; no near-duplicates."""
    words = [f"{SENTENCES[i % 5]} {SENTENCES[(i * 3 + 1) % 5]}".split() for i in range(count)]
    shuffled = [random.Random(i).sample(some, len(some)) for i, some in enumerate(words)]
    return TextSet("small", tuple(f"{i} {' '.join(some)}" for i, some in enumerate(shuffled)))


def weight_bits(model):
    """name -> hash of the parameter's bits."""
    return {
        name: hashlib.sha256(
            p.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        ).hexdigest()
        for name, p in model.named_parameters()
    }


@contextmanager
def opened(model, plan, tmp_path, *, recipe=TINY_RECIPE, corpus=None, reinit=True, seed=0):
    """A job on the operated model, which is given back as it was."""
    start = operate(model, plan) if reinit else unchanged(model, plan)
    masters = tuple(make_masters(start.slices, model))
    start.apply(model)
    corpus = corpus or random_corpus()
    request = RepairRequest(plan=plan, seed=seed)
    run = RunSettings(request, "tiny", plan.model.fingerprint, plan, recipe, corpus.info)
    try:
        yield Job(model, run, corpus, tmp_path, masters, tuple(m.value for m in masters))
    finally:
        start.undo(model, force=True)


def group_of(model):
    return geometry_of(model).group


def patched_with(*, layers, heads, targets):
    """What is recorded of a patch, without a model."""
    made = PlannedModel(
        id="made", fingerprint="0" * 64, num_layers=layers, num_heads=heads, num_kv_heads=heads
    )
    return PatchInfo("made", SurgeryPlan(model=made, targets=targets).model_dump(mode="json"))


def made_model(num_layers, num_heads, **changes):
    """What an artefact says of a model that nobody has."""
    body = {
        "id": "made",
        "model_type": "llama",
        "fingerprint": "0" * 64,
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_dim": 8,
        "hidden_size": 32,
        "qkv_bias": False,
        "output_bias": False,
        "positions": "rope",
        "num_parameters": 100_000,
    }
    return from_plain(ModelInfo, {**body, **changes}, "test")


def ablate_sets(model, encoded, sets, kind=ZERO, **options):
    """Losses with each set of heads under one intervention."""
    variants = [Variant(tuple(heads), kind) for heads in sets]
    return variant_losses(model, encoded, variants, **options)
