"""The report from artefacts: its numbers are theirs, its texts are escaped, its bytes repeat."""

from __future__ import annotations

import csv
import io
import json
import re
import shutil
import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from conftest import SENTENCES, tiny_language_model, tiny_tokenizer
from filmed import film_in
from headwise.alarms import Alarm
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.figures import survey_panels
from headwise.diagnosis.survey import survey as survey_of
from headwise.drawing import count_axis, draw_masses
from headwise.errors import ArtefactError, HeadwiseError
from headwise.intervals import Interval
from headwise.models.loaded_model import LoadedModel
from headwise.models.values import model_name
from headwise.proof.compare import compare
from headwise.proof.values import Evaluation, Recovery
from headwise.proof.view import comparison_tables
from headwise.provenance import text_name
from headwise.report import write as report
from headwise.report.drift import moved_untouched
from headwise.report.effect import effect_text, recovered_text, untested_text
from headwise.report.figures import cascade_counts, panels
from headwise.report.page import as_symbols
from headwise.report.paper.figures import published_figures
from headwise.report.payload import page_payload
from headwise.report.source import MASS, Source, read_source, stock_of
from headwise.report.verdict import judge, main_run
from headwise.surgery.plan import join_plans, plans_of
from headwise.surgery.values import RunSettings
from headwise.tables import table as table_of
from headwise.texts.text_sets import TextSet
from headwise.therapy.values import Therapy
from reportstudy import EVIL, build_study, diagnosis_of, pruned_of, stock_mass, triage_of


@pytest.fixture(scope="module")
def study(tmp_path_factory):
    return build_study(tmp_path_factory.mktemp("study"))


@pytest.fixture
def no_figures(monkeypatch):
    """Figures take most of the time and are tested on their own."""
    monkeypatch.setattr(report, "_draw", lambda source, folder, paper: [])


@pytest.fixture(scope="module")
def tables(study):
    return dict(enumerate(report.report_tables(read_source(study), paper=True), 1))


def interval_of(body):
    return Interval(body["value"], body["low"], body["high"])


def rows_of(table, **match):
    """Rows as {column: cell}, those where every given cell is the given one."""
    names = [column.name for column in table.columns]
    rows = [dict(zip(names, row, strict=True)) for row in table.all_rows]
    return [row for row in rows if all(row[key] == value for key, value in match.items())]


def read(path):
    return json.loads(path.read_text())


def test_every_table_has_rows_of_this_study_and_of_the_paper(tables):
    assert sorted(tables) == list(range(1, 11))
    for number, table in tables.items():
        assert table.rows, number
        assert table.published, number
        assert table.notes, number


def test_an_arm_called_paper_is_an_arm(study):
    source = read_source(study)
    runs = tuple(replace(c, arm="paper") if c.arm == "sham" else c for c in source.runs)
    tables = report.report_tables(replace(source, runs=runs, summary=None), paper=False)
    arms = next(table for table in tables if table.key.endswith("arms"))
    assert rows_of(arms, arm="paper")


def test_tables_are_numbered_without_holes_and_name_the_paper_only_beside_a_bloom(study, tmp_path):
    (tmp_path / "stock").mkdir()
    shutil.copy(study / "stock" / "diagnosis.json", tmp_path / "stock")
    source = read_source(tmp_path / "stock")
    tables = report.report_tables(source, paper=False)
    assert [table.key[5:7] for table in tables] == [f"{n:02d}" for n in range(1, len(tables) + 1)]
    assert not any("paper" in table.to_markdown() for table in tables)
    assert "over model sizes" not in tables[0].title


def test_stock_that_a_comparison_gives_back_counts_learned_sinks(study):
    """A head that gives its mass to a learned sink is as sick as one that gives it to token 0."""
    source = read_source(study / "runs" / "sham-s0")
    run = source.runs[0]
    share = np.zeros(run.diagnosis.model.shape)
    share[0, 0] = 0.9
    maps = {**run.diagnosis.maps, "learned_sink_share": share}
    delta = {**run.comparison.delta, "learned_sink_share": 0 * share}
    after = replace(
        run,
        diagnosis=replace(run.diagnosis, maps=maps),
        comparison=replace(run.comparison, delta=delta),
    )
    assert source.stock.diagnosis.classes[0][0] == "healthy"
    assert stock_of(after).diagnosis.classes[0][0] in ("sink", "dead")


