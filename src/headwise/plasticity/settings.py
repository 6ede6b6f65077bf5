"""What a plasticity run depends on: the seed's YAML fields and headwise's own, checked once.

Invariant: a settings value is complete and valid; an unknown key never passes silently.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path, PurePath
from typing import Annotated, Any, Literal

from annotated_types import Ge
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, PositiveInt
from typing_extensions import Doc

from headwise.artefacts import content_hash, is_there, to_json
from headwise.bundled import DATA
from headwise.errors import SettingsError
from headwise.keywords import Backend, Flags, MaxLength, Seed
from headwise.settings import changed, read_yaml, validated

SEED_DATASET = "viktoroo/sniffed-qk"


CONFIGS = DATA / "plasticity_configs"  # bundled: `--config smollm2-135m`


def _below_out(name: str) -> str:
    """A file below --out: a path may lead into folders there, and not out of them."""
    parts = PurePath(name).parts
    if not parts or ".." in parts or PurePath(name).is_absolute() or not name.isprintable():
        raise ValueError("must be the path of a file below --out, such as tables/heads.csv")
    return name


CsvPath = Annotated[str, Field(max_length=200), AfterValidator(_below_out)]
Definition = Literal["seed", "full", "empirical", "linear-diagonal"]


# Where and how the work is done, and what the files are called, cannot change a number.
_NOT_IN_HASH = {
    "dataset_name",
    "revision",
    "dataset_local_root",
    "model_dir",
    "output_csv",
    "bucket_csv",
    "component_csv",
    "max_workers",
    "backend",
    "scheduler",
    "num_layers",
    "heads",
    "pca",
}


def parse_buckets(text: str) -> tuple[str, int]:
    """Read `uniform:512` or `log2:128`."""
    match = re.fullmatch(r"(uniform|log2):([0-9]{1,9})", text)
    if match is None or int(match[2]) < 1:
        raise SettingsError(f"unknown buckets {text[:40]!r}", fix="uniform:512 or log2:128")
    return match[1], int(match[2])


@dataclass(frozen=True)
class CaptureSettings:
    """What is captured; two captures with equal settings and texts give equal files."""

    buckets: Annotated[str, Doc("uniform:SIZE or log2:FLOOR")] = "uniform:64"
    base_rate: Annotated[
        float | None, Doc("Rows kept a text and bucket; default: all."), Ge(1e-9)
    ] = None
    max_length: MaxLength = 512
    pre_rope: Annotated[bool, Doc("Before RoPE is applied.")] = False
    layout: Annotated[Literal["new", "old"], Doc("new, or old (with a model folder)")] = "new"
    seed: Seed = 0
    bos: bool | None = None  # None: as the model is read

    def __post_init__(self) -> None:
        if self.base_rate is not None and not 0 < self.base_rate < math.inf:
            raise SettingsError(
                f"a base rate of {self.base_rate} keeps nothing",
                fix="rows to keep of each text and bucket, above 0; leave it out to keep all",
            )
        if self.max_length < 2:
            raise SettingsError("max_length must be 2 or more", fix="leave it out for 512")
        if self.seed < 0:
            raise SettingsError(f"a seed of {self.seed}", fix="pass 0 or more")
        parse_buckets(self.buckets)


class PlasticitySettings(BaseModel):
    """Settings of one run. Counts left out are discovered from the folder."""

    model_config = ConfigDict(
        extra="forbid", frozen=True, protected_namespaces=(), allow_inf_nan=False
    )

    dataset_local_root: Path | None = Field(default=None, description="folder of captured vectors")
    dataset_name: str = Field(
        default=SEED_DATASET, description="hub dataset, used without a local root"
    )
    revision: str | None = Field(default=None, description="branch or commit of the hub dataset")
    model_dir: str | None = Field(
        default=None, description="the model's folder under the root, if any"
    )
    num_layers: PositiveInt | None = None
    num_q_heads: PositiveInt | None = None
    num_k_heads: PositiveInt | None = None
    heads: Annotated[str | None, Doc("A selection such as L0-3H2.")] = None
    max_tokens_per_head: Annotated[
        int, Doc("Sample a head with more vectors; 50,000."), Flags("--max-rows"), Ge(1)
    ] = 50_000
    normality_max_dims: PositiveInt = 64
    p_alpha: float = Field(default=0.01, gt=0, lt=1)
    seed: Annotated[int, Doc("Seed of everything random."), Ge(0)] = 0
    definition: Annotated[Definition, Doc("How plasticity is defined.")] = "seed"
    pairs: Annotated[PositiveInt | Literal["all"], Doc("Key pairs a cell: all, or a number.")] = (
        "all"
    )
    max_pairs: Annotated[int, Doc("Sample a key bucket with more pairs; 200,000."), Ge(1)] = 200_000
    pca: Annotated[
        int, Doc("Principal components to correlate with position (correlations.csv)."), Ge(0)
    ] = 0
    legacy_columns: Annotated[bool, Doc("The public code's column names.")] = False
    output_csv: CsvPath = "head_metrics.csv"
    bucket_csv: CsvPath = "head_bucket_plasticity.csv"
    component_csv: CsvPath = "head_component_weights.csv"
    max_workers: Annotated[PositiveInt | None, Doc("Processes; all cores."), Flags("--workers")] = (
        None
    )
    backend: Annotated[Backend, Doc("joblib or dask")] = "joblib"
    scheduler: Annotated[str | None, Doc("Address of a Dask scheduler.")] = None

    @property
    def pair_limit(self) -> int:
        """Pairs of a key bucket that are scored at most; `all` ends at `max_pairs`."""
        return self.max_pairs if self.pairs == "all" else self.pairs

    @property
    def draws_as_public_code(self) -> bool:
        """Whether pairs come from the public code's generator calls."""
        return self.definition == "linear-diagonal" and self.pairs != "all"

    @property
    def window_in_buckets(self) -> bool:
        """Whether a sliding window is misread as a number of buckets, as the public code does."""
        return self.definition == "linear-diagonal" and self.legacy_columns

    def fingerprint(self) -> str:
        """A hash of everything here that can change a number."""
        return content_hash([to_json(self.model_dump(mode="json", exclude=_NOT_IN_HASH))])

    def replaced(self, **changes: Any) -> PlasticitySettings:
        """These settings with some fields changed, checked again; None changes nothing."""
        given = {name: value for name, value in changes.items() if value is not None}
        return changed(self, **given)


def config_file(name: Path | str) -> Path:
    """A YAML file, or the bundled one of this name."""
    path = Path(name)
    bundled = {file.stem: file for file in sorted(CONFIGS.glob("*.yaml"))}
    if path.suffix in (".yaml", ".yml") or is_there(path):
        return path
    if str(name) not in bundled:
        raise SettingsError(
            "no such file, and no bundled configuration has this name",
            where=name,
            fix=f"pass a YAML file, or one of {', '.join(bundled)}",
        )
    return bundled[str(name)]


def load_settings(path: Path | str) -> PlasticitySettings:
    """Read a YAML file or a bundled configuration.

    A relative local root may be meant from the file's own folder.
    """
    path = config_file(path)
    settings = validated(PlasticitySettings, read_yaml(path), path)
    root = settings.dataset_local_root
    if root is not None and not is_there(root) and is_there(path.parent / root):
        return settings.replaced(dataset_local_root=path.parent / root)
    return settings
