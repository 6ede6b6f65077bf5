"""Therapy: doses by measurement, treatments in a repair, never worse, and empty patches."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from conftest import tiny_language_model, tiny_model, tiny_tokenizer
from headwise.artefacts import load_artefact
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.symptoms import Symptom
from headwise.errors import ArtefactError, SelectionError, TextError
from headwise.forward.losses import divergence
from headwise.heads import Head
from headwise.intervals import Interval
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.patch import Patch
from headwise.models.patient import patient_texts
from headwise.models.slices import head_spans
from headwise.models.values import PatchInfo
from headwise.proof.compare import compare
from headwise.proof.evaluate import evaluate
from headwise.settings import changed
from headwise.surgery.job import last_hiddens
from headwise.surgery.operation import operate
from headwise.surgery.plan import SurgeryPlan, make_plan, plans_of
from headwise.surgery.recipe import RECIPES, treatment_recipe
from headwise.surgery.sink_directions import measure_directions
from headwise.surgery.treatments import (
    Dose,
    prescribed,
    treat,
    with_prescription,
    with_slopes,
    with_treatment,
)
from headwise.texts.batches import batches
from headwise.texts.corpus import build_corpus
from headwise.texts.text_sets import TextSet, default_texts
from headwise.therapy import dose
from headwise.therapy.auto import choice_blocks, try_empty_heads, write_plan
from headwise.therapy.dose import _further, _gains, _options, _sure, choose_doses
from headwise.therapy.ill_heads import IllHeads, find_ill_heads, other_texts
from headwise.therapy.never_worse import MOST, judged_blocks, loss_change
from headwise.therapy.repair import repair
from headwise.therapy.values import Therapy, Tried
from headwise.triaging.texts import triage_texts
from planned import (
    TINY_RECIPE,
    opened,
    plan_for,
    random_corpus,
    random_ids,
    small_texts,
    weight_bits,
)


def numbered_corpus(**sizes):
    """A random corpus whose validation blocks are documents of their own."""
    corpus = random_corpus(**sizes)
    rows = enumerate(corpus.validation)
    return replace(corpus, validation=tuple(replace(b, index=(n,)) for n, b in rows))


UNTRAINED = TINY_RECIPE.model_copy(update={"steps": 0})


@pytest.fixture
def tiny():
    return LoadedModel("tiny", tiny_model("llama"), tiny_tokenizer())


@pytest.fixture(scope="module")
def asleep():
    """The patient, a plan for the three heads that carry most, and a small corpus."""
    loaded = load_model("patient")
    texts = TextSet("some", tuple(patient_texts("train"))[:40])
    corpus = build_corpus(loaded, texts, block=256, validation_share=0.4)
    found = diagnose(loaded, TextSet("few", texts.texts[:2]), max_length=256)
    return loaded, make_plan(found, heads="L2H7,L4H7,L5H6"), corpus


def test_a_treatment_without_training_changes_its_slices_alone_and_is_named_a_sham(tiny, tmp_path):
    plan = plan_for(tiny.model)
    before = weight_bits(tiny.model)
    run = repair(
        tiny, plan, random_corpus(), UNTRAINED, out=tmp_path, treatment="release", dose=0.5
    )
    assert run.outcome == "sham"
    assert {name.rsplit(".", 1)[1] for name in run.patch.slices} == {"q"}
    body = load_artefact(tmp_path / "run.json", "run")
    assert body["outcome"] == "sham"
    assert body["plan"]["treatments"] == {"release": plan.targets}
    assert body["plan"]["doses"] == {"release": 0.5}
    assert weight_bits(tiny.model) == before


def test_a_run_that_never_beats_its_start_is_the_sham(tiny, tmp_path):
    ruinous = TINY_RECIPE.model_copy(update={"lr": 50.0, "clip": 1e6})
    plan = plan_for(tiny.model)
    run = repair(tiny, plan, random_corpus(), ruinous, out=tmp_path)
    assert run.state.best_step == 0
    assert run.outcome == "sham"
    sham = repair(tiny, plan, random_corpus(), UNTRAINED, out=tmp_path / "sham", mode="sham")
    assert all(
        torch.equal(run.patch.slices[n].after, s.after) for n, s in sham.patch.slices.items()
    )
    only = repair(tiny, plan, random_corpus(), ruinous, out=tmp_path / "only", mode="gradient-only")
    assert only.outcome == "unchanged"


def test_a_run_that_learns_is_called_trained(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    run = repair(loaded, plan_for(loaded.model), small_texts(), TINY_RECIPE, out=tmp_path)
    assert run.state.best_step > 0
    assert run.outcome == "trained"


def test_a_plan_names_treatments_and_doses_head_by_head(tiny, tmp_path):
    plan = plan_for(
        tiny.model,
        treatments={"release": "L1H0", "centre": "L1H1"},
        doses={"L1H0": 0.25, "centre": 0.75},
    )
    given = prescribed(SurgeryPlan.load(plan.save(tmp_path / "plan.yaml")))
    assert given == {
        Head(0, 1): Dose("reinitialise", 1.0),
        Head(1, 0): Dose("release", 0.25),
        Head(1, 1): Dose("centre", 0.75),
    }
    assert prescribed(with_prescription(plan, given)) == given
    everywhere = prescribed(with_treatment(plan, "temper", 0.3))
    assert set(everywhere.values()) == {Dose("temper", 0.3)}


def test_a_treatment_of_a_head_that_is_no_target_is_refused(tiny):
    with pytest.raises(SelectionError, match="no target"):
        prescribed(plan_for(tiny.model, treatments={"release": "L0H0"}))


def test_a_mode_that_does_not_operate_takes_no_treatment(tiny, tmp_path):
    plan = plan_for(tiny.model)
    with pytest.raises(SelectionError, match="does not treat"):
        repair(tiny, plan, random_corpus(), out=tmp_path, mode="gradient-only", treatment="release")


def gained(tried):
    """Change of training loss by all that was kept: each trial is against the one kept before."""
    return sum(row.change for row in tried if row.kept)


def test_doses_are_found_that_lower_the_loss_and_the_model_stays_as_it_was(asleep):
    loaded, plan, corpus = asleep
    before = weight_bits(loaded.model)
    directions = measure_directions(loaded.model, corpus.train, (2, 4, 5))
    doses, tried = choose_doses(loaded.model, plan, corpus.train, directions)
    assert weight_bits(loaded.model) == before
    assert gained(tried) < -0.02
    assert set(doses) == set(plan.target_heads)
    patch = treat(loaded.model, plan, doses, directions=directions)
    assert loss_change(loaded.model, patch, corpus.validation, "own").change.high < 0


def test_spared_heads_are_treated_only_if_all_heads_together_do_better_with_them(asleep):
    loaded, plan, corpus = asleep
    directions = measure_directions(loaded.model, corpus.train, (0, 2, 4, 5))
    heads = plan.target_heads
    doses, tried = choose_doses(loaded.model, plan, corpus.train, directions, spared=heads)
    assert set(doses) == set(heads)  # they sleep: all of them together gain
    assert {row.heads for row in tried} == {"all", *map(str, heads)}
    healthy = changed(plan, targets="L0H0")
    _, tried = choose_doses(loaded.model, healthy, corpus.train, directions, spared=[Head(0, 0)])
    assert {row.heads for row in tried} == {"all"}  # no gain together, so not looked at alone


def test_auto_wakes_sleeping_heads_and_keeps_the_patch(asleep, tmp_path):
    loaded, plan, corpus = asleep
    recipe = RECIPES["patient"].model_copy(update={"steps": 0})
    run = repair(loaded, plan, corpus, recipe, out=tmp_path, treatment="auto")
    therapy = Therapy.load(tmp_path)
    assert therapy.better
    assert therapy.change is not None
    assert therapy.change.high < 0
    assert set(therapy.treatments) == {"L2H7", "L4H7", "L5H6"}
    assert set(therapy.classes) == {"L2H7", "L4H7", "L5H6"}
    assert set(therapy.classes.values()) <= {"asleep", "empty", "undecided"}
    assert not run.patch.is_empty
    again = repair(loaded, plan, corpus, recipe, out=tmp_path, treatment="auto", resume=True)
    assert again.patch.base_fingerprint() == run.patch.base_fingerprint()
    with pytest.raises(ArtefactError, match="run here already"):
        repair(loaded, plan, corpus, recipe, out=tmp_path, treatment="auto")


def test_auto_ends_in_an_empty_patch_where_nothing_is_shown_to_be_better(tiny, tmp_path):
    plan = plan_for(tiny.model)
    corpus = numbered_corpus(validation=8)
    ruinous = TINY_RECIPE.model_copy(update={"lr": 50.0, "clip": 1e6, "validation_blocks": 0})
    run = repair(tiny, plan, corpus, ruinous, out=tmp_path, treatment="auto")
    assert run.outcome == "empty"
    assert run.patch.is_empty
    assert "leaving the model alone is best" in Therapy.load(tmp_path).sentence
    assert load_artefact(tmp_path / "run.json", "run")["outcome"] == "empty"
    assert Patch.load(tmp_path / "patch.safetensors").is_empty
    again = repair(tiny, plan, corpus, ruinous, out=tmp_path, treatment="auto", resume=True)
    assert again.outcome == "empty"


def test_auto_finds_no_head_to_treat_in_a_model_without_sick_heads(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    # of 24 tokens the best of eight positions has a fifth of the attention by chance
    corpus = numbered_corpus(validation=8, length=64)
    plan = find_ill_heads(loaded, corpus, TINY_RECIPE).plan
    assert plan.targets == ""
    run = repair(loaded, None, corpus, TINY_RECIPE, out=tmp_path, treatment="auto")
    assert run.patch.is_empty
    assert (tmp_path / "trace.jsonl").exists()


def test_a_head_that_gives_nothing_is_ill_wherever_it_looks():
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    head = Head(1, 2)
    for role in ("v", "o"):
        for span in head_spans(loaded.model, head, role).values():
            span.of(loaded.model).data *= 1e-3
    plan = find_ill_heads(loaded, numbered_corpus(validation=8, length=24), TINY_RECIPE).plan
    assert head in plan.target_heads


def test_a_corpus_that_cannot_tell_whether_a_repair_is_better_is_refused_at_once(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    with pytest.raises(TextError, match="8 validation documents") as refused:
        repair(loaded, None, ["one long text. " * 200], out=tmp_path, treatment="auto")
    assert "--lines" in str(refused.value)
    assert not list(tmp_path.iterdir())


def test_a_repair_without_validation_text_says_that_nothing_is_known_of_its_worth(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    told = []
    recipe = TINY_RECIPE.model_copy(update={"steps": 1, "validation_blocks": 2})
    texts = ["one long text. " * 200]
    plan = plan_for(loaded.model)
    repair(loaded, plan, texts, recipe, out=tmp_path, progress=lambda title, *_: told.append(title))
    assert any("nothing here says whether it is better" in title for title in told)


def test_a_drowsy_head_is_ill_only_if_a_treatment_wakes_it(asleep):
    loaded, _, corpus = asleep
    recipe = RECIPES["patient"]
    drowsy = Symptom("drowsy", "first_token_mass > 0.3", False, "")  # staring is no illness now
    found = find_ill_heads(loaded, corpus, recipe, rows=[drowsy])
    ill = found.plan.target_heads
    assert Head(4, 7) in ill
    assert len(ill) < 20  # all of them look at the first token, most gain nothing by not doing so
    assert set(found.triaged) == set(ill)  # auto need not triage them again
    awake = find_ill_heads(loaded, corpus, recipe, rows=[])
    assert awake.plan.target_heads == []


def test_the_work_of_auto_counts_triage_and_doses(tiny, tmp_path):
    told = []

    def refusing(model, work):
        told.append(work.tokens)
        raise SelectionError("enough")

    for treatment in ("release", "auto"):
        with pytest.raises(SelectionError, match="enough"):
            repair(
                tiny,
                plan_for(tiny.model),
                numbered_corpus(validation=8),
                UNTRAINED,
                out=tmp_path,
                treatment=treatment,
                budget=refusing,
            )
    assert told[1] - told[0] == choice_blocks(3) * UNTRAINED.block > 0


@pytest.fixture(scope="module")
def emptied():
    """The empty patient, three of its heads, a small corpus and what treatments need measured."""
    loaded = load_model("patient-empty")
    texts = TextSet("some", tuple(patient_texts("train"))[:40])
    corpus = build_corpus(loaded, texts, block=256)
    found = diagnose(loaded, TextSet("few", texts.texts[:2]), max_length=256)
    plan = make_plan(found, heads="L2H7,L4H7,L5H6")
    return loaded, plan, corpus, measure_directions(loaded.model, corpus.train, (2, 4, 5))


def test_a_sure_gain_that_is_too_small_to_matter_is_no_treatment(emptied, monkeypatch):
    """Released, the empty patient's heads gain some 1e-5 nats in every document."""
    loaded, plan, corpus, directions = emptied
    monkeypatch.setattr(dose, "REGROWN", ())
    doses, tried = choose_doses(loaded.model, plan, corpus.train, directions)
    assert doses == {}
    assert min(row.change + 2 * row.error for row in tried) < 0


