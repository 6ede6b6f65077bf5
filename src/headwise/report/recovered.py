"""How many treated heads recovered, over the seeds of an arm."""

from __future__ import annotations

from dataclasses import dataclass

from headwise.report.source import Source


@dataclass(frozen=True)
class Recovered:
    """How many heads passed a test of those it was put to, seed by seed."""

    passed: tuple[int, ...]
    operated: tuple[int, ...]
    were_ill: bool = True  # some treated head, in stock

    @property
    def tested(self) -> bool:
        """Whether any head was put to the test."""
        return any(self.operated)

    @property
    def untested(self) -> str:
        """Why no head was tested."""
        if self.were_ill:
            return "No treated head was ablated, so none can be called recovered."
        return "No treated head was ill in stock, so none can recover."

    def __str__(self) -> str:
        if not self.tested:
            return "none judged" if self.were_ill else "none ill in stock"
        if len(set(self.operated)) > 1:
            pairs = zip(self.passed, self.operated, strict=True)
            return " and ".join(f"{passed} of {operated}" for passed, operated in pairs)
        low, high = min(self.passed), max(self.passed)
        return (str(low) if low == high else f"{low} to {high}") + f" of {self.operated[0]}"


def recovered(source: Source, arm: str, key: str = "functional") -> Recovered | None:
    """`functional` heads of those that were ill and judged, or `not_sick` of all treated ones."""
    found = [c.evaluation.recovery for c in source.of_arm(arm) if c.evaluation]
    known = [r for r in found if r]
    if not known:
        return None
    tested = "judged" if key == "functional" else "operated"
    return Recovered(
        tuple(getattr(r, key) for r in known),
        tuple(getattr(r, tested) for r in known),
        # an older file counts sick heads alone
        any((r.was_sick if r.was_ill is None else r.was_ill) != 0 for r in known),
    )
