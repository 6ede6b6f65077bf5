"""Completions: reproducible prompt by prompt, measured, and the harness on a local task."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import tiny_language_model
from headwise.artefacts import load_artefact
from headwise.errors import HeadwiseError, TextError
from headwise.intervals import paired_interval
from headwise.models.loaded_model import LoadedModel
from headwise.proof.completed_texts import (
    Completion,
    Prompt,
    bundled_prompts,
    guess_language,
    mean_measures,
    measure_text,
    read_prompts,
)
from headwise.proof.completions import complete, complete_prompts, prompt_seed
from headwise.proof.lm_eval import paired_tasks, run_tasks
from headwise.proof.settings import Sampling
from headwise.surgery.operation import operate
from planned import plan_for, weight_bits

HARNESS = Path(__file__).parent / "data" / "harness"
SAMPLING = Sampling(new_tokens=12, temperature=1.0)
PROMPTS = [
    Prompt("The lighthouse keeper", "prose"),
    Prompt("def area(width", "code"),
    Prompt("Le chat", "french"),
    Prompt("Wednesday was cold; Thursday was colder; on Friday", "prose"),
    Prompt("A", "prose"),
]


@pytest.fixture(scope="module", params=["bloom", "llama", "gpt2", "opt"])
def speaker(request):
    return tiny_language_model(request.param)


def texts(model, tokenizer, prompts=PROMPTS, sampling=SAMPLING, **options):
    rows = complete_prompts(LoadedModel("tiny", model, tokenizer), prompts, sampling, **options)
    return [row.completion for row in rows]


def test_completions_do_not_depend_on_batch_or_neighbours(speaker, tokenizer):
    together = texts(speaker, tokenizer, batch_size=5)
    assert together == texts(speaker, tokenizer, batch_size=5)
    assert together == texts(speaker, tokenizer, batch_size=1)
    assert together == texts(speaker, tokenizer, batch_size=2)
    assert together[::-1] == texts(speaker, tokenizer, PROMPTS[::-1], batch_size=3)
    assert together[2:3] == texts(speaker, tokenizer, PROMPTS[2:3])
    assert len(set(together)) > 1


def test_the_global_random_state_is_neither_used_nor_changed(tokenizer):
    model = tiny_language_model("bloom")
    torch.manual_seed(1)
    first, state = texts(model, tokenizer), torch.get_rng_state()
    torch.manual_seed(2)
    assert texts(model, tokenizer) == first
    torch.manual_seed(1)
    assert torch.equal(torch.get_rng_state(), state)


def test_seed_and_patch_change_completions(tokenizer):
    model = tiny_language_model("bloom")
    stock = texts(model, tokenizer)
    other = texts(model, tokenizer, sampling=Sampling(new_tokens=12, temperature=1.0, seed=7))
    assert other != stock
    patch = operate(model, plan_for(model, "all"))
    patch.apply(model)
    assert texts(model, tokenizer) != stock
    patch.undo(model)
    assert texts(model, tokenizer) == stock


def test_greedy_completions_are_transformers_greedy_ones(speaker, tokenizer):
    greedy = Sampling(new_tokens=6, temperature=0.0)
    found = texts(speaker, tokenizer, sampling=greedy, batch_size=3)
    for prompt, text in zip(PROMPTS, found, strict=True):
        ids = list(tokenizer(prompt.text)["input_ids"])
        produced = []
        for _ in range(6):
            with torch.inference_mode():
                token = int(speaker(torch.tensor([ids + produced])).logits[0, -1].argmax())
            produced.append(token)
            if token == tokenizer.eos_token_id:
                break
        assert text == tokenizer.decode(produced, skip_special_tokens=True)


def test_the_seed_of_a_prompt_is_the_same_everywhere():
    """Python's own hash is salted per process: these numbers are what makes runs comparable."""
    assert prompt_seed("Once", 42) == prompt_seed("Once", 42)
    assert prompt_seed("Once", 42) == int(_sha("42", "Once")[:15], 16)
    seeds = {prompt_seed(p.text, s) for p in bundled_prompts() for s in (1, 2)}
    assert len(seeds) == 100