def test_what_only_decayed_is_grown_again_and_released(emptied):
    loaded, plan, corpus, directions = emptied
    doses, tried = choose_doses(loaded.model, plan, corpus.train, directions)
    assert gained(tried) < -0.02
    given = {dose.treatment for dose in doses.values()}
    assert "release+regrow" in given
    assert given <= {"release+regrow", "centre+regrow", "none"}


def test_a_dose_is_raised_as_long_as_that_helps():
    now = Dose("release", 1.0)
    assert _options(now, [Dose("centre", 0.8), now]) == [
        Dose("centre", 0.8),
        Dose("release", 0.9),
        Dose("release", 1.1),
    ]
    assert _further(now, Dose("release", 1.1)) == [Dose("release", 1.2)]
    assert _further(now, Dose("release", 0.9)) == [Dose("release", 0.8)]
    assert _further(now, Dose("release", 1.5)) == []
    assert _further(now, Dose("centre", 0.8)) == []


def test_one_of_many_heads_must_gain_more_than_the_best_of_so_many_would_by_chance():
    row = Tried("L15H1", "centre 0.6", change=-0.0035, error=0.0012, kept=False)
    assert _gains(row, -0.002, _sure(1, 16))
    assert not _gains(row, -0.002, _sure(72, 16))
    best = np.random.default_rng(0).standard_t(15, size=(4000, 72)).max(1)
    assert (best > _sure(72, 16)).mean() == pytest.approx(0.05, abs=0.015)


