"""The report in a real browser: it opens, asks for nothing, and does what its controls say.

Chromium is Debian's package; it is installed if it is missing and this machine lets us.
"""

from __future__ import annotations

import shutil
import subprocess

import pytest

from filmed import film_in
from headwise.report import write as report
from reportstudy import EVIL, build_study, triage_of

playwright = pytest.importorskip("playwright.sync_api", reason="pip install playwright")
pytestmark = pytest.mark.browser

FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-sync",
    "--disable-background-networking",
    "--disable-component-update",
]
PATIENCE = 120_000  # ms; the machine may be busy


@pytest.fixture(scope="module")
def chromium_path():
    if shutil.which("chromium") is None and shutil.which("apt-get"):
        subprocess.run(["apt-get", "update", "-qq"], check=False, capture_output=True)
        subprocess.run(
            ["apt-get", "install", "-y", "-qq", "chromium"], check=False, capture_output=True
        )
    path = shutil.which("chromium")
    if path is None:
        pytest.skip("Chromium is not installed, and apt-get could not install it")
    return path


@pytest.fixture(scope="module")
def browser(chromium_path):
    with playwright.sync_playwright() as driver:
        running = driver.chromium.launch(executable_path=chromium_path, args=FLAGS)
        yield running
        running.close()


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    folder = tmp_path_factory.mktemp("browser")
    study = build_study(folder / "study")
    triage_of({"L3H6": "asleep", "L4H7": "empty"}).save(study / "stock" / "triage.json")
    return report.write_report(study, folder / "report")