def _sha(*parts):
    import hashlib

    digest = hashlib.sha256()
    for part in parts:
        digest.update(len(part).to_bytes(8, "little") + part.encode())
    return digest.hexdigest()


def test_there_are_ten_prompts_in_each_of_five_categories():
    prompts = bundled_prompts()
    categories = [prompt.category for prompt in prompts]
    assert len(prompts) == len({prompt.text for prompt in prompts}) == 50
    assert len(set(categories)) == 5
    assert all(categories.count(name) == 10 for name in set(categories))


def test_measures_of_texts_made_by_hand():
    english = Prompt("The story of the house and the garden")
    varied = measure_text("one two three four five six", english)
    assert (varied.words, varied.distinct_1, varied.repetition) == (6, 1.0, 0.0)
    stuck = measure_text("go on go on go on go on go on", english)
    assert stuck.distinct_1 == pytest.approx(2 / 10)
    assert stuck.distinct_2 == pytest.approx(2 / 9)
    assert stuck.repetition == pytest.approx(1 - 2 / 7)
    markup = measure_text("<b>bold</b> text", english)
    assert markup.markup_share == pytest.approx(7 / 16)
    empty = measure_text("", english)
    assert (empty.words, empty.distinct_1, empty.markup_share) == (0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("text", "language"),
    [
        ("the cat and the dog sat in the garden", "en"),
        ("le chat est dans la maison et il dort", "fr"),
        ("el gato y los perros con una casa", "es"),
        ("xyzzy 42", None),
        ("la de un que", None),  # French as well as Spanish
    ],
)
def test_languages_are_guessed_by_function_words(text, language):
    assert guess_language(text) == language


def test_a_change_of_language_is_seen():
    french = Prompt("le chat est dans la maison et il dort")
    assert measure_text("the cat and the dog is in the house", french).language_drift
    assert not measure_text("le chien est dans la rue", french).language_drift
    assert not measure_text("42", french).language_drift


def test_summaries_are_means_for_all_and_by_category():
    rows = [
        Completion("the", name, text, measure_text(text, Prompt("the")))
        for name, text in (("a", "one two"), ("a", "one"), ("b", "one two three four"))
    ]
    found = mean_measures(rows)
    assert found["all"]["words"] == pytest.approx(7 / 3)
    assert (found["a"]["words"], found["b"]["words"]) == (1.5, 4)


def test_completions_make_an_artefact_of_equal_bytes(tokenizer, tmp_path):
    model = tiny_language_model("gpt2")
    files = []
    for name in "ab":
        found = complete(model, tokenizer, PROMPTS[:2], SAMPLING)
        files.append(found.save(tmp_path / f"{name}.json"))
    assert files[0].read_bytes() == files[1].read_bytes()
    body = load_artefact(files[0], "completions")
    assert body["sampling"]["new_tokens"] == 12
    assert body["conditions"]["stock"][0]["prompt"] == PROMPTS[0].text


def test_conditions_stand_side_by_side_and_the_model_is_left_as_it_was(tokenizer, tmp_path):
    model = tiny_language_model("bloom")
    patch = operate(model, plan_for(model, "all"))
    path = patch.save(tmp_path / "patch.safetensors")
    before = weight_bits(model)
    both = {"in hand": [patch], "from a file": [path]}
    found = complete(model, tokenizer, PROMPTS[:2], SAMPLING, patches=both).conditions
    assert list(found) == ["stock", *both]
    assert found["in hand"] == found["from a file"] != found["stock"]
    assert weight_bits(model) == before
    with pytest.raises(HeadwiseError, match="cannot apply the patch"):
        complete(model, tokenizer, PROMPTS[:1], SAMPLING, patches={"twice": [patch, patch]})
    assert weight_bits(model) == before


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("p.jsonl", '{"prompt": "a"}\n{"text": "b"}\n'),
        ("p.jsonl", "[1]\n"),
        ("p.jsonl", "{\n"),
        ("p.txt", "  \n"),
    ],
)
def test_unreadable_prompts_are_told(tmp_path, name, content):
    path = tmp_path / name
    path.write_text(content)
    with pytest.raises(TextError, match="prompt"):
        read_prompts(path)
    with pytest.raises(TextError, match="cannot be read"):
        read_prompts(tmp_path / "missing.txt")