def test_counts_and_perplexities_are_those_of_the_artefacts(tables, study):
    body = read(study / "runs" / "sham-s1" / "evaluation.json")
    (row,) = rows_of(tables[2], condition="sham, seed 1")
    assert row["sink"] == body["diagnosis"]["counts"]["sink"]
    assert row["held-out ppl"] == interval_of(body["text_sets"]["heldout"]["perplexity"])
    assert row["weights in patch"] == body["patches"][0]["num_weights"]
    (row,) = rows_of(tables[3], condition="sham, seed 1", **{"text set": "heldout-union"})
    paired = read(study / "runs" / "sham-s1" / "comparison.json")["losses"]["heldout-union"]
    assert row["loss - stock (nats)"] == interval_of(paired["difference"])
    assert row["reading"] == paired["verdict"]


def test_arms_carry_the_paired_statistics_of_the_summary(tables, study):
    summary = read(study / "summary.json")
    (row,) = rows_of(tables[4], arm="gradient-only")
    told = summary["against_stock"]["gradient-only"]["heldout"]
    assert row["loss - stock (nats)"] == interval_of(told)
    functional = [r["functional"] for r in summary["arms"]["gradient-only"]["recovery"]]
    assert row["functionally recovered"] == sum(functional) / len(functional)


def test_drift_and_columns_are_those_of_the_comparison(tables, study):
    comparison = read(study / "runs" / "gradient-only-s0" / "comparison.json")
    for number, zone in ((5, "outside"), (6, "watched")):
        (row,) = rows_of(tables[number], condition="gradient-only, seed 0")
        told = comparison["drift"][zone]
        assert row["heads with |change| > 0.05"] == told["drifting"]
        assert (row["heads"], row["movable"]) == (told["heads"], told["movable"])
        assert row["mean |change|"] == pytest.approx(told["mean_abs_delta"])
        assert row["worst head"] == told["worst"]["head"]
    (row,) = rows_of(tables[7], condition="gradient-only, seed 0", column="H5")
    told = comparison["columns"]["H5"]
    assert row["mean |change| last"] == told["mean_abs_delta"][-1]
    assert row["trend"] == told["trend"]


def test_a_second_pass_counts_the_heads_of_the_first_as_operated(study):
    source = read_source(study)
    first, second = (c for c in source.runs if c.arm == "surgery" and c.seed == 0)
    assert (second.number, second.last, first.last) == (2, True, False)
    operated = second.zones.operated
    assert (operated >= first.zones.operated).all()
    assert operated.sum() > first.zones.operated.sum()
    effects = next(f for f in judge(source).findings if f.title == "Side effects")
    assert "0 healed untreated" in effects.text


def test_the_verdict_counts_untouched_heads_that_moved_as_their_figure_does(study):
    """The figure said 2 and the verdict 7 of 16: one was of validation blocks."""
    source = read_source(study)
    main = main_run(source)
    axes = cascade_counts(source).axes[0]
    line = next(line for line in axes.lines if line.get_label() == main.arm)
    moved, movable, on = moved_untouched(source, main)
    assert moved == line.get_ydata()[-1] <= movable
    effects = next(f for f in judge(source).findings if f.title == "Side effects").text
    assert re.search(rf"Of {movable} untouched heads that can move {moved} changed", effects)
    assert on in effects
    without = replace(source, runs=tuple(replace(run, steps=()) for run in source.runs))
    held_out = moved_untouched(without, main_run(without))
    delta = main.comparison.delta[MASS][main.zones.movable & ~main.zones.operated]
    assert held_out[:2] == ((np.abs(delta) > 0.05).sum(), movable)
    assert main.comparison.provenance.after.texts.name in held_out[2]


