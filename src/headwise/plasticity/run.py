"""Attention plasticity of every head in a folder of captured queries and keys.

Plan the groups (one key head and its query heads), measure them in parallel, keep each finished
head on disk at once, and write the tables from what is kept. Work is spread over processes with
one BLAS thread each, or over a Dask cluster; only this process writes.

Invariant: the same files and settings give the same bytes, whatever the number of workers, the
backend, and however often the run was stopped and resumed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from headwise.artefacts import content_hash, own_folder, sweep
from headwise.errors import ArtefactError, HeadwiseError, SelectionError, SettingsError, TextError
from headwise.frames import frame
from headwise.heads import Head, select_heads
from headwise.integrity.locks import one_writer
from headwise.models.values import model_name
from headwise.plasticity.components import COLUMNS, CORRELATIONS, component_rows
from headwise.plasticity.head_group import analyse_group
from headwise.plasticity.reader import HeadGroup, QKFolder, find_heads, group_heads
from headwise.plasticity.settings import PlasticitySettings, load_settings
from headwise.plasticity.tables import make_summary, table_rows, write_csv, write_tables
from headwise.plasticity.values import FILE, HeadFailure, HeadRecord
from headwise.progress import Progress, silent
from headwise.workers import spread

if TYPE_CHECKING:
    import pandas as pd

__all__ = [
    "HeadFailure",
    "Plasticity",
    "PlasticitySettings",
    "load_settings",
    "measure_plasticity",
]


HEADS_FOLDER = ".heads"  # one small file for each finished head, for --resume


@dataclass(frozen=True)
class Plasticity:
    """The heads of one run, those that failed, and the files written."""

    model: str
    settings: PlasticitySettings
    heads: tuple[HeadRecord, ...]
    failures: tuple[HeadFailure, ...]
    files: tuple[Path, ...]

    def __repr__(self) -> str:
        failed = f", {len(self.failures)} failed" if self.failures else ""
        return f"Plasticity({model_name(self.model)}, {len(self.heads)} heads{failed})"

    def to_frame(self, table: Literal["heads", "buckets", "components"] = "heads") -> pd.DataFrame:
        """The rows of one of the three CSV files (needs pandas)."""
        return frame(table_rows(table, self.heads))

    @property
    def caps(self) -> str:
        """What was sampled where there was more, and how often that was so."""
        settings = self.settings
        rows, pairs = settings.max_tokens_per_head, settings.pair_limit
        full = sum(max(head.n_q_tokens, head.n_k_tokens) >= rows for head in self.heads)
        cells = sum(cell.n_pairs >= pairs for head in self.heads for cell in head.cells)
        text = (
            f"at most {rows:,} vectors per head (--max-rows; {full} heads reached it) and "
            f"{pairs:,} pairs per key bucket (--max-pairs; {cells} cells reached it)"
        )
        if settings.pairs == "all" and cells:
            text += (
                f"\n--pairs all is a sample in {cells} cells: {pairs:,} of more pairs were scored; "
                "raise --max-pairs for all of them"
            )
        return text


def measure_plasticity(
    source: Path | str | PlasticitySettings,
    *,
    out: Path | str,
    resume: bool = False,
    progress: Progress = silent,
    **options: Any,
) -> Plasticity:
    """Measure every head of `source` (a folder, a YAML file or settings) and write `out`.

    `options` are fields of `PlasticitySettings` that override the source's. Heads that fail are in
    `failures` and the others are finished; with `resume` finished heads of an earlier run with the
    same settings and files are taken from `out`. `progress` counts heads.
    """
    settings = _settings_of(source).replaced(**options)
    with one_writer(Path(out)):
        return _measure_all(Path(out), settings, resume, progress)


def _measure_all(
    out: Path, settings: PlasticitySettings, resume: bool, progress: Progress
) -> Plasticity:
    if resume:
        sweep(out)
    folder = find_heads(_local_root(settings), settings.model_dir)
    groups = _wanted_groups(folder, settings)
    total = sum(len(group.q_heads) for group in groups)
    records, todo = _finished(out, folder, groups, settings) if resume else ([], groups)
    failures: list[HeadFailure] = []
    for group, items in _measure(folder, todo, settings):
        for item in items:
            if isinstance(item, HeadFailure):
                failures.append(item)
            else:
                key = _key(folder, group, item.q_head, settings)
                item.save(_head_file(out, item.layer, item.q_head), key)
                records.append(item)
        progress("heads", len(records) + len(failures), total, "")
    records.sort(key=lambda record: (record.layer, record.q_head))
    failures.sort(key=lambda failure: (failure.layer, failure.q_head))
    if records and all(record.ap_overall is None for record in records):
        raise TextError(
            "no head has a cell to measure: no query stands in a later bucket than two keys",
            where=out,
            fix="capture longer texts, or smaller --buckets",
        )
    summary = make_summary(folder.identity, settings, records, failures)
    files = (*write_tables(out, settings, records), summary.save(out / FILE))
    if settings.pca:
        rows = component_rows(folder, groups, settings)
        files += (write_csv(out / CORRELATIONS, {name: name for name in COLUMNS}, rows),)
    return Plasticity(folder.model, settings, tuple(records), tuple(failures), files)


def _settings_of(source: Path | str | PlasticitySettings) -> PlasticitySettings:
    if isinstance(source, PlasticitySettings):
        return source
    path = Path(source)
    if path.suffix in (".yaml", ".yml"):
        return load_settings(path)
    return PlasticitySettings(dataset_local_root=path)


def _local_root(settings: PlasticitySettings) -> Path:
    """The folder to read; the hub is asked only if a dataset is named and no folder is."""
    if settings.dataset_local_root is not None:
        return settings.dataset_local_root.resolve()
    if "dataset_name" not in settings.model_fields_set:
        raise SettingsError(
            "no data is named",
            fix="set dataset_local_root to a folder, or dataset_name to a hub dataset",
        )
    from huggingface_hub import snapshot_download  # late: only a hub run needs it
    from huggingface_hub.errors import HfHubHTTPError

    every = ["*/data.parquet", "*/*/data.parquet", "_saver_state.json", "capture.json"]
    named = settings.model_dir not in (None, ".")
    try:
        folder = snapshot_download(
            settings.dataset_name,
            repo_type="dataset",
            revision=settings.revision,
            allow_patterns=[f"{settings.model_dir}/*"] if named else every,
        )
    except (HfHubHTTPError, OSError, ValueError) as error:
        raise ArtefactError(
            f"cannot download {settings.dataset_name}: {str(error).splitlines()[0]}",
            fix="check dataset_name, revision and the network, or set dataset_local_root",
        ) from None
    return Path(folder)


def _wanted_groups(folder: QKFolder, settings: PlasticitySettings) -> list[HeadGroup]:
    groups = group_heads(
        folder,
        num_layers=settings.num_layers,
        num_q_heads=settings.num_q_heads,
        num_k_heads=settings.num_k_heads,
    )
    if settings.heads is None:
        return groups
    listed = [Head(group.layer, index) for group in groups for index in group.q_heads]
    chosen = select_heads(
        settings.heads,
        num_layers=1 + max(head.layer for head in listed),
        num_heads=1 + max(head.index for head in listed),
    )
    if not chosen:
        raise SelectionError(f"no head matches {settings.heads[:80]!r}", fix="choose other heads")
    return _only(groups, {(head.layer, head.index) for head in chosen})


def _only(groups: Sequence[HeadGroup], heads: set[tuple[int, int]]) -> list[HeadGroup]:
    """The groups with only some of their query heads; empty groups fall away."""
    kept = [
        HeadGroup(
            group.layer,
            group.k_head,
            tuple(index for index in group.q_heads if (group.layer, index) in heads),
        )
        for group in groups
    ]
    return [group for group in kept if group.q_heads]


def _measure(
    folder: QKFolder, groups: Sequence[HeadGroup], settings: PlasticitySettings
) -> Iterator[tuple[HeadGroup, list[HeadRecord | HeadFailure]]]:
    """Measure groups in parallel, in the order they finish."""
    if not groups:
        return
    try:
        yield from spread(
            partial(_measure_group, folder, settings),
            groups,
            workers=min(settings.max_workers or os.cpu_count() or 1, len(groups)),
            backend=settings.backend,
            scheduler=settings.scheduler,
        )
    except BrokenProcessPool:
        raise HeadwiseError(
            "a worker process died, most likely for want of memory",
            where=folder.path,
            fix="run again with --resume and fewer --workers; finished heads are kept",
        ) from None


def _measure_group(
    folder: QKFolder, settings: PlasticitySettings, group: HeadGroup
) -> tuple[HeadGroup, list[HeadRecord | HeadFailure]]:
    return group, analyse_group(folder, group, settings)


def _head_file(out: Path, layer: int, q_head: int) -> Path:
    return own_folder(out / HEADS_FOLDER) / f"l{layer:02d}h{q_head:02d}.json"


def _key(folder: QKFolder, group: HeadGroup, q_head: int, settings: PlasticitySettings) -> str:
    """What a finished head is valid for: the settings and the state of its two files."""
    parts = [settings.fingerprint()]
    files = (
        folder.file(group.layer, q_head, "q"),
        folder.file(group.layer, group.k_head, "k"),
    )
    for path in files:
        state = path.stat() if path.exists() else None
        parts.append(f"{path.name} {state.st_size} {state.st_mtime_ns}" if state else "missing")
    return content_hash(parts)


def _finished(
    out: Path, folder: QKFolder, groups: Sequence[HeadGroup], settings: PlasticitySettings
) -> tuple[list[HeadRecord], list[HeadGroup]]:
    """Heads that an earlier run finished with these settings and files, and what is left to do."""
    records, left = [], set()
    for group in groups:
        for q_head in group.q_heads:
            record = _kept_record(out, folder, group, q_head, settings)
            if record is None:
                left.add((group.layer, q_head))
            else:
                records.append(record)
    return records, _only(groups, left)


def _kept_record(
    out: Path, folder: QKFolder, group: HeadGroup, q_head: int, settings: PlasticitySettings
) -> HeadRecord | None:
    path = _head_file(out, group.layer, q_head)
    if not path.exists():
        return None
    try:
        key, record = HeadRecord.load(path)
    except ArtefactError:  # damaged: measuring again mends it
        return None
    return record if key == _key(folder, group, q_head, settings) else None