@pytest.fixture
def page(browser, path):
    """The report, opened; every message, error and request is kept in `page.heard`."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    context.set_default_timeout(PATIENCE)
    opened = context.new_page()
    heard = {"console": [], "errors": [], "requests": []}
    opened.on("console", lambda message: heard["console"].append(message.text))
    opened.on("pageerror", lambda error: heard["errors"].append(str(error)))
    opened.on("request", lambda request: heard["requests"].append(request.url))
    opened.goto(path.as_uri())
    opened.heard = heard
    yield opened
    context.close()


def here(page, head):
    return page.locator(f'#grid [data-head="{head}"]')


def test_the_report_opens_in_silence_and_asks_for_nothing(page, path):
    page.wait_for_selector("#grid button")
    page.evaluate("window.scrollTo(0, document.body.scrollHeight)")
    assert page.heard["console"] == []
    assert page.heard["errors"] == []
    asked = [url for url in page.heard["requests"] if not url.startswith("data:")]
    assert asked == [path.as_uri()]
    assert (
        page.locator("h1")
        .inner_text()
        .startswith("The operation made the model better, but gradient-only")
    )


def test_a_script_in_a_completion_stays_text(page):
    assert page.evaluate("window.evil") is None
    assert EVIL in page.locator("#completions blockquote").all_text_contents()
    assert page.locator("#completions img").count() == 0


def test_a_click_shows_the_numbers_of_that_head(page):
    here(page, "L3H6").click()
    assert page.locator("#detail-name").inner_text() == "L3H6"
    row = page.locator("#detail tbody tr").first.inner_text().split("\t")
    assert row[:2] == ["first-token mass", "0.957"]
    assert here(page, "L3H6").get_attribute("aria-selected") == "true"
    notes = page.locator("#multiples figcaption span").all_inner_texts()
    assert len(notes) == 14
    assert all(note.startswith("L3H6 ") for note in notes)
    titles = page.locator(".card-chart h4").all_inner_texts()
    assert {title.split(":")[0] for title in titles} == {
        "Profile",
        "Trajectory over steps",
        "Ablation cost in every condition",
        "Neighbours",
        "Pooled attention map",
    }


def test_arrow_keys_move_the_selection(page):
    here(page, "L3H6").click()
    page.keyboard.press("ArrowUp")
    page.keyboard.press("ArrowRight")
    assert page.locator("#detail-name").inner_text() == "L4H7"
    assert page.evaluate("document.activeElement.dataset.head") == "L4H7"


def test_the_slider_goes_through_the_checkpoints(page):
    page.select_option("#arm", "gradient-only")
    assert page.locator("#step-text").inner_text() == "final, as judged"
    last = here(page, "L4H7").get_attribute("aria-label")
    page.locator("#step").fill("0")
    assert page.locator("#step-text").inner_text() == "step 0"
    first = here(page, "L4H7").get_attribute("aria-label")
    masses = [float(label.rsplit(" ", 1)[1]) for label in (first, last)]
    assert masses[0] > 0.9 > masses[1]
    page.locator("#step").fill("3")
    assert page.locator("#step-text").inner_text() == "step 30"
    page.select_option("#measure", label="entropy")
    assert page.locator("#step").is_disabled()


def test_the_panel_follows_the_slider(page):
    page.select_option("#arm", "gradient-only")
    here(page, "L4H7").click()
    row = page.locator("#detail tbody tr").first
    final = row.inner_text().split("\t")
    page.locator("#step").fill("0")
    assert page.locator("#detail thead").inner_text().split() == ["stock", "step", "0", "change"]
    first = row.inner_text().split("\t")
    assert float(first[2]) > 0.9 > float(final[2])
    shown = here(page, "L4H7").get_attribute("aria-label").rsplit(" ", 1)[1]
    assert first[2] == shown
    entropy = page.locator("#detail tbody tr", has_text="entropy").first.inner_text().split("\t")
    assert not entropy[2][0].isdigit()  # a checkpoint knows the mass alone


def test_every_head_has_an_address(page, path):
    here(page, "L5H6").click()
    assert page.url.endswith("#L5H6")
    page.goto("about:blank")
    page.goto(path.as_uri() + "#L2H1")
    assert page.locator("#detail-name").inner_text() == "L2H1"
    page.evaluate("location.hash = 'L6H3'")
    page.wait_for_function("document.getElementById('detail-name').textContent === 'L6H3'")
    page.goto(path.as_uri() + "#L99H0")  # no such head: the page opens as ever
    assert page.locator("#detail-name").inner_text() == "L6H3"
    assert page.heard["errors"] == []


def test_triage_classes_are_a_measure_and_unjudged_heads_are_hatched_as_the_legend_says(page):
    assert "not" not in page.locator("#legend").inner_text()
    page.select_option("#measure", label="triage class")
    assert here(page, "L3H6").inner_text() == "Z"
    assert here(page, "L3H6").get_attribute("aria-label").endswith("triage class asleep")
    assert "repeating-linear-gradient" in here(page, "L0H0").evaluate("e => e.style.background")
    legend = page.locator("#legend").inner_text()
    assert "asleep" in legend
    assert "not judged" in legend


def test_grids_and_panel_stand_side_by_side_without_a_void(page):
    boxes = [page.locator(name).bounding_box() for name in (".grid-wrap", "#detail", "#below")]
    grids, detail, below = boxes
    assert detail["x"] > grids["x"] + grids["width"] - 1
    assert abs(detail["y"] - grids["y"]) < 2
    foot = max(b["y"] + b["height"] for b in (grids, detail))
    assert below["y"] - foot < 40
    assert foot - min(b["y"] + b["height"] for b in (grids, detail)) < 150


def test_figures_fit_a_dark_page_and_paper_shows_the_light_ones(page):
    shown = "[...document.querySelectorAll('.plate img')].map(i => i.offsetWidth > 0)"
    dark = "[...document.querySelectorAll('.plate img')].map(i => i.className === 'dark')"
    marks = page.evaluate(dark)
    assert page.evaluate(shown) == [not mark for mark in marks]
    page.locator("#theme").click()
    assert page.evaluate(shown) == marks
    page.emulate_media(media="print")
    assert page.evaluate(shown) == [not mark for mark in marks]
    loaded = "[...document.querySelectorAll('.plate img')].every(i => i.complete && i.naturalWidth)"
    assert page.evaluate(loaded)


def test_a_wide_table_says_that_it_scrolls(page):
    boxes = page.locator(".scroll")
    wide = [boxes.nth(i) for i in range(boxes.count())]
    sizes = [box.evaluate("e => e.scrollWidth > e.clientWidth + 1") for box in wide]
    assert any(sizes)
    assert not all(sizes)
    for box, is_wide in zip(wide, sizes, strict=True):
        assert box.evaluate("e => !e.nextElementSibling.querySelector('.hint').hidden") == is_wide
        assert box.evaluate("e => e.classList.contains('more-right')") == is_wide


def test_on_a_phone_the_panel_opens_below_the_tapped_row(browser, path):
    context = browser.new_context(
        viewport={"width": 390, "height": 844}, has_touch=True, is_mobile=True
    )
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(path.as_uri())
    cell = page.locator('#grid-stock [data-head="L5H6"]')
    for _ in range(2):  # again after it was put back by a second tap
        cell.tap()
        tapped, panel = cell.bounding_box(), page.locator("#detail").bounding_box()
        assert 0 <= panel["y"] - tapped["y"] - tapped["height"] < 20
        assert page.evaluate("document.documentElement.scrollWidth") <= 390
        cell.tap()
        assert page.locator("#right #detail").count() == 1
    context.close()


def test_switching_the_arm_and_the_seed_changes_the_grid(page):
    here(page, "L4H7").click()
    before = here(page, "L4H7").get_attribute("aria-label")
    page.select_option("#arm", "random-heads")
    after = here(page, "L4H7").get_attribute("aria-label")
    assert before.startswith("L4H7, healthy")
    assert after.startswith(("L4H7, sink", "L4H7, dead"))
    page.select_option("#seed", label="1")
    assert "random-heads, seed 1" in page.locator("#title-here").inner_text()
    page.select_option("#arm", "stock")
    assert page.locator("#grid-stock").is_hidden()


def test_hovering_gives_numbers(page):
    here(page, "L2H0").hover()
    tip = page.locator("#tip")
    assert tip.is_visible()
    assert "L2H0" in tip.inner_text()
    assert "entropy" in tip.inner_text()


def test_a_heading_sorts_its_table(page):
    table = page.locator('table[data-key="table02_recovery"]')
    button = table.locator("thead button", has_text="healthy")
    column = "table[data-key=table02_recovery] tbody td:nth-child(3)"
    read = f"[...document.querySelectorAll('{column}')].map(cell => Number(cell.dataset.sort))"
    button.click()
    rising = page.evaluate(read)
    assert rising == sorted(rising)
    button.click()
    assert page.evaluate(read) == sorted(rising, reverse=True)
    heading = table.locator("thead th").nth(2)
    assert heading.get_attribute("aria-sort") == "descending"


def test_data_can_be_downloaded(page, tmp_path):
    for name, ending in (("heads-csv", "csv"), ("data-json", "json")):
        with page.expect_download() as waited:
            page.locator(f'[data-download="{name}"]').click()
        waited.value.save_as(tmp_path / name)
        assert waited.value.suggested_filename.endswith(ending)
    lines = (tmp_path / "heads-csv").read_text().splitlines()
    assert lines[0].startswith("condition,layer,head,class,first_token_mass")
    assert len(lines) == 1 + 14 * 64


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_needs_no_sideways_scrolling(browser, path, scheme):
    context = browser.new_context(viewport={"width": 390, "height": 844}, color_scheme=scheme)
    context.set_default_timeout(PATIENCE)
    page = context.new_page()
    page.goto(path.as_uri())
    assert page.evaluate("document.documentElement.scrollWidth") <= 390
    before = page.evaluate("getComputedStyle(document.body).backgroundColor")
    page.locator("#theme").click()
    assert page.evaluate("getComputedStyle(document.body).backgroundColor") != before
    context.close()


def test_a_film_slides_through_every_measure_and_marks_its_alarms(browser, tmp_path):
    film = film_in(tmp_path / "watch")
    path = report.write_report(tmp_path / "watch", tmp_path / "report")
    page = browser.new_page()
    page.set_default_timeout(PATIENCE)
    errors = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(path.as_uri())
    head = page.locator('#grid [data-head="L2H5"]')
    head.click()
    page.select_option("#measure", label="entropy")
    labels = []
    for step in ("0", "9"):
        page.locator("#step").fill(step)
        labels.append(head.get_attribute("aria-label"))
    assert "sink" not in labels[0]
    assert "sink" in labels[1]
    for label, place in zip(labels, (0, 9), strict=True):
        assert f"entropy {film.trajectory('L2H5', 'entropy')[place]:.3f}" in label
    assert page.locator("line.alarm.on").count() == 1
    assert "L2H5 at step 70" in page.locator("line.alarm title").first.text_content()
    assert not errors
    page.close()