def test_the_verdict_names_the_roles_that_treated_heads_play_now(study):
    source = read_source(study)
    assert not [f for f in judge(source).findings if f.title == "Roles"]  # not measured here
    main = main_run(source)
    row, head = np.argwhere(main.zones.operated)[0]

    def playing(diagnosis, *places):
        induction = np.zeros(diagnosis.model.shape)
        for place in places:
            induction[place] = 0.9
        return replace(diagnosis, maps={**diagnosis.maps, "induction": induction})

    stock = replace(source.stock, diagnosis=playing(source.stock.diagnosis))
    now = replace(main, diagnosis=playing(main.diagnosis, (row, head)))
    runs = tuple(now if run is main else run for run in source.runs)
    (roles,) = [
        f for f in judge(replace(source, stock=stock, runs=runs)).findings if f.title == "Roles"
    ]
    treated = f"Of {int(main.zones.operated.sum())} treated heads, with a role now"
    assert f"{treated}: 1 (induction L{row}H{head}); in stock: none" in roles.text
    plan = join_plans(plans_of(main.evaluation.patches))
    compared = compare(stock.diagnosis, now.diagnosis, plan=plan)
    assert compared.roles == {f"L{row}H{head}": ("", "induction")}
    (shown,) = [t for t in comparison_tables(compared) if t.title == "roles of treated heads"]
    assert shown.rows == ((f"L{row}H{head}", "-", "induction"),)


def test_the_verdict_says_when_the_plan_rests_on_another_count(study, tmp_path):
    def sickness(folder):
        return next(f for f in judge(read_source(folder)).findings if "sick in stock" in f.title)

    run = tmp_path / "gradient-only-s0"
    shutil.copytree(study / "runs" / "gradient-only-s0", run)
    own = Evaluation.load(study / "stock" / "evaluation.json").diagnosis
    before = sickness(run).text
    assert own.provenance.basis in before
    assert "another count" not in before
    settings = RunSettings.load(run)
    texts = replace(own.provenance.texts, name="elsewhere", count=5)
    fewer = settings.plan.model_copy(update={"sick": "L3H6", "texts": texts})
    replace(settings, plan=fewer).save(run)
    assert "another count: 1 sick head on elsewhere (5 texts)" in sickness(run).text


@pytest.mark.usefixtures("no_figures")
def test_sliding_layers_are_told_from_global_ones(tmp_path):
    loaded = LoadedModel("tiny", tiny_language_model("gemma3"), tiny_tokenizer())
    kinds = loaded.model.config.layer_types
    model = loaded.describe()
    rows = [row for row, kind in enumerate(kinds) if kind == "sliding_attention"]
    assert 0 < len(rows) < len(kinds)
    assert model.sliding_rows == rows
    diagnosis = diagnose(loaded, TextSet("some", SENTENCES), max_length=32)
    diagnosis.save(tmp_path / "diagnosis.json")
    axes = survey_panels(survey_of([diagnosis])).axes[0]
    bars = [line for line in axes.lines if not line.get_clip_on()]
    assert [round(float(np.mean(bar.get_ydata()))) for bar in bars] == rows
    page = report.write_report(tmp_path, tmp_path / "report").read_text()
    assert f'"sliding":{json.dumps(rows).replace(" ", "")}' in page
    plain = LoadedModel("plain", tiny_language_model("bloom"), tiny_tokenizer())
    assert plain.describe().sliding is None


def test_the_column_table_shows_healthy_heads_that_were_operated_on(tables, study):
    rows = rows_of(tables[8], condition="column, seed 0")
    assert [row["head"] for row in rows] == [f"L{layer}H3" for layer in range(2, 7)]
    cost = read(study / "stock" / "evaluation.json")["heads"]["ablation_zero"]["L2H3"]
    assert rows[0]["ablation cost, stock"] == interval_of(cost)


def test_the_post_operation_loss_is_the_validation_at_step_0(tables):
    (sham,) = rows_of(tables[9], condition="sham, seed 0")
    (plain,) = rows_of(tables[9], condition="gradient-only, seed 0")
    assert sham["post-operation"] == pytest.approx(2.718281828**3.33)
    assert sham["stock"] == plain["post-operation"] == pytest.approx(2.718281828**3.3)


def test_published_values_stand_beside_ours(tables):
    (row,) = rows_of(tables[2], condition="BLOOM-1b7 pass 1, epoch 3")
    assert (row["healthy"], row["held-out ppl"]) == (341, 27.52)
    assert rows_of(tables[10], source="paper")[0]["slope"] == 0.7071
    assert "L23H14" in [row["worst head"] for row in rows_of(tables[5], source="paper")]
    assert any("113.3M" in note for note in tables[2].notes)
    assert any("L20H7" in note for note in tables[5].notes)
    assert any("not a share of layers" in note for note in tables[1].notes)