@pytest.fixture
def task(tmp_path):
    """The local task with the absolute path of its data, which the harness wants."""
    text = (HARNESS / "tiny_choice.yaml").read_text()
    path = tmp_path / "tiny_choice.yaml"
    path.write_text(text.replace("DATA_FILE", str(HARNESS / "tiny_choice.jsonl")))
    return path


@pytest.mark.filterwarnings("ignore")
def test_a_local_harness_task_runs_offline(task, tokenizer, tmp_path, monkeypatch):
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model = tiny_language_model("bloom")
    scores, items = run_tasks(model, tokenizer, [str(task)], batch_size=2)
    expected = _right_answers(model, tokenizer)
    assert scores["tiny_choice"]["acc,none"] == pytest.approx(np.mean(expected))
    assert items["tiny_choice"]["acc,none"] == tuple(expected)
    with pytest.raises(HeadwiseError, match="could not run missing"):
        run_tasks(model, tokenizer, [str(task.with_name("missing.yaml"))])


@pytest.mark.filterwarnings("ignore")
def test_the_paired_difference_of_two_models_is_that_by_hand(tokenizer, tmp_path, monkeypatch):
    """Two random models and choices of one length: now one is right, now the other."""
    pytest.importorskip("lm_eval")
    monkeypatch.setenv("HF_DATASETS_CACHE", str(tmp_path / "cache"))
    data = tmp_path / "words.jsonl"
    rows = [
        {
            "question": f"Q{number}:",
            "choices": ["abc"[number % 3 :], "cba"[number % 3 :]],
            "label": 0,
        }
        for number in range(24)
    ]
    data.write_text("\n".join(map(json.dumps, rows)) + "\n")
    task = tmp_path / "tiny_choice.yaml"
    text = (HARNESS / "tiny_choice.yaml").read_text()
    task.write_text(text.replace("DATA_FILE", str(data)))
    sides, right = [], []
    for family in ("bloom", "llama"):
        model = tiny_language_model(family)
        sides.append(run_tasks(model, tokenizer, [str(task)], batch_size=8)[1])
        right.append(np.array(_right_answers(model, tokenizer, data)))
    change = paired_tasks(*sides, 0)["tiny_choice"]["acc,none"]
    by_hand = paired_interval(right[1] - right[0], np.ones(len(rows)), seed=0)
    assert {-1.0, 1.0} <= set(right[1] - right[0])
    assert (change.value, change.low, change.high) == pytest.approx(
        (by_hand.value, by_hand.low, by_hand.high)
    )


def _right_answers(model, tokenizer, data=HARNESS / "tiny_choice.jsonl"):
    """The same task by hand: is the right choice the one with the larger log-probability?"""
    right = []
    for line in data.read_text().splitlines():
        row = json.loads(line)
        scores = [_log_probability(model, tokenizer, row["question"], c) for c in row["choices"]]
        right.append(float(scores.index(max(scores)) == row["label"]))
    return right


def test_scores_of_two_models_are_paired_by_item():
    """40 questions: the two conditions differ on ten of them, and always in one direction."""
    old = [1.0] * 20 + [0.0] * 20
    new = [1.0] * 30 + [0.0] * 10
    change = paired_tasks({"t": {"acc": old}}, {"t": {"acc": new}}, 0)["t"]["acc"]
    assert change.value == pytest.approx(0.25)
    assert change.low > 0
    independent = 1.96 * np.sqrt((0.25 + 0.1875) / 40)  # what two unpaired runs would give
    assert change.value - independent < 0.06 < change.low
    assert paired_tasks({"t": {"acc": old}}, {"t": {"acc": new[:-1]}}, 0) == {}


def _log_probability(model, tokenizer, question, choice):
    start = len(tokenizer(question)["input_ids"])
    # the harness puts a space between the two, whatever the choice begins with
    ids = torch.tensor([tokenizer(f"{question} {choice}")["input_ids"]])
    with torch.inference_mode():
        log_p = model(ids).logits[0].log_softmax(-1)
    return sum(float(log_p[i - 1, ids[0, i]]) for i in range(start, ids.shape[1]))
