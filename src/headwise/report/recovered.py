"""How many treated heads recovered, over the seeds of an arm."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.report.source import Source


@dataclass(frozen=True)
class Recovered:
    """How many heads passed a test of those it was put to, seed by seed."""

    passed: tuple[int, ...]
    operated: tuple[int, ...]

    def __str__(self) -> str:
        if not any(self.operated):
            return "none (no treated head was sick in stock)"
        if len(set(self.operated)) > 1:
            pairs = zip(self.passed, self.operated, strict=True)
            return " and ".join(f"{passed} of {operated}" for passed, operated in pairs)
        low, high = min(self.passed), max(self.passed)
        return (str(low) if low == high else f"{low} to {high}") + f" of {self.operated[0]}"


def recovered(source: Source, arm: str, key: str = "functional") -> Recovered | None:
    """`functional` heads of those that were sick and judged, or `not_sick` of all treated ones."""
    found = [c.evaluation.recovery for c in source.of_arm(arm) if c.evaluation]
    known = [r for r in found if r]
    if not known:
        return None
    tested = "judged" if key == "functional" else "operated"
    return Recovered(
        tuple(getattr(r, key) for r in known), tuple(getattr(r, tested) for r in known)
    )
