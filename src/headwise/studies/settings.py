"""How the runs of a study are spread over processes; without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from annotated_types import Ge
from typing_extensions import Doc

from headwise.keywords import Backend


@dataclass(frozen=True)
class Workers:
    """Keywords of `run_study`, options of `headwise study`."""

    workers: Annotated[int, Doc("Arms and seeds side by side; each loads the model."), Ge(1)] = 1
    backend: Annotated[Backend, Doc("joblib (this machine) or dask")] = "joblib"
    scheduler: Annotated[str | None, Doc("Address of a Dask scheduler.")] = None

    @property
    def here_alone(self) -> bool:
        """Whether runs follow each other in this process."""
        return self.workers == 1 and self.backend == "joblib"
