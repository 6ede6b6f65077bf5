"""Triage: exact costs of interventions, decisions with little text, and what the classes mean."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from conftest import SENTENCES, tiny_language_model, tiny_model, tiny_tokenizer
from eager import head_values, watched
from headwise.cli import app
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.values import diagnosis_from
from headwise.errors import ArtefactError, HeadwiseError, SettingsError, TextError
from headwise.forward.attention import tile_scores
from headwise.forward.interventions import (
    UNSINK,
    ZERO,
    Variant,
    hidden_sink,
    mean_output,
    patched_queries,
)
from headwise.forward.mean_outputs import measure_means
from headwise.forward.tap import tapped
from headwise.forward.variant_losses import head_costs, variant_losses
from headwise.heads import Head, all_heads
from headwise.intervals import Interval
from headwise.models.architectures import geometry_of, projection_of
from headwise.models.description import describe_model
from headwise.models.loaded_model import LoadedModel
from headwise.models.slices import write_slices
from headwise.proof.compare import read_snapshot
from headwise.surgery.plan import make_plan
from headwise.surgery.sink_directions import measure_directions
from headwise.surgery.treatments import Dose, treat
from headwise.texts.batches import batches
from headwise.texts.corpus import build_corpus
from headwise.texts.text_sets import TextSet, default_corpus, default_texts
from headwise.triaging.settings import TriageSettings, TriageThresholds
from headwise.triaging.texts import triage_texts
from headwise.triaging.triage import triage
from headwise.triaging.values import (
    TRIAGE_CLASSES,
    HeadTriage,
    Triage,
    is_decided,
    triage_class,
)
from planned import random_ids

# a family of each way to know positions, with grouped keys and with norms of queries and keys
FAMILIES = ("bloom", "llama", "gpt2", "qwen3", "falcon-mqa", "gemma2", "mpt-clip", "gptj")


def documents(count=3, length=40, vocabulary=97, seed=0):
    generator = np.random.default_rng(seed)
    return [list(map(int, generator.integers(3, vocabulary, length - i))) for i in range(count)]


def document_losses(model, encoded):
    """Plain forward passes, one document at a time, summed in float64."""
    found = []
    with torch.inference_mode():
        for ids in encoded:
            logits = model(torch.tensor([ids]), use_cache=False).logits[0, :-1]
            loss = torch.nn.functional.cross_entropy(logits.double(), torch.tensor(ids[1:]))
            found.append(float(loss) * (len(ids) - 1))
    return np.array(found)


@contextmanager
def output_of(model, head, change):
    """`change` gets the head's own output (text, query, value) and gives another."""
    dim = geometry_of(model).head_dim
    span = slice(head.index * dim, (head.index + 1) * dim)

    def replace(_, inputs):
        out = inputs[0].clone()
        out[..., span] = change(out[..., span])
        return (out, *inputs[1:])

    handle = projection_of(model, head.layer, "o").register_forward_pre_hook(replace)
    try:
        yield
    finally:
        handle.remove()


def unsunk_output(model, ids, head):
    """From transformers' own attention weights: the first key's go, the rest is renormalised."""
    with watched(model) as seen, torch.inference_mode():
        weights = model(torch.tensor([ids]), use_cache=False, output_attentions=True).attentions
    p = weights[head.layer][0, head.index].double().clone()
    p[1:, 0] = 0
    p = p / p.sum(-1, keepdim=True)
    values = head_values(model, head.layer, seen["value"][head.layer])[0, head.index]
    return p @ values


def planned(model):
    geometry = geometry_of(model)
    mass = np.full((geometry.num_layers, geometry.num_heads), 0.7)
    diagnosis = diagnosis_from(
        model=describe_model(model, "tiny"),
        maps={"first_token_mass": mass},
        thresholds=Thresholds(),
    )
    return make_plan(diagnosis, heads="all", kv_policy="queries-only")


def interventions(model, encoded):
    plan = planned(model)
    blocks = list(batches(encoded, 2))
    directions = measure_directions(model, blocks, range(geometry_of(model).num_layers))
    patches = {
        name: treat(
            model, plan, {h: Dose(name, 1.0) for h in plan.target_heads}, directions=directions
        )
        for name in ("release", "centre")
    }
    return measure_means(model, batches(encoded, 2)), patches