def test_heads_are_tried_alone_only_where_triage_saw_hope(asleep):
    loaded, plan, corpus = asleep
    directions = measure_directions(loaded.model, corpus.train, (0,))
    healthy = changed(plan, targets="L0H0-2")
    _, tried = choose_doses(loaded.model, healthy, corpus.train, directions, promising=[Head(0, 1)])
    assert {row.heads for row in tried} == {"all", "L0H1"}


def test_of_many_heads_the_ones_with_hope_are_triaged(asleep):
    loaded, plan, corpus = asleep
    every = changed(plan, targets="L0H0-5,L2H7,L4H7,L5H6")
    found, _ = write_plan(loaded.model, IllHeads(every), corpus, asked="", most=5)
    assert {"L2H7", "L4H7", "L5H6"} <= set(found.classes)
    assert len(found.classes) == 5
    assert set(found.untriaged) == {str(h) for h in every.target_heads} - set(found.classes)
    assert not set(found.untriaged) & set(found.treatments)


@pytest.mark.parametrize("better", ["reinitialise", "none"])
def test_empty_heads_start_in_the_way_that_did_better_in_a_short_trial(
    tmp_path, monkeypatch, better
):
    model = tiny_language_model("llama")
    plan = plan_for(model, "L1H0-1")
    given = with_prescription(plan, dict.fromkeys(plan.target_heads, Dose("reinitialise", 1.0)))
    therapy, before, seen = Therapy("", given, (), {}, ()), weight_bits(model), []

    def change(model, patch, blocks, texts):
        [name] = patch.info.plan["treatments"]
        seen.append((name, patch, blocks))
        return replace(
            loss_change(model, patch, blocks, texts),
            change=Interval(-0.2 if name == better else -0.1, -0.3, 0.1),
        )

    monkeypatch.setattr("headwise.therapy.auto.loss_change", change)
    with opened(model, plan, tmp_path, reinit=False) as job:
        found = try_empty_heads(job, therapy)
        untrained = replace(job, run=replace(job.run, recipe=UNTRAINED))
        assert try_empty_heads(untrained, therapy) is therapy  # nothing is trained: no trial
        blocks = job.corpus.train
    assert list(found.plan.treatments) == [better]
    assert found.plan.target_heads == plan.target_heads
    rows = [(row.dose, row.change, row.error, row.kept) for row in found.tried]
    assert rows == [
        (f"{name} 1", -0.2 if name == better else -0.1, pytest.approx(0.1), name == better)
        for name in ("reinitialise", "none")
    ]
    for _, patch, read in seen:
        assert any((part.after != part.before).any() for part in patch.slices.values())
        assert not {id(block) for block in read} & {id(block) for block in blocks[::2]}
    assert weight_bits(model) == before
    assert not list(tmp_path.iterdir())


