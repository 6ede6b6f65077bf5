"""Findings and the verdict as values, and the verdict on a film of heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from headwise.alarms import Alarm
from headwise.watch.film import Film

Tone = Literal["good", "bad", "plain", "caution"]


@dataclass(frozen=True)
class Finding:
    """One sentence or two, and whether it speaks for the operation."""

    title: str
    text: str
    tone: Tone = "plain"


@dataclass(frozen=True)
class Verdict:
    """The headline and what it rests on."""

    headline: str
    tone: Tone
    findings: tuple[Finding, ...]
    basis: str = ""  # how much it rests on, in one line
    alarms: tuple[Alarm, ...] = ()  # what speaks against believing any of it


def film_verdict(film: Film, found: list[Finding | None]) -> Verdict:
    """What a training run did to the heads; its alarms are about the model, not the numbers."""
    first, last = film.readings[0], film.readings[-1]
    told = f"{len(film.alarms)} alarms" if film.alarms else "no alarm"
    counts = f"{len(first.sick)} sick heads at step {first.step}, {len(last.sick)} at {last.step}"
    sick = [f"{head} at step {step}" for head, step in film.first_sick.items() if step > first.step]
    if sick:
        found = [*found, Finding("Heads that became sick", ", ".join(sick), "bad")]
    alarms = tuple(one.alarm for one in film.alarms)
    tone: Tone = "bad" if film.alarms else "plain"
    basis = f"{len(film.readings)} readings on the probe texts"
    return Verdict(f"{counts}; {told}.", tone, tuple(f for f in found if f), basis, alarms)