def brute_force(model, encoded, heads, means, patches):
    """One head and one intervention at a time: hooks or edited weights, whole forward passes."""
    base = document_losses(model, encoded)
    found = np.zeros((len(heads), 3 + len(patches), len(encoded)))
    for h, head in enumerate(heads):
        with output_of(model, head, torch.zeros_like):
            found[h, 0] = document_losses(model, encoded)
        mean = means[head.layer, head.index].to(model.dtype)
        with output_of(model, head, lambda out, mean=mean: mean.expand_as(out)):
            found[h, 1] = document_losses(model, encoded)
        for d, ids in enumerate(encoded):
            new = unsunk_output(model, ids, head).to(model.dtype)
            with output_of(model, head, lambda out, new=new: new):
                found[h, 2, d] = document_losses(model, [ids])[0]
        for k, patch in enumerate(patches.values(), 3):
            found[h, k] = _with_queries(model, encoded, head, patch)
    return found - base


def _with_queries(model, encoded, head, patch):
    names = [name for name in patch.slices if name.split(".")[0] == str(head)]
    parts = {name: patch.slices[name] for name in names}
    write_slices(model, {part.span: part.after for part in parts.values()})
    try:
        return document_losses(model, encoded)
    finally:
        write_slices(model, {part.span: part.before for part in parts.values()})


@pytest.mark.parametrize("family", FAMILIES)
def test_costs_are_those_of_brute_force_one_head_at_a_time(family):
    model = tiny_model(family, sharpen=8.0)
    encoded = documents()
    heads = all_heads(geometry_of(model).num_layers, geometry_of(model).num_heads)
    means, patches = interventions(model, encoded)
    kinds = [ZERO, mean_output(model, means), UNSINK]
    kinds += [patched_queries(model, name, patch) for name, patch in patches.items()]
    costs = head_costs(model, encoded, heads, kinds, stack=5)
    exact = brute_force(model, encoded, heads, means, patches)
    assert [kind.name for kind in kinds] == ["zero", "mean", "unsink", "release", "centre"]
    assert np.abs(exact).max(2).min() > 1e-6  # every intervention does something to every head
    per_token = np.abs(costs - exact).sum(2) / sum(len(ids) - 1 for ids in encoded)
    assert per_token.max() < 1e-6


@pytest.mark.parametrize("family", FAMILIES)
def test_a_set_of_heads_is_that_of_brute_force_under_any_intervention(family):
    """Above its lowest layer an intervention answers to what the variant has become there."""
    model, encoded = tiny_model(family, sharpen=8.0), documents()
    pair = (Head(0, 1), Head(1, 2))
    _, patches = interventions(model, encoded)
    released = patched_queries(model, "release", patches["release"])
    found = variant_losses(model, encoded, [Variant(pair, UNSINK), Variant(pair, released)])
    base = document_losses(model, encoded)
    hidden = np.zeros(len(encoded))
    for d, ids in enumerate(encoded):
        low = unsunk_output(model, ids, pair[0]).to(model.dtype)
        with output_of(model, pair[0], lambda out, low=low: low):
            high = unsunk_output(model, ids, pair[1]).to(model.dtype)
            with output_of(model, pair[1], lambda out, high=high: high):
                hidden[d] = document_losses(model, [ids])[0]
    parts = [part for name, part in patches["release"].slices.items() if _head(name) in pair]
    write_slices(model, {part.span: part.after for part in parts})
    try:
        exact = np.stack([hidden, document_losses(model, encoded)]) - base
    finally:
        write_slices(model, {part.span: part.before for part in parts})
    assert np.abs(found.deltas - exact).sum(1).max() / found.tokens.sum() < 1e-6
    alone = head_costs(model, encoded, pair, [UNSINK])[:, 0].sum(0)
    assert np.abs(alone - exact[0]).max() > 1e-4  # the two heads together are not their sum


def _head(name):
    return Head.parse(name.split(".")[0])


def test_only_treatments_of_queries_can_be_measured_head_by_head():
    model = tiny_model("llama")
    plan = planned(model)
    directions = measure_directions(model, list(batches(documents(), 2)), [0, 1])
    wrong = treat(model, plan, {Head(0, 0): Dose("reinitialise", 1.0)}, directions=directions)
    with pytest.raises(SettingsError, match="queries only"):
        patched_queries(model, "fresh", wrong)


def test_half_precision_gives_the_same_costs_but_for_rounding():
    model = tiny_model("llama", sharpen=4.0)
    encoded, heads = documents(2), [Head(0, 1), Head(1, 2)]
    exact = head_costs(model, encoded, heads, [ZERO, UNSINK])
    model = model.to(torch.bfloat16)
    rough = head_costs(model, encoded, heads, [ZERO, UNSINK])
    assert np.abs(rough - exact).sum() / sum(len(ids) - 1 for ids in encoded) < 0.02