def test_the_cross_scale_rows_are_those_of_the_survey(tables):
    from headwise.diagnosis.bloom_maps import STOCK_MAPS
    from headwise.diagnosis.survey import read_diagnoses

    survey = survey_of([*read_diagnoses(STOCK_MAPS), diagnosis_of(stock_mass())])
    ours, *published = rows_of(tables[1])
    for row, told in zip([*published, ours], survey.rows, strict=True):
        assert row["sick heads"] == told.sick
        assert row["layers sick in band, lowest"] == pytest.approx(told.band_layer_share_min)
        assert row["slope ~ sick (Spearman)"] == pytest.approx(told.spearman_slope_sick_share)


def test_the_verdict_says_plainly_that_plain_training_did_better(study):
    verdict = judge(read_source(study))
    assert verdict.tone == "caution"
    assert "but gradient-only made it better still" in verdict.headline
    texts = {finding.title: finding.text for finding in verdict.findings}
    assert (
        "in the sham, where nothing was learnt, 12 of 12 pass too" in texts["By first-token mass"]
    )
    assert "sham 0 of 12" in texts["By function"]
    assert re.search(r"95% interval \S+ to \S+", texts["Against gradient-only"])


@pytest.mark.parametrize(
    ("change", "gap", "words"),
    [
        ((-0.2, -0.3, -0.1), (-0.1, -0.2, -0.05), "better than gradient-only"),
        ((-0.2, -0.3, -0.1), (-0.1, -0.2, 0.05), "no difference to gradient-only"),
        ((0.01, -0.1, 0.1), (-0.1, -0.2, -0.05), "no difference that this held-out text"),
        ((0.2, 0.1, 0.3), (-0.1, -0.2, -0.05), "made the model worse"),
    ],
)
def test_the_headline_follows_the_intervals(study, change, gap, words):
    source = read_source(study)
    summary = source.summary
    surgery = {text: told(d, change) for text, d in summary.against_stock["surgery"].items()}
    between = {
        name: {**found, "heldout": told(found["heldout"], gap_of(name, gap))}
        if name.startswith("surgery - ")
        else found
        for name, found in summary.between_arms.items()
    }
    against = {**summary.against_stock, "surgery": surgery}
    changed = replace(summary, against_stock=against, between_arms=between)
    assert words in judge(replace(source, summary=changed)).headline


def told(difference, numbers):
    value, low, high = numbers
    return replace(difference, value=value, low=low, high=high)


def gap_of(name, gap):
    return gap if name.endswith("gradient-only") else (-1.0, -2.0, -0.5)


def test_the_page_is_self_contained_and_escapes_every_text(study, tmp_path, no_figures):
    page = report.write_report(study, tmp_path).read_text()
    assert "default-src 'none'" in page
    assert EVIL not in page
    assert "<script>window.evil" not in page
    assert "&lt;script&gt;window.evil" in page
    links = re.findall(r'(?:src|href)="([^"]*)"', page)
    assert all(link.startswith(("#", "data:")) for link in links), links
    start = page.index('id="data">') + len('id="data">')
    payload = json.loads(page[start : page.index("</script>", start)])
    assert [c["key"] for c in payload["conditions"]][:2] == ["stock", "surgery-s0"]
    assert [m["key"] for m in payload["measures"]][:3] == ["first_token_mass", "change", "ablation"]
    assert "plasticity" in {m["key"] for m in payload["measures"]}


def test_control_characters_become_symbols():
    assert as_symbols("a\x00b\n\x1b\x7f") == "a\u2400b\n\u241b\u2421"


def test_the_same_artefacts_give_the_same_bytes(study, tmp_path, no_figures):
    one = report.write_report(study, tmp_path / "one").read_bytes()
    two = report.write_report(study, tmp_path / "two").read_bytes()
    assert one == two
    for path in sorted((tmp_path / "one" / "tables").iterdir()):
        assert path.read_bytes() == (tmp_path / "two" / "tables" / path.name).read_bytes()


def test_tables_are_written_as_markdown_and_csv(study, tmp_path, no_figures):
    report.write_report(study, tmp_path)
    names = sorted(path.name for path in (tmp_path / "tables").iterdir())
    assert len(names) == 20
    text = (tmp_path / "tables" / "table03_held_out_perplexity.csv").read_text()
    rows = list(csv.DictReader(io.StringIO(text)))
    told = read(study / "stock" / "evaluation.json")["text_sets"]["heldout"]["perplexity"]
    assert float(rows[0]["perplexity"]) == told["value"]
    assert float(rows[0]["perplexity_high"]) == told["high"]


