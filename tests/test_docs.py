"""What README and docs say, done: their Python blocks and their commands, with few steps."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from typer.testing import CliRunner

from headwise.cli import app
from headwise.models.patient import patient_texts

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
STORY = ROOT / "docs" / "story.md"
PAGES = sorted(set((ROOT / "docs").glob("*.md")) - {STORY})

# What makes a command of the README quick; the command itself stays as it is printed
SMALLER = {
    "diagnose": ["--texts", "few.jsonl", "--max-length", "64", "--no-figures"],
    "checkup": ["--texts", "few.jsonl", "--max-length", "64", "--budget", "30s"],
    "survey": ["--texts", "few.jsonl", "--max-length", "64"],
    "triage": ["--texts", "few.jsonl", "--max-length", "64"],
    "repair": ["--steps", "2"],
    "evaluate": ["--texts", "few.jsonl", "--max-length", "64", "--heads", "L4H6-7"],
    "complete": ["--new-tokens", "2"],
    "capture": ["--max-length", "64", "--layers", "4", "--buckets", "uniform:16"],
    "plasticity": ["--no-figures"],
    "prune": "--max-length 32 --max-texts 24 --exact 3 --width 1 --most 2 --curve 0".split(),  # noqa: SIM905
    "stream": [
        *("--max-length", "48", "--max-texts", "24", "--first", "4", "--recent", "16"),
        *("--exact", "3", "--width", "1", "--most", "2", "--curve", "0"),
    ],
    "study": ["--dry-run"],
}


def blocks(path: Path, language: str) -> list[str]:
    """Fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```", path.read_text(), re.MULTILINE | re.DOTALL)


def commands(text: str) -> list[list[str]]:
    """The headwise commands of a shell block; `\\` goes on, `&&` joins, `#` ends a line."""
    lines = re.sub(r"\\\n\s*", " ", text).splitlines()
    parts = [part for line in lines for part in line.split("#")[0].split("&&")]
    words = [shlex.split(part) for part in parts if part.strip()]
    return [found[1:] for found in words if found[0] == "headwise"]


def quick(words: list[str]) -> list[str]:
    """The command on the patient, with few texts and steps."""
    corpus = "train.jsonl" if words[0] in ("repair", "prune", "stream") else "few.jsonl"
    told = [{"MODEL": "patient", "my_texts/": corpus}.get(word, word) for word in words]
    given = {word for word in told if word.startswith("--")}
    extra = SMALLER.get(told[0], [])
    pairs = [extra[i : i + 2] for i in range(0, len(extra), 2)]
    for pair in pairs if told[0] != "plasticity" else [extra]:
        if pair[0] not in given:
            told += pair
    return [word for word in told if word]


@pytest.fixture
def desk(tmp_path, monkeypatch):
    """An empty folder with a few texts."""
    monkeypatch.chdir(tmp_path)
    rows = [json.dumps({"text": text}) for text in patient_texts("heldout")[:6]]
    (tmp_path / "few.jsonl").write_text("\n".join(rows) + "\n")
    rows = [json.dumps({"text": text}) for text in patient_texts("train")[:120]]
    (tmp_path / "train.jsonl").write_text("\n".join(rows) + "\n")
    return tmp_path


def run(words: list[str]) -> None:
    done = CliRunner().invoke(app, words)
    assert done.exit_code == 0, f"{shlex.join(words)}\n{done.output}\n{done.exception!r}"


@pytest.mark.parametrize(
    "treatment",
    ["the paper's", pytest.param("auto", marks=pytest.mark.slow)],  # auto: minutes, all sick heads
)
def test_the_story_in_commands_runs_on_the_patient(desk, treatment):
    [story] = blocks(STORY, "sh")
    found = [quick(words) for words in commands(story)]
    assert len(found) >= 10
    for words in found:
        if "auto" in words and treatment != "auto":
            continue
        if words[0] == "report" and not Path(words[1]).exists():
            words[1] = "out/run"  # the study of the story was only counted
        run(words)


@pytest.mark.parametrize("page", [README, STORY], ids=["readme", "story"])
def test_the_python_of_readme_and_story_runs(page, desk):
    names = {"__name__": page.stem}
    assert blocks(page, "python")
    for text in blocks(page, "python"):
        exec(compile(text, page.name, "exec"), names)


LONG = {"handover": pytest.mark.slow}  # a whole story of its own


@pytest.mark.parametrize(
    "page", [pytest.param(page, marks=LONG.get(page.stem, ()), id=page.stem) for page in PAGES]
)
def test_a_pages_commands_run(page, desk):
    names = {"__name__": page.stem}  # a page is read from the top: blocks go on from each other
    for text in blocks(page, "python"):
        exec(compile(text, page.name, "exec"), names)
    for text in blocks(page, "sh"):
        for words in commands(text):
            run(quick(words))


def _anchors(page: Path) -> set[str]:
    """The addresses of a page's headings, as mkdocs and GitHub make them."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    plain = [re.sub(r"[^\w\s-]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", h)) for h in headings]
    return {re.sub(r"[-\s]+", "-", words.strip().lower()) for words in plain}


WRITTEN = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])


@pytest.mark.parametrize("page", WRITTEN, ids=[str(p.relative_to(ROOT)) for p in WRITTEN])
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(page):
    text = re.sub(r"^```.*?^```|`[^`\n]*`", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        name, _, anchor = link.partition("#")
        if ":" in name:
            continue  # of the web
        target = (page.parent / name).resolve() if name else page
        if not target.exists() or (anchor and anchor not in _anchors(target)):
            wrong.append(link)
    assert not wrong