def judged(z=0.0, m=0.0, s=0.0, r=0.0, *, half=0.0005, **rest):
    """A head with these costs, each known to `half`."""
    around = [Interval(v, v - half, v + half) for v in (z, m, s, r, s - 1.5 * z)]
    found = {"costs": z - half > 0, "gains": r + half < 0, **rest}
    return HeadTriage(*around, "release", documents=8, **found)


@pytest.mark.parametrize(
    ("found", "label"),
    [
        (judged(r=-0.02), "asleep"),
        (judged(z=0.01, s=0.5, r=-0.02), "asleep"),  # a gain is seen directly
        (judged(r=-0.001), "empty"),  # sure, but not worth a treatment
        (judged(r=-0.02, half=0.03), "undecided"),
        (judged(z=0.01, m=0.01, s=0.5, r=0.6), "parked"),
        (judged(z=0.1, m=0.1, s=0.11), "working"),  # the first key matters no more than the head
        (judged(z=0.1, m=0.05), "working"),
        (judged(z=0.1, m=-0.01), "constant"),
        (judged(z=0.1, m=0.0, s=0.4, r=0.5), "parked"),
        (judged(), "empty"),
        (judged(z=-0.05, s=-0.01), "empty"),  # nothing is lost with it
        (judged(half=0.01), "undecided"),
        (judged(z=0.01, half=0.001, costs=False), "undecided"),  # one of many: no discovery
    ],
)
def test_the_class_follows_from_the_costs(found, label):
    assert triage_class(found, TriageThresholds()) == label


def test_a_head_is_decided_when_no_earlier_rule_is_open():
    thresholds = TriageThresholds()
    assert is_decided(judged(r=-0.02), thresholds)
    assert is_decided(judged(), thresholds)
    assert is_decided(judged(z=0.1, m=0.05), thresholds)
    assert not is_decided(judged(half=0.01), thresholds)
    wide = judged(z=0.1, m=0.06, r=-0.001, half=0.04, gains=False)
    assert triage_class(wide, thresholds) == "working"  # if no text is left; it may yet be asleep
    assert not is_decided(wide, thresholds)


@pytest.fixture(scope="module")
def small(tokenizer):
    """A tiny model, its diagnosis with every head called sick, and the triage of two layers."""
    model = tiny_language_model("llama")
    texts = TextSet("sentences", tuple(f"{i}: {s}" for i in range(4) for s in SENTENCES))
    diagnosis = diagnose(model, tokenizer, texts, name="tiny", thresholds=Thresholds(sink=0.0))
    found = triage(model, tokenizer, diagnosis, texts, heads="L0")
    return model, diagnosis, texts, found


def test_triage_judges_the_chosen_heads_and_survives_its_file(small, tmp_path):
    *_, found = small
    assert list(found.heads) == [f"L0H{i}" for i in range(4)]
    path = found.save(tmp_path / "triage.json")
    again = Triage.load(path)
    assert again.heads == found.heads
    assert again.thresholds == found.thresholds
    assert again.save(tmp_path / "again.json").read_bytes() == path.read_bytes()
    assert sum(found.counts.values()) == 4
    decisions = found.provenance.decisions
    assert decisions.looks == (6, 8, 11, 15, 20)
    assert 0 < decisions.share_of_all_work <= 1
    assert read_snapshot(tmp_path).triage is not None


def test_the_same_triage_gives_the_same_bytes(small, tokenizer, tmp_path):
    model, diagnosis, texts, found = small
    again = triage(model, tokenizer, diagnosis, texts, heads="L0")
    files = [t.save(tmp_path / f"{i}.json").read_bytes() for i, t in enumerate((found, again))]
    assert files[0] == files[1]


def test_classes_are_words_of_a_plan(small):
    _, diagnosis, _, found = small
    sets = found.head_sets()
    assert set(TRIAGE_CLASSES) <= set(sets)
    label = found.heads["L0H0"].class_
    plan = make_plan(found, heads=f"{label} & sick")
    assert plan.target_heads == found.of_class(label)
    assert plan.model.id == diagnosis.model.id


def test_a_diagnosis_of_other_weights_and_too_little_text_are_refused(small, tokenizer):
    model, diagnosis, texts, _ = small
    with pytest.raises(ArtefactError, match="other weights"):
        triage(tiny_language_model("qwen3"), tokenizer, diagnosis, texts)
    with pytest.raises(TextError, match="two documents"):
        triage(model, tokenizer, diagnosis, TextSet("one", texts.texts[:1]))