def test_a_cell_cannot_break_out_of_its_table():
    table = table_of("x", "name; n [.1f]", [["a|b\nc", 1.0], ["=1+1", None]])
    assert "a\\|b c" in table.to_markdown()
    assert "'=1+1" in table.to_csv()


def test_all_figures_are_drawn_in_three_formats(study, tmp_path):
    page = report.write_report(study, tmp_path).read_text()
    names = {path.name for path in (tmp_path / "figures").iterdir()}
    stems = {
        "figure1_histogram",
        "figure2_cross_scale",
        "figure3_arm_changes",
        "figure4_matched_changes",
        "figure5_loss_by_step",
        "figure6_watched_changes",
        "figure7_column_drift",
        "overview",
        "trajectories",
        "cascade",
        "plasticity",
    }
    assert names == {f"{stem}.{ending}" for stem in stems for ending in ("png", "svg", "pdf")}
    assert page.count("data:image/png;base64,") == 2 * len(stems)  # for light and dark pages


def test_a_map_marks_the_sick_heads_and_turns_its_colours_at_the_threshold(tmp_path):
    found = diagnosis_of(stock_mass())
    figure, (axes,) = panels(1, 3, 3)
    image = draw_masses(axes, found.maps["first_token_mass"], found.sick)
    assert len(axes.collections[0].get_offsets()) == found.counts["sick"]
    below, above = image.cmap(image.norm(0.49)), image.cmap(image.norm(0.51))
    assert below[2] > below[0] + 0.1  # bluish
    assert above[0] > above[2] + 0.1  # orange
    figure.draw_without_rendering()


def test_counts_of_heads_have_whole_numbers_on_their_axis():
    figure, (axes,) = panels(1, 3, 3)
    axes.plot([0, 1], [0, 1])
    count_axis(axes)
    figure.draw_without_rendering()
    assert all(tick == int(tick) for tick in axes.get_yticks())


def test_values_are_shown_in_a_line_that_a_person_can_read(tmp_path, monkeypatch):
    assert repr(TextSet("my_texts", ("a",) * 40)) == "TextSet(my_texts, 40 texts)"
    (tmp_path / "my-model").mkdir()
    monkeypatch.chdir(tmp_path / "my-model")
    assert model_name(".") == "my-model"


def test_the_published_figures_are_shown_again_from_the_digitised_data(tmp_path):
    written = published_figures(tmp_path)
    assert len([path for path in written if path.suffix == ".png"]) == 7
    histogram = (tmp_path / "figure1_histogram.svg").read_text()
    assert "139 sick" in histogram
    assert "245 not" in histogram
    maps = (tmp_path / "figure2_cross_scale.svg").read_text()
    assert all(count in maps for count in ("(169/384)", "(139/384)", "(365/960)", "(296/960)"))
    changes = (tmp_path / "figure4_matched_changes.svg").read_text()
    assert "published: curated, epoch 3" in changes
    assert "of 258" in changes


def test_a_bare_diagnosis_has_a_report_whose_tables_say_what_is_missing(tmp_path, no_figures):
    diagnosis_of(stock_mass()).save(tmp_path / "d" / "diagnosis.json")
    page = report.write_report(tmp_path / "d", tmp_path / "out").read_text()
    assert "12 of 64 heads of made-model (19%) are sick." in page
    text = (tmp_path / "out" / "tables" / "table04_arms.md").read_text()
    assert "No arm was run here" in text
    assert "108" in text


def test_a_single_run_has_a_report(study, tmp_path, no_figures):
    run = study / "runs" / "gradient-only-s0"
    page = report.write_report(run, tmp_path).read_text()
    assert "Gradient-only made the model better; no control says why." in page
    assert "order the arms" not in page
    source = read_source(run)
    stock = read_source(study).stock
    assert source.stock.diagnosis.classes == stock.diagnosis.classes
    assert source.stock.maps["first_token_mass"] == pytest.approx(stock.maps["first_token_mass"])
    paired = read(run / "comparison.json")["losses"]["heldout"]["difference"]
    assert source.against_stock("gradient-only") == interval_of(paired)


