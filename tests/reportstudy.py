"""A small study made by hand: 8 x 8 heads, six arms, two seeds, written by headwise's own writers.

The numbers are drawn, not trained, but they behave: sinks in the shallow-slope columns, an
untrained operation that looks healthy by mass and is useless, training that makes heads useful, and
plain training that does a little better still. Enough for every table to have rows of its own.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np

from headwise.artefacts import save_artefact, write_text
from headwise.diagnosis.settings import Thresholds
from headwise.diagnosis.values import Pooled, Profile, SinkRate, diagnosis_from
from headwise.heads import Head, all_heads
from headwise.intervals import Interval, mean_interval
from headwise.keywords import keywords_of
from headwise.models.values import ModelInfo
from headwise.plasticity.settings import PlasticitySettings
from headwise.plasticity.values import (
    MAPS,
    DistanceMap,
    PlasticitySummary,
)
from headwise.proof.compare import Snapshot, compare
from headwise.proof.completed_texts import (
    Completion,
    CompletionProvenance,
    Completions,
    Prompt,
    measure_text,
)
from headwise.proof.settings import Sampling
from headwise.proof.trajectories import run_maps
from headwise.proof.values import Evaluation
from headwise.provenance import Decisions, MeasureSettings, Provenance, TextInfo
from headwise.pruning.settings import PruneSettings
from headwise.pruning.values import PART_NAMES, NestedSets
from headwise.studies.study import Study
from headwise.studies.summary import summarise_study
from headwise.surgery.plan import make_plan
from headwise.triaging.settings import TriageThresholds
from headwise.triaging.values import HeadTriage, Triage, TriageProvenance
from headwise.values import from_plain, to_plain

LAYERS, HEADS, DOCUMENTS = 8, 8, 24
EVIL = "</script><script>window.evil = 1</script> <img src=x onerror='window.evil = 2'> & co."
ARMS = [
    {"name": "surgery", "passes": 2},
    {"name": "second-corpus", "corpus": "second"},
    {"name": "gradient-only", "mode": "gradient-only"},
    {"name": "sham", "mode": "sham"},
    {"name": "random-heads", "mode": "random-heads"},
    {"name": "column", "plan": {"preset": "column", "column": 3}},
]
# arm -> (loss change, cost of a trained head, steps)
EFFECTS = {
    "surgery": (-0.046, 0.006, 120),
    "second-corpus": (-0.021, 0.004, 120),
    "gradient-only": (-0.058, 0.007, 120),
    "sham": (0.031, 0.0, 0),
    "random-heads": (0.012, 0.005, 120),
    "column": (-0.049, 0.006, 120),
}
MODEL = {
    "id": "hand/made-model",
    "model_type": "bloom",
    "fingerprint": "f" * 64,
    "num_layers": LAYERS,
    "num_heads": HEADS,
    "num_kv_heads": HEADS,
    "head_dim": 8,
    "hidden_size": 64,
    "qkv_bias": True,
    "output_bias": True,
    "positions": "alibi",
    "num_parameters": 412_160,
    "dtype": "float32",
}


def plasticity_summary(grid, settings=None) -> PlasticitySummary:
    """A run's plasticity.json of which only the plasticity of each head matters."""
    grid = tuple(tuple(row) for row in grid)
    return PlasticitySummary(
        {"id": "m"},
        dict.fromkeys(MAPS, ()) | {"plasticity": grid},
        {},
        DistanceMap((), (), (), ()),
        (),
        settings or PlasticitySettings(),
        {},
    )


def stock_mass() -> np.ndarray:
    """Sinks where slopes are shallow, in the middle layers; two of them dead."""
    rng = np.random.default_rng(7)
    layer = np.arange(LAYERS)[:, None]
    head = np.arange(HEADS)[None]
    height = 1 / (1 + np.exp(-(head - 4.2) * 1.3)) * np.exp(-(((layer - 4) / 2.4) ** 4))
    mass = np.clip(0.04 + 0.85 * height + rng.normal(0, 0.06, (LAYERS, HEADS)), 0.02, 0.93)
    mass[4, 7], mass[3, 6] = 0.971, 0.957
    return mass