def test_other_text_for_harm_is_no_default_of_an_evaluation_and_no_validation_text():
    texts = set(other_texts())
    assert len(texts) == 16
    assert not texts & {*default_texts("patient").texts, *default_texts("a/model").texts}
    assert not texts & set(triage_texts("patient").texts)


def test_flat_heads_are_moved_down_the_slope_as_far_as_that_helps(tmp_path):
    """A model that was trained loses its queries in one head; the slope leads part of the way."""
    loaded = load_model("patient")
    corpus = build_corpus(loaded, TextSet("some", tuple(patient_texts("train"))[:40]), block=256)
    plan = plan_for(loaded.model, "L3H0")
    directions = measure_directions(loaded.model, corpus.train, [3])
    with pytest.raises(SelectionError, match="slope"):
        treat(loaded.model, plan, {Head(3, 0): Dose("seek", 0.5)}, directions=directions)
    for span in head_spans(loaded.model, Head(3, 0), "q").values():
        span.of(loaded.model).data.zero_()
    sloped = with_slopes(directions, loaded.model, corpus.train, [3])
    _, tried = choose_doses(
        loaded.model, plan, corpus.train, sloped, others={"flat": plan.target_heads}
    )
    assert min(row.change for row in tried if row.dose.startswith("seek")) < 0
    assert {row.dose for row in tried} >= {"seek 0.2", "seek 0.5", "seek 1", "sharpen 2"}


