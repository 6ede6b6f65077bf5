"""What auto decided and why, as `therapy.json` keeps it: a value without torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from headwise.artefacts import load_artefact, save_artefact
from headwise.diagnosis.symptoms import SYMPTOMS
from headwise.frames import frame
from headwise.intervals import Interval
from headwise.provenance import Origin
from headwise.surgery.plan import SurgeryPlan
from headwise.triaging.values import TRIAGE_CLASSES
from headwise.values import Finite, from_plain, plain_fields, to_plain

if TYPE_CHECKING:
    import pandas as pd

THERAPY = "therapy.json"


@dataclass(frozen=True)
class Tried:
    """One comparison: what all or one of the heads were given, and the change of training loss."""

    heads: str
    dose: str
    change: float  # nats per token, against the state it was compared with
    error: float  # standard error over documents
    kept: bool


@dataclass(frozen=True)
class LossChange:
    """Loss of the repaired model minus stock on some texts, in nats per token, by document."""

    texts: str
    documents: int
    change: Interval
    worse: Finite  # share of the documents whose loss rose
    by_position: Mapping[str, Interval]  # of the predicting token in its row, counted from 1

    def __str__(self) -> str:
        one = self.change
        return (
            f"{one.value:+.4f} ({one.low:+.4f} to {one.high:+.4f}) nats per token on "
            f"{self.documents} documents, {self.worse:.0%} of them worse"
        )

    @property
    def positions(self) -> str:
        """What the change is made of, along the context."""
        parts = self.by_position.items()
        return ", ".join(f"tokens {name} {part.value:+.4f}" for name, part in parts)


@dataclass(frozen=True)
class Therapy:
    """The plan that auto wrote, and whether the repaired model is better than stock.

    `better` is None until the patch was judged, on validation text and on text of another kind.
    """

    asked: str  # identity of the settings for which the plan was written
    plan: SurgeryPlan = field(repr=False)  # treatment and dose by head; no targets: treat none
    left_alone: tuple[str, ...]
    classes: Mapping[str, str]  # head: what triage on training text found
    tried: tuple[Tried, ...] = field(repr=False)
    judged: LossChange | None = None  # on validation text: text like the corpus
    elsewhere: LossChange | None = None  # on other text; None where the patch was empty before
    better: bool | None = None
    untriaged: tuple[str, ...] = ()  # of many heads those with least hope to first order
    symptoms: Mapping[str, str] = field(default_factory=dict)  # that were looked for: heads with it
    heads: int = 0  # of the model
    revised: Mapping[str, str] = field(default_factory=dict)  # head: class while others are treated
    run: str = ""  # identity of the run that carried it out, once that is over

    @property
    def treatments(self) -> dict[str, str]:
        """The treatment of each head that gets one."""
        given = self.plan.treatments.items()
        named = {str(head): name for name, heads in given for head in self.plan.heads_of(heads)}
        return {str(head): named[str(head)] for head in self.plan.target_heads}

    @property
    def sentence(self) -> str:
        """What the therapy found, for the terminal and the report."""
        if not self.plan.targets:
            return f"{self._nothing}: leaving the model alone is best"
        if self.change is None or self.better is None:
            return f"{self._treated}; the patch was not judged yet"
        told = f"validation loss against stock {self.judged}"
        if self.better:
            return f"{self._treated}, {told}: better on text like the corpus, with 95% confidence"
        if self.change.high < 0:
            return f"{told}: better there, but {self.other}, so leaving the model alone is best"
        return f"{told}: not better with 95% confidence, so leaving the model alone is best"

    @property
    def _nothing(self) -> str:
        """Why no head is treated: nothing was found, or nothing that was tried gained."""
        if self.tried:
            count = len(self.classes) + len(self.untriaged)
            found = f" ({self.found})" if self.found else ""
            return (
                f"{count} head{'s' * (count != 1)}{found} were treated in {len(self.tried)} ways "
                "on training text; none gained"
            )
        doubtful = {row.name for row in SYMPTOMS if not row.sure}
        kinds = [name for name in self.symptoms if name not in doubtful]
        looked = ", ".join([*kinds, "sleeping"]) if self.symptoms else "ill"
        return f"{self.heads or 'all'} heads: no {looked} or harmful head"

    @property
    def change(self) -> Interval | None:
        """Loss of the repaired model minus stock on validation text, nats per token."""
        return None if self.judged is None else self.judged.change

    @property
    def documents(self) -> int:
        """Validation documents that the patch was judged on."""
        return 0 if self.judged is None else self.judged.documents

    @property
    def other(self) -> str:
        """What the repair does to other text; nothing if it was not measured."""
        if self.elsewhere is None:
            return ""
        change = self.elsewhere.change
        if change.low > 0:
            reading = "worse there, with 95% confidence"
        else:
            reading = "better there too" if change.high < 0 else "no difference shown there"
        return f"on other text ({self.elsewhere.texts}) {self.elsewhere}: {reading}"

    @property
    def _treated(self) -> str:
        count = len(self.plan.target_heads)
        return f"{count} head{'s' * (count != 1)} treated"

    @property
    def found(self) -> str:
        """How many heads of each class; nothing if no head was ill."""
        counts = Counter(self.classes.values())
        told = ", ".join(f"{counts[name]} {name}" for name in TRIAGE_CLASSES if counts[name])
        more = f"; {len(self.untriaged)} not looked at" if self.untriaged else ""
        return f"{told}{more}" if told else ""

    def __repr__(self) -> str:
        return f"Therapy({self.sentence})"

    def origin(self, name: object) -> Origin:
        """What it is of: the weights that its plan is for, and the run that carried it out."""
        model = self.plan.model
        return Origin(str(name), model.id, model.fingerprint, run=self.run or None)

    def to_frame(self) -> pd.DataFrame:
        """One row per comparison that was made: heads, dose, change, kept (needs pandas)."""
        return frame([to_plain(row) for row in self.tried])

    def save(self, run: Path) -> Path:
        """Write `therapy.json` into a run directory."""
        return save_artefact(run / THERAPY, "therapy", plain_fields(self))

    @staticmethod
    def load(run: Path) -> Therapy:
        """Read the `therapy.json` of a run directory."""
        path = run / THERAPY
        body = load_artefact(path, "therapy")
        if body.get("change") is not None and "judged" not in body:  # an older run told no more
            judged = {"texts": "", "worse": 0.0, "by_position": {}}
            body["judged"] = judged | {key: body[key] for key in ("change", "documents")}
        return from_plain(Therapy, body, path)