def diagnosis_of(mass: np.ndarray, seed: int = 0):
    rng = np.random.default_rng(seed)
    slope = np.tile(2.0 ** -(np.arange(HEADS) + 1), (LAYERS, 1))
    starts, stops = [0, 1, 2, 4, 8, 16, 32, 64], [1, 2, 4, 8, 16, 32, 64, 128]
    ramp = np.linspace(1, 0, len(starts)) ** 2
    profile = mass[..., None] + (1 - mass[..., None]) * ramp * 0.9
    profile[..., 0] = 1.0
    keys = np.tril(np.ones((len(starts), len(starts))))
    keys /= keys.sum(1, keepdims=True)
    pooled = keys * (1 - mass[..., None, None])
    pooled[..., 0] += mass[..., None]
    norm = 1.2 - 0.8 * mass + rng.normal(0, 0.05, mass.shape)
    maps = {
        "first_token_mass": mass,
        "entropy": np.maximum(0.6 + 3.2 * (1 - mass) * (1 - slope), 0.02),
        "normalized_entropy": (1 - mass) * 0.8,
        "local_mass": (1 - mass) * 0.4,
        "output_norm": norm,
        "output_norm_ratio": norm / norm.mean(1, keepdims=True),
        "constant_share": np.clip(mass * 0.9 + rng.normal(0, 0.03, mass.shape), 0, 1),
        "value_norm_ratio": 1 - 0.7 * mass,
        "slope": slope,
        "first_token_mass_positional_baseline": 0.02 + 0.06 * (1 - slope),
    }
    texts = {"name": "heldout", "sha256": "a" * 64, "count": DOCUMENTS, "tokens": 3000}
    return diagnosis_from(
        model=from_plain(ModelInfo, MODEL, "test"),
        maps=maps,
        thresholds=Thresholds(),
        spread={"first_token_mass": np.full(mass.shape, 0.03)},
        profile=Profile(tuple(starts), tuple(stops), (24,) * 8, profile),
        sink_rate=SinkRate(0.3, 0.4),
        pooled=Pooled(tuple(starts), tuple(stops), pooled),
        provenance=Provenance(TextInfo(**texts), MeasureSettings(128), {"headwise": "x"}),
    )


def text_set(name: str, base: float, change: float, seed: int) -> dict:
    rng = np.random.default_rng(len(name))
    tokens = rng.integers(60, 200, DOCUMENTS)
    loss = base + rng.normal(0, 0.25, DOCUMENTS)
    noise = np.random.default_rng(seed + 100).normal(0, 0.012, DOCUMENTS) if change else 0
    sums = (loss + change + noise) * tokens
    found = mean_interval(sums, tokens)
    return {
        "documents": DOCUMENTS,
        "document_tokens": tokens.tolist(),
        "document_loss_sums": sums.tolist(),
        "predicted_tokens": int(tokens.sum()),
        "loss": found.to_json(),
        "perplexity": found.exp().to_json(),
        "texts": {"name": name, "sha256": name.ljust(64, "0"), "count": DOCUMENTS},
    }


def evaluation_of(diagnosis, *, change=0.0, costs=None, patches=(), seed=0) -> Evaluation:
    rng = np.random.default_rng(seed + 1)
    costs = costs or {}
    zero = {}
    for head in all_heads(LAYERS, HEADS):
        value = costs.get(head)
        if value is None:
            value = 0.012 * (1 - diagnosis.maps["first_token_mass"][head.layer, head.index]) ** 3
            value += float(rng.normal(0, 0.0006))
        spread = 0.0 if value == 0 else 0.0015
        zero[str(head)] = {
            "heads": [str(head)],
            "value": float(value),
            "low": float(value - spread),
            "high": float(value + spread),
        }
    total = float(sum(costs.values())) * 1.2
    zero["joint:operated"] = {
        "heads": [str(h) for h in costs],
        "value": total,
        "low": total * 0.8,
        "high": total * 1.2,
    }
    rows = {}
    for head in costs:
        label = diagnosis.classes[head.layer][head.index]
        sick = label in ("dead", "sink")
        useful = zero[str(head)]["low"] > 0
        rows[str(head)] = {
            "class": label,
            "sick": sick,
            "useful": useful,
            "functional": useful and not sick,
        }
    recovery = {
        "heads": rows,
        "operated": len(rows),
        "rule": "not sick, and useful",
        "judged": len(rows),
        "not_sick": sum(not r["sick"] for r in rows.values()),
        "functional": sum(r["functional"] for r in rows.values()),
        "exceptions": [n for n, r in rows.items() if not r["functional"]],
    }
    return from_plain(
        Evaluation,
        {
            "model": MODEL,
            "patches": list(patches),
            "text_sets": {
                "heldout": text_set("heldout", 3.2, change, seed),
                "heldout-union": text_set("heldout-union", 3.5, change / 2, seed),
            },
            "diagnosis": diagnosis.to_json(),
            "heads": {
                "ablation_zero": zero,
                "ablation_mean": zero,
                "documents": DOCUMENTS,
                "first_order": {
                    "map": np.zeros((LAYERS, HEADS)).tolist(),
                    "spearman_with_exact": 0.8,
                },
            },
            "recovery": recovery if patches else None,
            "mlp_dormancy": {},
            "provenance": {"versions": {"headwise": "x"}},
        },
        "test",
    )


