"""Every verb on a local model with the network forbidden, and the supply chain's lists."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from campaigns import desk

ROOT = Path(__file__).parent.parent

PROGRAM = """
import os, sys
def forbid(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        address = args[1] if event != "socket.getaddrinfo" else args[0]
        if isinstance(address, (tuple, str)) and not str(address).startswith("/"):
            sys.stderr.write(f"NETWORK {event} {address}\\n")
            os._exit(9)
sys.addaudithook(forbid)
from typer.testing import CliRunner
from headwise.cli import app
for line in sys.stdin.read().splitlines():
    done = CliRunner().invoke(app, line.split())
    if done.exit_code:
        sys.stderr.write(f"{line}\\n{done.output}\\n{done.exception!r}\\n")
        os._exit(1)
    print(line.split()[0], flush=True)
os._exit(0)
"""

SHORT = "--texts held.jsonl --max-length 24 --quiet"
VERBS = f"""
check model --out check --quiet
diagnose model --out d --no-figures {SHORT}
survey d/diagnosis.json --out survey --quiet
plan d/diagnosis.json --heads L1H0-1 --out plan.yaml --quiet
triage model --diagnosis d/diagnosis.json --heads L1H0 --out triage {SHORT}
repair model --plan plan.yaml --corpus corpus.jsonl --steps 2 --block 24 --out run --quiet
apply model run/patch.safetensors --out patched --quiet
evaluate model --heads L1H0 --max-texts 2 --out before {SHORT}
evaluate model --patch run/patch.safetensors --heads L1H0 --max-texts 2 --out after {SHORT}
compare before after --run run --out comparison --quiet
complete model --new-tokens 2 --out completions --quiet
capture model --buckets uniform:8 --out qk {SHORT}
plasticity qk --workers 1 --no-figures --out plasticity --quiet
study study.yaml --out study --no-report --quiet
report run --before before --after after --out report --quiet
""".strip()


def test_no_verb_reaches_the_network_for_a_local_model(tmp_path):
    import yaml

    desk.saved_model(tmp_path)
    study = desk.small_study(Path()).model_dump(mode="json")
    (tmp_path / "study.yaml").write_text(yaml.safe_dump(study))
    environment = {k: v for k, v in os.environ.items() if k not in ("HF_HUB_OFFLINE",)}
    environment |= {"OMP_NUM_THREADS": "1", "HF_HOME": str(tmp_path / "hub")}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        input=VERBS,
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.split() == [line.split()[0] for line in VERBS.splitlines()]


def dependencies():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    return sorted({re.split(r"[<>=\[ ]", line)[0] for group in groups for line in group})


@pytest.mark.parametrize("name", dependencies())
def test_every_dependency_is_pinned_and_its_licence_listed(name):
    pins = (ROOT / "constraints.txt").read_text().lower()
    assert re.search(rf"^{re.escape(name.lower())}==", pins, re.MULTILINE), f"{name} is not pinned"
    assert re.search(rf"\b{re.escape(name)}\b", (ROOT / "docs" / "security.md").read_text())