def test_a_run_of_auto_goes_by_that_name_and_says_what_triage_found(study, tmp_path, no_figures):
    run = tmp_path / "run"
    shutil.copytree(study / "runs" / "surgery-s1", run)
    assert read_source(run).runs[0].arm == "surgery"
    classes = {"L0H1": "asleep", "L1H0": "empty", "L1H1": "asleep"}
    plan = RunSettings.load(run).plan
    Therapy("", plan, (), classes, ()).save(run)
    page = report.write_report(run, tmp_path / "out").read_text()
    assert read_source(run).runs[0].arm == "auto"
    assert "Triage on training text: 2 asleep, 1 empty." in page


def test_a_run_that_was_not_judged_yet_still_has_a_page(study, tmp_path, no_figures):
    run = tmp_path / "run"
    shutil.copytree(study / "runs" / "surgery-s1", run)
    (run / "evaluation.json").unlink()
    (run / "comparison.json").unlink()
    page = report.write_report(run, tmp_path / "out").read_text()
    assert "Nothing was judged yet" in page


def test_an_unfinished_study_names_what_is_missing(study, tmp_path, no_figures):
    part = tmp_path / "part"
    shutil.copytree(study, part)
    shutil.rmtree(part / "runs" / "sham-s1")
    (part / "summary.json").unlink()
    page = report.write_report(part, tmp_path / "out").read_text()
    assert "No result yet for sham seed 1" in page


def test_a_missing_or_foreign_folder_is_a_clear_error(tmp_path):
    with pytest.raises(ArtefactError, match="no such folder"):
        report.write_report(tmp_path / "nowhere", tmp_path)
    with pytest.raises(HeadwiseError, match="nothing to report") as caught:
        report.write_report(tmp_path, tmp_path / "out")
    assert "fix" in str(caught.value)
    (tmp_path / "diagnosis.json").write_text('{"schema": "other/1"}')
    with pytest.raises(ArtefactError, match="schema is 'other/1'"):
        report.write_report(tmp_path, tmp_path / "out")


def test_a_cut_off_line_file_is_a_clear_error(study, tmp_path):
    run = tmp_path / "run"
    shutil.copytree(study / "runs" / "surgery-s1", run)
    (run / "maps.jsonl").write_text('{"step": 0, "first_tok')
    with pytest.raises(ArtefactError, match=r"not a complete \.jsonl file"):
        report.write_report(run, tmp_path / "out")


def test_tables_and_page_are_made_without_torch(study, tmp_path):
    code = (
        "import sys; from pathlib import Path; from headwise.report import write as report;"
        "report._draw = lambda source, folder, paper: [];"
        "report.write_report(Path(sys.argv[1]), Path(sys.argv[2]));"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code, str(study), str(tmp_path)], check=True, timeout=120)


def test_the_effect_has_a_size_in_words():
    assert effect_text(Interval(-0.05, -0.06, -0.04), 3.0, 7.0) == (
        "Perplexity falls by 4.9% (20.09 to 19.11): a gain of 1.2% of what stock knows beyond "
        "token frequencies (stock 3.00 nats per token, a unigram model 7.00)."
    )
    assert effect_text(Interval(2.4, 2.3, 2.5), 4.6, 4.7).startswith(
        "Perplexity rises by 1002% (99.48 to 1097): a loss of more than all stock knows beyond"
    )
    small = Interval(-0.0002, -0.0003, -0.0001)
    assert effect_text(small, 3.0, None) == "Perplexity falls by 0.02% (20.09 to 20.08)."


def test_an_effect_that_is_none_or_not_sure_is_not_called_a_gain():
    assert effect_text(Interval(0.0, 0.0, 0.0), 3.0, 7.0) == "Perplexity stays at 20.09."
    told = "Perplexity goes from 20.09 to 19.99, which may be chance."
    assert effect_text(Interval(-0.005, -0.02, 0.01), 3.0, 7.0) == told


def alarmed(source, stock):
    """The source with an alarm on its runs, or on its stock as well."""
    found = (Alarm("loss-above-unigram", "heldout: loss 9.00 nats per token"),)
    runs = tuple(replace(c, evaluation=replace(c.evaluation, alarms=found)) for c in source.runs)
    before = replace(source.stock.evaluation, alarms=found if stock else ())
    return replace(source, runs=runs, stock=replace(source.stock, evaluation=before))