def triage_of(classes: dict[str, str]) -> Triage:
    """A triage of the stock model, of which only the classes matter."""
    none = Interval(0.0, 0.0, 0.0)
    heads = {
        name: HeadTriage(
            none, none, none, none, none, "release", False, False, DOCUMENTS, class_=label
        )
        for name, label in classes.items()
    }
    decisions = Decisions("t", (DOCUMENTS,), (1.0,), 1.0)
    provenance = TriageProvenance(
        TextInfo("t", DOCUMENTS, "a" * 64), "sick", 64, 128, False, 1.0, 0, decisions, {}
    )
    return Triage(heads, TriageThresholds(), diagnosis_of(stock_mass()), provenance)


def build_study(out: Path, *, seeds=(0, 1), arms=ARMS) -> Path:
    """Write a whole study folder."""
    study = Study(
        name="hand-made",
        model="hand/made-model",
        seeds=list(seeds),
        arms=arms,
        corpora={"train": ["x"], "second": ["y"]},
    )
    save_artefact(out / "study.json", "study", {"study": study.model_dump(mode="json")})
    mass = stock_mass()
    stock = diagnosis_of(mass)
    before = evaluation_of(stock)
    stock.save(out / "stock" / "diagnosis.json")
    before.save(out / "stock" / "evaluation.json")
    plasticity_summary((1 - mass).tolist()).save(out / "stock" / "plasticity.json")
    for arm, seed in study.runs():
        build_run(out / "runs" / f"{arm.name}-s{seed}", study, arm, seed, before)
    write_completions(out, [arm["name"] for arm in arms])
    summarise_study(out, study).save(out / "summary.json")
    return out


def build_run(folder: Path, study: Study, arm, seed: int, before: Evaluation) -> None:
    """One run as `headwise study` leaves it, without the weights."""
    stock = before.diagnosis
    plan = make_plan(stock, **keywords_of(arm.plan or study.plan))
    change, cost, steps = EFFECTS[arm.name]
    rng = np.random.default_rng([seed, len(arm.name)])
    targets = plan.target_heads
    if arm.mode == "random-heads":
        healthy = [Head(layer, index) for layer in (2, 3, 4, 5) for index in (0, 1, 2)]
        targets = healthy[: len(targets)]
        plan = plan.model_copy(update={"targets": ",".join(map(str, targets)), "watched": ""})
    final = after_mass(stock.maps["first_token_mass"], targets, arm.mode, rng)
    write_run(folder, plan, arm, seed, steps, final, stock, change, patch_hash(arm, seed))
    costs = {h: (cost and max(0.0002, cost + float(rng.normal(0, 0.0025)))) for h in targets}
    patch = {
        "num_weights": plan.summary.trainable_weights,
        "plan": plan.model_dump(mode="json"),
        "base_model": MODEL["id"],
        "sha256": patch_hash(arm, seed),
    }
    after = diagnosis_of(final, seed + 1)
    found = evaluation_of(
        after, change=change + 0.002 * seed, costs=costs, patches=[patch], seed=seed + len(arm.name)
    )
    found.save(folder / "evaluation.json")
    if arm.passes == 2 and seed == 0:
        second_pass(folder / "pass2", study, arm, seed, found, before)
    compare(
        Snapshot(stock, before),
        Snapshot(found.diagnosis, found),
        plan=plan,
        checkpoints=run_maps(folder),
    ).save(folder / "comparison.json")


def second_pass(folder: Path, study: Study, arm, seed: int, first, before) -> None:
    """A second pass on what the first one left or made sick."""
    plan = make_plan(first.diagnosis, preset="pass2")
    mass = first.diagnosis.maps["first_token_mass"].copy()
    for head in plan.target_heads:
        mass[head.layer, head.index] = 0.08
    write_run(folder, plan, arm, seed, 40, mass, first.diagnosis, -0.002, patch_hash(arm, seed, 2))
    patch = {
        "num_weights": plan.summary.trainable_weights,
        "plan": plan.model_dump(mode="json"),
        "base_model": MODEL["id"],
        "sha256": patch_hash(arm, seed, 2),
    }
    earlier = [Head.parse(name) for name in first.recovery.heads]
    costs = dict.fromkeys(sorted({*earlier, *plan.target_heads}), 0.005)
    found = evaluation_of(
        diagnosis_of(mass, 9),
        change=-0.047,
        costs=costs,
        patches=[*to_plain(first.patches), patch],
        seed=seed + 7,
    )
    found.save(folder / "evaluation.json")
    compare(
        Snapshot(before.diagnosis, before),
        Snapshot(found.diagnosis, found),
        plan=plan,
        checkpoints=run_maps(folder),
    ).save(folder / "comparison.json")


