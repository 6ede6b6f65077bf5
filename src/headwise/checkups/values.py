"""A check-up as a value: what was seen, what is worth doing, what was not looked at. No torch."""

from __future__ import annotations

import textwrap
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headwise.alarms import Alarm
from headwise.artefacts import load_artefact, save_artefact
from headwise.checkups.settings import CheckupSettings
from headwise.diagnosis.roles import NO_ROLE, ROLES
from headwise.diagnosis.values import Diagnosis
from headwise.intervals import Interval
from headwise.models.values import ModelInfo
from headwise.triaging.values import Triage
from headwise.values import from_plain, plain_fields

CHECKUP = "checkup.json"
# triage classes in few words
_MEANS: dict[str, str] = {
    "asleep": "of use when woken",
    "harmful": "better without",
    "parked": "switched off on purpose",
    "working": "needed",
    "empty": "nothing to lose or wake",
    "constant": "a bias in disguise",
    "undecided": "too close to tell",
}
WIDTH, MOST_LINES = 80, 15  # of a terminal, and of the answer


@dataclass(frozen=True)
class Opportunity:
    """Something worth doing: how much it brings, and the command that does it."""

    name: str
    finding: str  # in words, with the gain and its interval
    command: str
    gain: Interval | None = None  # change of loss, nats per token: negative is a gain


@dataclass(frozen=True)
class Checkup:
    """What a check-up found."""

    model: ModelInfo
    settings: CheckupSettings
    identity: str  # of the weights, texts and settings: finished stages of the same are used again
    counts: Mapping[str, int]
    roles: Mapping[str, int]
    texts: str  # on which heads were counted
    why: Mapping[str, int] = field(default_factory=dict)  # triage classes of the judged heads
    opportunities: tuple[Opportunity, ...] = ()
    stages: tuple[str, ...] = ()  # finished
    not_looked_at: tuple[str, ...] = ()  # each with the reason
    alarms: tuple[Alarm, ...] = ()

    @property
    def headline(self) -> str:
        """The answer in one sentence."""
        if self.alarms:
            return "Do not believe these numbers before the alarm below is explained."
        if not self.counts["sick"] and not self.opportunities:
            return "This model is healthy: no head is sick, and nothing needs doing."
        if not self.opportunities and not self.why:
            return "Whether its sick heads do harm was not looked at: leave them alone until it is."
        if not self.opportunities:
            return "Nothing that was looked at is worth doing: leave its heads alone."
        worth = ", ".join(one.name for one in self.opportunities)
        return f"Worth doing: {worth}."

    def lines(self, page: str = "") -> list[str]:
        """The answer in at most 15 lines of 80 columns."""
        counts = self.counts
        rows = [
            f"{self.model.short_name}: {_count(counts['total'], 'head')} in "
            f"{_count(self.model.num_layers, 'layer')}, counted on {self.texts}",
            f"sick: {_count(counts['sick'], 'head') if counts['sick'] else 'no head'} with most "
            "attention on the first token"
            + f" ({counts['dead']} dead, {counts['sink']} sinks)"
            * bool(counts["sick"]),
        ]
        judged = sum(self.why.values())
        if judged:
            classes = [
                f"{count} {name} ({_MEANS[name]})" for name, count in self.why.items() if count
            ]
            rows.append(f"why ({judged} judged): {', '.join(classes)}")
        played = [f"{self.roles[r.name]} {r.label}" for r in ROLES if self.roles.get(r.name)]
        rows.append(f"what heads do: {', '.join(played) or 'no role stands out'}")
        rows.append(self.headline)
        for one in self.opportunities:
            rows.append(f"  {one.name}: {one.finding}")
            rows.append(f"    {one.command}")
        if self.not_looked_at:
            missed: dict[str, list[str]] = {}
            for told in self.not_looked_at:
                what, _, why = told.partition(": ")
                missed.setdefault(why and f": {why}", []).append(what)
            parts = [" and ".join(some) + why for why, some in missed.items()]
            rows.append(f"not looked at: {'; '.join(parts)}")
        rows += [str(alarm) for alarm in self.alarms]
        rows += [f"page: {page}"] if page else []
        return _fitted(rows)

    def to_json(self) -> dict[str, Any]:
        """The body of `checkup.json`."""
        return {**plain_fields(self), "lines": self.lines()}

    def save(self, path: Path) -> Path:
        """Write `checkup.json`."""
        return save_artefact(path, "checkup", self.to_json())

    @staticmethod
    def load(path: Path) -> Checkup:
        """Read `checkup.json`."""
        return from_plain(Checkup, load_artefact(path, "checkup"), path)


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'s' * (number != 1)}"


def _fitted(rows: Sequence[str]) -> list[str]:
    """Rows broken at words; commands stay whole. Of too many the longest is cut first."""
    broken = []
    for row in rows:
        indent = " " * (len(row) - len(row.lstrip()))
        if row.strip().startswith("headwise "):
            broken.append([row])
            continue
        broken.append(textwrap.wrap(row, WIDTH, subsequent_indent=indent + "  ") or [""])
    while sum(map(len, broken)) > MOST_LINES:
        longest = max(broken, key=len)
        if len(longest) == 1:
            break
        longest.pop()
        longest[-1] = longest[-1][: WIDTH - 4].rstrip(" ,;") + " ..."
    return [line for lines in broken for line in lines]


def checkup_of(
    diagnosis: Diagnosis, settings: CheckupSettings, identity: str, triage: Triage | None = None
) -> Checkup:
    """What the diagnosis, and the triage if there is one, say."""
    texts = diagnosis.provenance.texts
    roles = Counter(name for row in diagnosis.roles for name in row if name != NO_ROLE)
    return Checkup(
        diagnosis.model,
        settings,
        identity,
        diagnosis.counts,
        dict(roles),
        "" if texts is None else f"{_count(texts.count, 'text')} of {texts.name}",
        {} if triage is None else dict(triage.counts),
        alarms=diagnosis.alarms,
    )