def test_an_empty_patch_is_a_patch_everywhere(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    plan = plan_for(loaded.model).model_copy(update={"targets": ""})
    info = PatchInfo(base_model="tiny", plan=plan.model_dump(mode="json"))
    patch = Patch.load(Patch({}, info).save(tmp_path / "patch.safetensors"))
    assert patch.is_empty
    assert patch.num_weights == 0
    assert patch.dtype == "auto"
    assert plans_of([patch.info]) == []
    before = weight_bits(loaded.model)
    patch.apply(loaded.model)
    patch.undo(loaded.model)
    assert weight_bits(loaded.model) == before
    texts = TextSet("few", ("a small text of some words", "another small text of words"))
    stock = evaluate(loaded, [texts], max_length=32)
    after = evaluate(loaded, [texts], patches=[patch], max_length=32)
    result = compare(stock, after)
    assert result.losses["few"].difference.value == 0


def test_the_loss_of_a_document_is_the_sum_over_its_pieces(tiny):
    corpus = random_corpus(train=2, validation=3)
    whole = replace(corpus.validation[0], index=tuple(0 for _ in corpus.validation[0].lengths))
    change = loss_change(tiny.model, Patch({}), [whole, *corpus.validation[1:]], "own").change
    assert (change.value, change.low, change.high) == (0, 0, 0)


def test_a_repair_is_judged_on_validation_text_that_did_not_steer_it():
    few = random_corpus(validation=4)
    assert judged_blocks(few, 2) == few.validation  # too few are left: all of them
    block = few.validation[0]
    numbered = tuple(replace(block, index=(n,) * len(block.lengths)) for n in range(40))
    assert judged_blocks(replace(few, validation=numbered), 4) == numbered[4:]
    assert len(judged_blocks(replace(few, validation=numbered * 20), 4)) == MOST  # of 796


def test_rows_of_a_block_know_their_document():
    texts = TextSet("t", tuple(f"document {n} " * (5 + n) for n in range(12)))
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    corpus = build_corpus(loaded, texts, block=16, validation_share=0.0)
    lengths = np.zeros(12, dtype=int)
    for block in corpus.train:
        for row, document in enumerate(block.index):
            lengths[document] += int(block.lengths[row])
    expected = [len(tiny_tokenizer()(text)["input_ids"]) for text in texts.texts]
    assert all(0 <= e - n <= 1 for e, n in zip(expected, lengths, strict=True))


def test_the_rate_of_the_treatment_recipe_falls_with_the_width():
    assert treatment_recipe(192, 256).lr < RECIPES["patient"].lr
    assert treatment_recipe(768, 128).lr == pytest.approx(treatment_recipe(192, 128).lr / 4)
    assert treatment_recipe(768, 128).block == 128


def test_the_empty_patient_is_as_sick_as_the_patient_and_release_finds_nothing(asleep):
    loaded = load_model("patient-empty")
    texts = TextSet("few", tuple(patient_texts("heldout"))[:3])
    assert diagnose(loaded, texts, max_length=256).counts["dead"] == 20
    plan, corpus = asleep[1], asleep[2]
    directions = measure_directions(loaded.model, corpus.train, (2, 4, 5))
    given = dict.fromkeys(plan.target_heads, Dose("release", 0.9))
    patch = treat(loaded.model, plan, given, directions=directions)
    change = loss_change(loaded.model, patch, corpus.validation, "own").change
    assert abs(change.value) < 0.002


def test_therapy_json_is_the_same_after_a_round_trip(tiny, tmp_path):
    plan = plan_for(tiny.model, "L0H1", treatments={"release": "L0H1"}, doses={"L0H1": 0.9})
    therapy = Therapy("what was asked", plan, ("L1H0",), {}, ())
    therapy.save(tmp_path)
    assert therapy.treatments == {"L0H1": "release"}
    assert Therapy.load(tmp_path) == therapy
    assert json.loads((tmp_path / "therapy.json").read_text())["schema"] == "headwise.therapy/1"


def kept_divergence(loaded, patch, blocks):
    stock = last_hiddens(loaded.model, blocks)
    with patch.applied(loaded.model):
        moved = last_hiddens(loaded.model, blocks)
    pairs = zip(moved, stock, blocks, strict=True)
    return sum(
        float(divergence(loaded.model, a, b, block.lengths).detach()) for a, b, block in pairs
    )


def test_holding_a_model_to_stock_on_other_text_keeps_what_it_said_there(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("llama"), tiny_tokenizer())
    plan, texts = plan_for(loaded.model), small_texts()
    other = TextSet("other", tuple(f"{i * 7} {i} {i * i}" for i in range(20)))
    recipe = TINY_RECIPE.model_copy(update={"validation_blocks": 0, "hold_weight": 10.0})
    free = repair(loaded, plan, texts, recipe, out=tmp_path / "free", mode="gradient-only")
    held = repair(
        loaded, plan, texts, recipe, out=tmp_path / "held", mode="gradient-only", keep=other
    )
    blocks = build_corpus(loaded, other, block=24, validation_share=0.0).train
    assert kept_divergence(loaded, Patch({}), blocks) == pytest.approx(0, abs=1e-6)
    assert kept_divergence(loaded, held.patch, blocks) < 0.7 * kept_divergence(
        loaded, free.patch, blocks
    )
    asked = load_artefact(tmp_path / "held" / "run.json", "run")["request"]
    assert asked["keep"]["sha256"] == other.sha256
    with pytest.raises(ArtefactError, match="kept differs"):
        repair(
            loaded, plan, texts, recipe, out=tmp_path / "held", mode="gradient-only", resume=True
        )


def test_a_change_of_loss_is_told_by_document_and_along_the_context(tiny):
    """Against transformers' own loss of every token."""
    plan = plan_for(tiny.model)
    patch = operate(tiny.model, plan)
    texts = [random_ids(n, n) for n in (40, 7, 120, 33, 2, 97, 64, 150, 20, 96)]
    blocks = [next(batches([ids], 1)) for ids in texts]
    blocks = [replace(block, index=(number,)) for number, block in enumerate(blocks)]

    def losses():
        rows = []
        for ids in texts:
            with torch.inference_mode():
                logits = tiny.model(torch.tensor([ids])).logits[0, :-1]
            rows.append(
                torch.nn.functional.cross_entropy(
                    logits.double(), torch.tensor(ids[1:]), reduction="none"
                ).numpy()
            )
        return rows

    before = losses()
    with patch.applied(tiny.model):
        after = losses()
    deltas = [now - then for now, then in zip(after, before, strict=True)]
    change = loss_change(tiny.model, patch, blocks, "own")
    assert change.documents == len(texts)
    assert change.change.value == pytest.approx(np.concatenate(deltas).mean(), abs=1e-6)
    assert change.worse == np.mean([delta.sum() > 0 for delta in deltas])
    assert list(change.by_position) == ["1-32", "33-96", "97-256"]
    for (name, found), start, end in zip(
        change.by_position.items(), (0, 32, 96), (32, 96, 256), strict=True
    ):
        part = np.concatenate([delta[start:end] for delta in deltas])
        assert found.value == pytest.approx(part.mean(), abs=1e-6), name


def test_auto_tells_what_it_does_to_other_text_and_keep_refuses_harm(asleep, tmp_path, monkeypatch):
    loaded, plan, corpus = asleep
    recipe = RECIPES["patient"].model_copy(update={"steps": 0})
    other = TextSet("other", tuple(patient_texts("second"))[:9])
    run = repair(loaded, plan, corpus, recipe, out=tmp_path / "a", treatment="auto", also=other)
    therapy = Therapy.load(tmp_path / "a")
    assert therapy.better
    assert therapy.elsewhere is not None
    assert (therapy.elsewhere.texts, therapy.elsewhere.documents) == ("other", 9)
    told = load_artefact(tmp_path / "a" / "run.json", "run")["against_stock"]
    assert told == {
        "validation text": therapy.change.to_json(),
        "other": therapy.elsewhere.change.to_json(),
    }
    assert not run.patch.is_empty

    def harmful(model, patch, blocks, texts):
        change = loss_change(model, patch, blocks, texts)
        return change if texts != "other" else replace(change, change=Interval(0.2, 0.1, 0.3))

    monkeypatch.setattr("headwise.therapy.repair.loss_change", harmful)
    for keep, empty in ((None, False), (other, True)):
        out = tmp_path / f"{empty}"
        run = repair(loaded, plan, corpus, recipe, out=out, treatment="auto", also=other, keep=keep)
        assert run.patch.is_empty == empty
        assert "worse there, with 95% confidence" in Therapy.load(out).other