def test_a_model_that_only_the_operation_made_unreadable_is_called_ruined(study):
    ruined = judge(alarmed(read_source(study), stock=False))
    assert ruined.headline.startswith("The operation ruined the model")
    assert ruined.tone == "bad"
    assert ruined.alarms
    unread = judge(alarmed(read_source(study), stock=True))
    assert "do not believe these numbers" in unread.headline


def test_a_bare_diagnosis_of_another_family_has_no_empty_columns_and_no_figures(tmp_path):
    found = diagnosis_of(stock_mass())
    model = replace(found.model, model_type="llama", positions="rope")
    maps = {name: value for name, value in found.maps.items() if name != "slope"}
    replace(found, model=model, maps=maps).save(tmp_path / "diagnosis.json")
    page = report.write_report(tmp_path, tmp_path / "report").read_text()
    tables = report.report_tables(read_source(tmp_path), paper=False)
    names = {column.name for table in tables for column in table.columns}
    assert "sick heads" in names
    assert not {"band", "source", "paper: sick", "held-out ppl"} & names
    assert 'href="#figures"' not in page
    assert "no data for it" not in page
    assert "is a symptom" in page
    assert '<label hidden>Condition <select id="arm">' in page


def test_the_verdict_starts_with_the_size_of_the_effect(study):
    assert judge(read_source(study)).basis.startswith("Perplexity falls by 4.2% (21.45 to 20.54).")


def test_recovered_heads_in_a_model_that_got_worse_are_not_green(study):
    source = read_source(study)
    worse = {
        name: told(d, (0.2, 0.1, 0.3))
        for name, d in source.summary.against_stock["surgery"].items()
    }
    against = {**source.summary.against_stock, "surgery": worse}
    harmed = replace(source, summary=replace(source.summary, against_stock=against))
    tones = [
        next(f.tone for f in judge(one).findings if f.title == "By function")
        for one in (source, harmed)
    ]
    assert tones == ["good", "bad"]


def test_the_verdict_says_what_treated_heads_are_worth_alone_together_and_in_stock(study):
    source = read_source(study)
    joint = Interval(0.229, 0.155, 0.304), Interval(-0.0004, -0.001, 0.0002)
    runs = tuple(
        replace(
            c,
            evaluation=replace(
                c.evaluation,
                recovery=replace(
                    c.evaluation.recovery,
                    joint_now=joint[0],
                    joint_stock=joint[1],
                    joint_rise=joint[0],
                ),
            ),
        )
        for c in source.runs
    )
    verdict = judge(replace(source, runs=runs))
    text = next(f.text for f in verdict.findings if f.title == "By function")
    together = "together, the treated heads are worth +0.2290 nats (-0.0004 in stock)"
    assert together in verdict.basis  # beside "0 of 20 recovered", where it is read first
    assert re.search(r"Alone: .*Together: .*\+0\.2290 .*in stock: -0\.0004", text)


def test_what_was_done_to_shared_keys_is_told_of_the_groups_that_the_patch_holds(study):
    """37 heads on two key groups: it said that the keys and values of all were reinitialised."""
    source = read_source(study)
    slices = {"L1H0.q": 4, "L1H0.o": 4, "L1H1.q": 4, "L1H1.o": 4, "L1KV0.k": 2, "L1KV0.v": 2}
    runs = tuple(replace(c, slices=slices) for c in source.runs)
    found = judge(replace(source, runs=runs)).findings
    text = next(f.text for f in found if f.title == "What was done")
    assert "reinitialised the queries and silenced the outputs of" in text
    assert "and reinitialised the keys and values of 1 key/value group, whose heads are all" in text
    assert "holds their queries and outputs, the keys and values of 1 key/value group, and" in text


def test_texts_are_called_by_their_files_without_the_folders_they_lie_in():
    """A pushed card and page named /home/me/texts."""
    assert text_name("/home/me/wiki.jsonl, ../sotu.txt") == "wiki.jsonl, sotu.txt"
    assert [text_name(n) for n in ("allenai/c4", "patient-heldout")] == [
        "allenai/c4",
        "patient-heldout",
    ]


def test_heads_that_were_never_ablated_are_not_called_healthy_or_recovered():
    ill = Recovery({}, 3, 3, judged=0, functional=0, exceptions=(), rule="", was_ill=3)
    assert untested_text([ill]).startswith("No treated head was ablated")
    assert recovered_text([ill]) == "none judged"
    assert recovered_text([replace(ill, was_ill=0)]) == "none ill in stock"


