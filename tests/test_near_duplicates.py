"""Near-duplicates: who counts as one, and that none of them is on both sides of a split."""

import numpy as np
import pytest

from conftest import tiny_model, tiny_tokenizer
from headwise.models.loaded_model import LoadedModel
from headwise.models.patient import patient_texts
from headwise.texts.corpus import build_corpus, in_validation
from headwise.texts.near_duplicates import (
    SHARE,
    WIDTH,
    near_duplicate_groups,
    near_duplicates_of,
    shingles,
)
from headwise.texts.text_sets import TextSet, bundled_texts
from headwise.therapy.never_worse import count_documents


def passages(count):
    """Different passages of running prose."""
    texts = list(dict.fromkeys(patient_texts("second")))
    return [text for text in texts if len(text) > 400][:count]


def copies(texts, count):
    return [f"{text} (version {number})" for text in texts for number in range(count)]


def slow_overlap(one, other):
    """The share of the smaller text's runs of characters that the other has, by sets."""

    def runs(text):
        plain = " ".join(text.casefold().split())
        return {plain[i : i + WIDTH] for i in range(max(1, len(plain) - WIDTH + 1))}

    return len(runs(one) & runs(other)) / min(len(runs(one)), len(runs(other)))


def split(texts, **options):
    loaded = LoadedModel("tiny", tiny_model("llama"), tiny_tokenizer())
    corpus = build_corpus(loaded, TextSet("made", tuple(texts)), block=4096, **options)
    return corpus, corpus.info


def test_shingles_are_the_different_runs_of_characters():
    text = passages(1)[0]
    plain = " ".join(text.casefold().split())
    assert len(shingles(text)) == len({plain[i : i + 32] for i in range(len(plain) - 31)})
    assert np.array_equal(shingles(text), shingles(text.upper().replace(" ", "\n ")))
    assert len(shingles("short")) == 1


def test_groups_are_those_of_a_comparison_of_all_with_all():
    base = passages(4)
    texts = [
        *base,
        base[0][: len(base[0]) * 3 // 4] + base[1][:80],  # most of one text
        base[2][: len(base[2]) // 4] + base[3][: len(base[3]) // 4],  # a quarter of two
        f"Preface. {base[3]}",
    ]
    groups = near_duplicate_groups(texts)
    alike = np.array([[slow_overlap(a, b) >= SHARE for a in texts] for b in texts])
    reached = np.linalg.matrix_power(alike.astype(int), len(texts)) > 0
    assert np.array_equal(groups[:, None] == groups[None], reached)
    assert len(set(groups)) == 5


@pytest.mark.parametrize("language", ["eine Katze sitzt auf dem Dach", "猫は屋根の上に座っている"])
def test_languages_without_spaces_have_near_duplicates_too(language):
    rng = np.random.default_rng(0)
    texts = ["".join(rng.permutation(list(language * 12))) for _ in range(3)]
    groups = near_duplicate_groups([*texts, texts[1] + "。"])
    assert groups.tolist() == [0, 1, 2, 1]


def test_many_copies_of_one_text_are_one_group_whatever_their_number():
    texts = passages(2)
    assert set(near_duplicate_groups(copies(texts, 60)).tolist()) == {0, 1}


def test_copies_do_not_cross_the_split_and_count_as_one_document():
    base = passages(30)
    corpus, info = split(copies(base, 12), validation_share=0.3)
    assert info.documents == 360
    assert info.near_duplicates == 330
    assert info.validation_documents % 12 == 0
    assert 0 < count_documents(corpus.validation) == info.validation_documents // 12 < 30
    train = {b.ids[row, :40].numpy().tobytes() for b in corpus.train for row in range(len(b.ids))}
    held = {
        b.ids[row, :40].numpy().tobytes() for b in corpus.validation for row in range(len(b.ids))
    }
    assert train.isdisjoint(held)


def test_copies_are_no_likelier_to_be_validation_text_than_single_documents():
    base = passages(600)
    single, many = split(base)[1], split(copies(base, 6))[1]
    assert 10 <= single.validation_documents <= 50
    assert 10 <= many.validation_documents / 6 <= 50


def test_the_split_without_near_duplicates_is_by_each_documents_own_hash():
    base = passages(300)
    assert len(set(near_duplicate_groups(base))) == len(base)
    corpus, info = split(base)
    held = [text for text in base if in_validation(text)]
    assert info.validation_documents == len(held)
    assert sorted({i for b in corpus.validation for i in b.index}) == list(range(len(held)))


def test_a_small_corpus_gives_up_to_half_for_a_verdict_and_a_large_one_no_more_than_ever():
    base = passages(400)
    for count in (16, 40, 100):
        corpus, _ = split(base[:count], fewest_validation=8)
        assert count_documents(corpus.validation) == max(8, sum(map(in_validation, base[:count])))
    assert count_documents(split(base[:14], fewest_validation=8)[0].validation) < 8
    assert split(base, fewest_validation=8)[0].info == split(base)[0].info


def test_near_duplicates_of_evaluation_texts_are_left_out_and_counted():
    base = passages(40)
    held = [base[0], base[1], base[2][: len(base[2]) // 2]]
    changed = [base[0], f"{base[1]} And so on.", "Before. " + base[2] + base[5], *base[3:]]
    assert near_duplicates_of(changed, held).tolist() == [True] * 3 + [False] * 37
    _, info = split(changed, excluded=held)
    assert (info.excluded, info.near_excluded) == (1, 2)
    assert info.train_documents + info.validation_documents == 37
    assert not near_duplicates_of(base, []).any()


def test_the_bundled_texts_are_all_different():
    texts = bundled_texts().texts
    assert len(set(near_duplicate_groups(texts))) == len(texts)