def after_mass(start: np.ndarray, targets, mode: str, rng) -> np.ndarray:
    """Operated heads fall to the untrained level; others above the operation drift a little."""
    final = start.copy()
    lowest = min(head.layer for head in targets)
    if mode != "sham":
        final[lowest + 1 :] += rng.normal(0, 0.05, final[lowest + 1 :].shape)
    for head in targets:
        if mode != "gradient-only":
            final[head.layer, head.index] = 0.07 + 0.03 * rng.random()
        else:
            final[head.layer, head.index] *= 0.55
    if mode == "surgery":
        final[6, 3] = 0.61  # iatrogenic: healthy in stock, sick now
    return np.clip(final, 0.01, 0.99)


def patch_hash(arm, seed: int, number: int = 1) -> str:
    return hashlib.sha256(f"{arm.name} {seed} {number}".encode()).hexdigest()


def write_run(folder, plan, arm, seed, steps, final, stock, change, patch) -> None:
    """run.json, plan.yaml, trace.jsonl and maps.jsonl."""
    plan.save(folder / "plan.yaml")
    corpus = {"name": arm.corpus, "documents": 60, "train_tokens": 14000, "sha256": "c" * 64}
    save_artefact(
        folder / "run.json",
        "run",
        {
            "model": {"id": MODEL["id"], "fingerprint": "f" * 64},
            "mode": arm.mode,
            "seed": seed,
            "plan": plan.model_dump(mode="json"),
            "recipe": {"steps": steps, "lr": 0.003},
            "corpus": corpus,
            "finished": True,
            "patch": patch,
            "provenance": {"versions": {}, "threads": 1},
        },
    )
    rng = np.random.default_rng([seed, 5])
    start = stock.maps["first_token_mass"]
    operated = {(h.layer, h.index) for h in plan.target_heads}
    first = start.copy()
    if arm.mode != "gradient-only":
        for place in operated:
            first[place] = 0.08
    opening = 3.3 + (0.0 if arm.mode == "gradient-only" else 0.03)
    trace = [{"validated_at": 0, "validation_loss": opening}]
    maps = []
    for step in range(steps):
        done = 1 - np.exp(-4 * step / steps)
        trace.append(
            {
                "step": step,
                "loss": opening + done * (change - 0.03) + 0.01 * rng.normal(),
                "lr": 0.003,
                "grad_norm": 0.1,
                "tokens": 500,
                "tokens_per_second": 1000.0,
            }
        )
        if step % 10 == 0:
            mass = first + done * (final - first) + rng.normal(0, 0.006, first.shape)
            maps.append({"step": step, "first_token_mass": np.clip(mass, 0, 1).tolist()})
        if (step + 1) % 20 == 0:
            over = max(0.0, step / steps - 0.7) * 0.03
            loss = opening + done * (change - 0.03) + over
            trace.append({"validated_at": step + 1, "validation_loss": loss})
    write_text(folder / "trace.jsonl", "".join(json.dumps(row) + "\n" for row in trace))
    write_text(folder / "maps.jsonl", "".join(json.dumps(row) + "\n" for row in maps))


def write_completions(out: Path, arms: list[str]) -> None:
    """Three prompts; the first arm answers one of them with markup that must stay text."""
    prompts = [
        Prompt("The difference between a rule and a habit is", "conceptual"),
        Prompt("def average(values):", "code"),
        Prompt("Il était une fois", "multilingual"),
    ]
    texts = {
        0: " that a rule is kept because somebody asked, and a habit because nobody did.",
        1: "\n    return sum(values) / len(values)\n",
        2: " une petite maison au bord de la mer, où personne ne venait plus.",
    }
    conditions = {}
    for name in ["stock", *arms]:
        rows = []
        for i, prompt in enumerate(prompts):
            text = EVIL if (name, i) == (arms[0], 0) else texts[i] + f" ({name})"
            measures = measure_text(text, prompt)
            rows.append(Completion(prompt.text, prompt.category, text, measures))
        conditions[name] = rows
    Completions(conditions, Sampling(), CompletionProvenance()).save(out / "completions.json")


def pruned_of(model, patch=None):
    """Two heads can go: what `prune` keeps, as if it had written the patch of this hash."""
    texts = {part: TextInfo(f"{part} text", 16, "a" * 64) for part in PART_NAMES}
    sizes = {"joint loss": 0.002, "random": 0.05, "first-token mass": 0.03}
    costs = {
        name: {
            count: {part: Interval(count * size, 0.0, count * size + 0.001) for part in PART_NAMES}
            for count in (1, 2, 4)
        }
        for name, size in sizes.items()
    }
    order = ("L3H6", "L4H7", "L5H5", "L2H7")
    return NestedSets(
        model=model,
        settings=PruneSettings(),
        bos=False,
        unit="head",
        units=model.num_layers * model.num_heads,
        texts=texts,
        singles={name: Interval(0.002, 0.001, 0.003) for name in order},
        order=order,
        costs=costs,
        chosen=2,
        lowest=0,
        heads=order[:2],
        gain_heads=(),
        versions={},
        patch=patch,
    )