def test_a_triage_is_found_in_the_folder_and_told(study, tmp_path):
    folder = tmp_path / "d"
    diagnosis_of(stock_mass()).save(folder / "diagnosis.json")
    triage_of({"L3H6": "asleep", "L4H7": "empty"}).save(folder / "triage.json")
    found = read_source(folder)
    assert page_payload(found, [])["triage"][3][6] == 0
    assert page_payload(found, [])["triage"][0][0] is None
    told = {finding.title: finding.text for finding in judge(found).findings}
    assert told["Why they are sick"] == "Triage of 2 heads: 1 asleep, 1 empty."
    assert read_source(study, triage=folder).triage is not None


def test_a_triage_of_other_weights_is_refused(tmp_path):
    found = diagnosis_of(stock_mass())
    other = replace(found, model=replace(found.model, fingerprint="0" * 64))
    other.save(tmp_path / "d" / "diagnosis.json")
    triage_of({}).save(tmp_path / "t" / "triage.json")
    with pytest.raises(ArtefactError, match=r"do not belong together: different base weights"):
        read_source(tmp_path / "d", triage=tmp_path / "t")


def test_a_film_has_a_page_with_its_steps_measures_and_alarms(tmp_path, no_figures):
    film = film_in(tmp_path / "watch")
    assert [alarm.head for alarm in film.alarms] == ["L2H5"]
    page = report.write_report(tmp_path / "watch", tmp_path / "report").read_text()
    found = re.search(r'id="data">(.*?)</script>', page, re.DOTALL)
    (condition,) = json.loads(found[1])["conditions"]
    assert condition["steps"] == list(range(0, 100, 10))
    assert set(condition["film"]) == {
        "first_token_mass",
        "entropy",
        "output_norm",
        "max_logit",
        "sink_rate",
    }
    assert condition["film"]["entropy"][9][2][5] == pytest.approx(
        3 - film.trajectory("L2H5")[-1], abs=1e-4
    )
    assert condition["marks"] == [[film.alarms[0].step, "L2H5", "collapse"]]
    assert "0 sick heads at step 0, 1 at 90; 1 alarms." in page
    assert "L2H5 at step 80" in page


def test_a_search_is_told_with_its_curve_its_rivals_and_its_promise(study, tmp_path):
    pruned_of(read_source(study).model).save(tmp_path / "prune" / "prune.json")
    page = report.write_report(tmp_path / "prune", tmp_path / "report").read_text()
    assert "2 of 64 heads (3%) can go below 0.01 nats per token, with 95% confidence." in page
    assert "as many taken at random: +0.1000" in page
    assert {"prune_held_out.svg", "prune_other.svg"} <= {
        path.name for path in (tmp_path / "report" / "figures").iterdir()
    }
    orders = (tmp_path / "report" / "tables" / "table01_prune_orders.md").read_text()
    assert "| first-token mass | +0.0600 (+0.0000 to +0.0610) |" in orders


@pytest.mark.parametrize(
    ("change", "said", "tone"),
    [
        ((-0.02, -0.03, -0.01), "reads this text better", "good"),
        ((0.004, 0.002, 0.006), "loses less on this text than the 0.01 nats", "good"),
        ((0.01, 0.002, 0.02), "not shown whether", "plain"),
        ((0.04, 0.02, 0.06), "loses more on this text than the 0.01 nats", "bad"),
    ],
)
def test_a_pruned_model_is_judged_by_what_was_promised_and_no_head_of_it_recovers(
    study, tmp_path, change, said, tone
):
    whole = read_source(study)
    run = whole.of_arm("sham")[0]
    name = whole.judged_set
    losses = {
        **run.comparison.losses,
        name: replace(run.comparison.losses[name], difference=Interval(*change)),
    }
    pruned = replace(run, arm="prune", run=None, comparison=replace(run.comparison, losses=losses))
    search = pruned_of(whole.model)
    found = judge(Source(tmp_path, "prune", "prune", whole.stock, (pruned,), searches=(search,)))
    assert found.headline.startswith("Without 2 heads")
    assert said in found.headline
    assert found.tone == tone
    titles = [finding.title for finding in found.findings]
    assert "Heads that can go" in titles
    assert not {"By function", "By first-token mass", "Roles"} & set(titles)