def test_a_model_without_sick_heads_has_an_empty_triage(small, tokenizer):
    model, _, texts, _ = small
    healthy = diagnose(model, tokenizer, texts, name="t", thresholds=Thresholds(1.0, 1.0, 0.0))
    found = triage(model, tokenizer, healthy, texts)
    assert not found.heads
    assert set(found.counts.values()) == {0}


def test_the_first_token_is_as_in_the_diagnosis(small, tokenizer):
    model, _, texts, _ = small
    with_bos = diagnose(
        model, tokenizer, texts, name="t", bos=True, thresholds=Thresholds(sink=0.0)
    )
    found = triage(model, tokenizer, with_bos, texts, heads="L1H0")
    assert found.provenance.bos is True
    with pytest.raises(HeadwiseError, match="BOS"):
        triage(model, tokenizer, with_bos, texts, heads="L1H0", bos=False)


def test_the_patients_triage_text_is_neither_trained_nor_evaluated_on():
    texts = set(triage_texts("patient").texts)
    assert texts <= set(default_corpus("patient").texts)
    loaded = LoadedModel("tiny", tiny_model("llama"), tiny_tokenizer())
    corpus = build_corpus(loaded, default_corpus("patient"), block=512)
    train = corpus.info.train_documents
    assert train + len(texts) == len(set(default_corpus("patient").texts))
    assert not texts & set(default_texts("patient").texts)


def test_the_verb_writes_a_triage_that_plan_reads(small, model_dir, tmp_path):
    runner = CliRunner()
    texts = tmp_path / "texts.jsonl"
    texts.write_text("".join(f'{{"text": "{i} {SENTENCES[0]}"}}\n' for i in range(8)))
    common = ["--texts", str(texts), "--out", str(tmp_path)]
    made = runner.invoke(app, ["diagnose", str(model_dir), *common, "--sink", "0", "--no-figures"])
    assert made.exit_code == 0, made.output
    source = ["--diagnosis", str(tmp_path / "diagnosis.json")]
    done = runner.invoke(app, ["triage", str(model_dir), *source, *common, "--heads", "L1"])
    assert done.exit_code == 0, done.output
    assert "Z asleep" in done.output
    assert "triage.json" in done.output
    found = Triage.load(tmp_path / "triage.json")
    assert len(found.heads) == 4
    label = found.heads["L1H0"].class_
    plan = [
        "plan",
        str(tmp_path / "triage.json"),
        "--heads",
        label,
        "--out",
        str(tmp_path / "p.yaml"),
    ]
    assert runner.invoke(app, plan).exit_code == 0


def test_heads_of_the_patient_that_carry_the_gain_are_asleep():
    from headwise.models.loading import load_model

    loaded = load_model("patient")
    texts = triage_texts("patient")
    diagnosis = diagnose(loaded, TextSet("few", texts.texts[:4]))
    settings = TriageSettings(max_texts=12, max_length=192)
    found = triage(loaded, diagnosis, heads="L4H7,L5H6", settings=settings)
    assert found.provenance.texts.name == texts.name
    assert [head.class_ for head in found.heads.values()] == ["asleep", "asleep"]


def test_a_head_without_which_the_loss_falls_is_harmful_unless_release_does_about_as_well():
    thresholds = TriageThresholds()
    harmful = replace(judged(z=-0.1, m=-0.02, gains=False), harms=True)
    assert triage_class(harmful, thresholds) == "harmful"
    assert is_decided(harmful, thresholds)
    asleep = replace(judged(z=-0.1, m=-0.02, r=-0.09), harms=True)
    assert triage_class(asleep, thresholds) == "asleep"
    little = replace(judged(z=-0.001, m=-0.001), harms=True)
    assert triage_class(little, thresholds) == "empty"


@pytest.mark.parametrize("family", ["bloom", "llama", "gpt2"])
def test_the_key_of_a_heads_own_sink_is_hidden_from_it_alone(family):
    model = tiny_model(family)
    seen, group = [], geometry_of(model).group
    with torch.no_grad(), tapped(model, seen.append):
        model(torch.tensor([random_ids(12)]), use_cache=False)
    attention = seen[0]
    sinks = {Head(0, 1): 2, Head(1, 0): 5}
    hidden = hidden_sink(sinks).outputs(attention, lambda: None)
    scores = tile_scores(attention.scores, 0, 12)[0][0]
    v = attention.v[0].repeat_interleave(group, 0)
    for head in range(4):
        at = 2 if head == 1 else 0
        weights = scores[head].clone()
        weights[at + 1 :, at] = -torch.inf
        expected = weights.softmax(-1) @ v[head]
        torch.testing.assert_close(hidden[0, head], expected, rtol=1e-4, atol=1e-5)
