"""One arm with one seed: repair, evaluate, compare; and the stock condition that all arms share.

A finished artefact is read, not made again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headwise.artefacts import content_hash, own_folder
from headwise.diagnosis.diagnose import diagnose
from headwise.diagnosis.values import Diagnosis
from headwise.errors import SelectionError
from headwise.heads import Head
from headwise.keywords import keywords_of
from headwise.models.description import weight_fingerprint
from headwise.models.loaded_model import LoadedModel
from headwise.models.loading import load_model
from headwise.models.patch import Patch, applied
from headwise.progress import Progress, silent, stage
from headwise.proof.compare import compare
from headwise.proof.evaluate import evaluate
from headwise.proof.origins import origin_of
from headwise.proof.trajectories import run_maps
from headwise.proof.values import Comparison, Evaluation, identity_of
from headwise.proof.zones import Map
from headwise.provenance import STOCK, Origin, require_same_origin
from headwise.settings import changed
from headwise.studies.study import Study, StudyArm
from headwise.surgery.fitting import first_recipe, fit_request
from headwise.surgery.plan import SurgeryPlan, make_plan, operated_heads
from headwise.surgery.plan_settings import AUTO
from headwise.surgery.run_state import RUN
from headwise.surgery.settings import TRAINED, RepairRequest
from headwise.surgery.values import PATCH
from headwise.texts.corpus import Corpus
from headwise.texts.text_sets import TextSet, read_texts
from headwise.therapy.repair import RepairRun, repair


@dataclass(frozen=True)
class StudySetting:
    """What all arms share: the loaded model, the held-out texts and the stock condition."""

    study: Study
    out: Path
    loaded: LoadedModel = field(repr=False)
    heldout: list[TextSet] = field(repr=False)
    progress: Progress = field(repr=False)
    fingerprint: str = ""  # of the model's weights
    corpora: dict[tuple[str, int, int], Corpus] = field(default_factory=dict, repr=False)

    @property
    def excluded(self) -> list[str]:
        """The held-out texts, which no run is trained on."""
        return [text for texts in self.heldout for text in texts.texts]

    def corpus(self, name: str, request: RepairRequest) -> Corpus:
        """A corpus cut for a request, tokenised once a study; held-out texts are left out."""
        recipe = first_recipe(self.loaded.id, self.loaded.model, request)
        key = (name, recipe.block, recipe.batch_tokens)
        if key not in self.corpora:
            texts = self.study.corpus_texts(name)
            judged = any(arm.treatment == AUTO for arm in self.study.arms)
            self.corpora[key] = fit_request(
                self.loaded, request, texts, self.excluded, judged=judged
            )[1]
        return self.corpora[key]

    def origin(self, patch: str | None = None) -> Origin:
        """What an artefact of this study must be of."""
        return Origin(f"the study in {self.out}", self.loaded.id, self.fingerprint, patch)

    @property
    def max_length(self) -> int:
        """Tokens a held-out text is cut at, at most what the model was made for."""
        return self.loaded.length(self.study.max_length)


def open_setting(study: Study, out: Path, progress: Progress = silent) -> StudySetting:
    """Load the model and the held-out texts of a study."""
    loaded = load_model(study.model, dtype=study.dtype, device_map=study.device_map, bos=study.bos)
    fingerprint = weight_fingerprint(loaded.model)
    return StudySetting(study, out, loaded, study.heldout_texts(), progress, fingerprint)


def arm_plans(study: Study, stock: Diagnosis) -> dict[str, SurgeryPlan]:
    """The plan of every arm, before a seed is added to it."""
    return {arm.name: make_plan(stock, **keywords_of(arm.plan or study.plan)) for arm in study.arms}


def stock_diagnosis(setting: StudySetting) -> Diagnosis:
    """Of the first held-out texts, the ones that heads are judged on."""
    path = setting.out / "stock" / "diagnosis.json"
    if path.exists():
        kept = Diagnosis.load(path)
        require_same_origin(setting.origin(), origin_of(kept, path), _ANEW)
        return kept
    stage("diagnosing the stock model", setting.progress)
    judged = TextSet(setting.heldout[0].name, setting.heldout[0].texts[: setting.study.max_texts])
    diagnosis = diagnose(
        setting.loaded,
        judged,
        max_length=setting.max_length,
        batch_size=setting.study.batch_size,
        progress=setting.progress,
    )
    diagnosis.save(path)
    return diagnosis


def stock_evaluation(setting: StudySetting, plans: dict[str, SurgeryPlan]) -> Evaluation:
    """Of all held-out texts, with each arm's heads ablated together."""
    path = setting.out / "stock" / "evaluation.json"
    if path.exists():
        return _own_evaluation(setting, path, [])
    stage("evaluating the stock model", setting.progress)
    joint = {name: plan.target_heads for name, plan in plans.items()}
    stock = _evaluate(setting, [], joint, _ablated(setting, [h for p in joint.values() for h in p]))
    stock.save(path)
    return stock


def _ablated(setting: StudySetting, operated: list[Head]) -> list[Head] | str:
    wanted: dict[str, list[Head] | str] = {"all": "all", "none": "none"}
    return wanted.get(setting.study.ablate, sorted(set(operated)))


def _evaluate(
    setting: StudySetting,
    patches: list[Patch],
    joint: dict[str, list[Head]],
    heads: list[Head] | str,
) -> Evaluation:
    return evaluate(
        setting.loaded,
        setting.heldout,
        patches=patches,
        heads=heads,
        joint=joint,
        max_length=setting.max_length,
        max_texts=setting.study.max_texts,
        batch_size=setting.study.batch_size,
        adaptive=False,  # arms are compared head by head: every head sees the same documents
        stock=stock_diagnosis(setting) if patches else None,
        progress=setting.progress,
    )


def run_folder(out: Path, arm: str, seed: int, number: int = 1) -> Path:
    """Where one pass of one arm is kept."""
    folder = own_folder(own_folder(out / "runs") / f"{arm}-s{seed}")
    return folder if number == 1 else folder / f"pass{number}"


def run_arm(
    setting: StudySetting, arm: StudyArm, seed: int, plan: SurgeryPlan, before: Evaluation
) -> None:
    """All passes of one arm: repair, evaluate with the patches so far, compare with stock."""
    patches: list[Patch] = []
    first = run_folder(setting.out, arm.name, seed)
    for number in range(1, arm.passes + 1):
        folder = run_folder(setting.out, arm.name, seed, number)
        if number > 1:
            evaluation = Evaluation.load(first / "evaluation.json")
            try:
                plan = _second_plan(setting, arm, evaluation)
            except SelectionError:
                message = f"{arm.name} s{seed}: nothing left to operate on in pass {number}"
                stage(message, setting.progress)
                return
        with applied(setting.loaded.model, patches):
            patches.append(_one_pass(setting, arm, seed, plan, folder))
        _prove(setting, patches, folder, before, run_maps(folder, first), arm.mode == "lora")


def _second_plan(setting: StudySetting, arm: StudyArm, evaluation: Evaluation) -> SurgeryPlan:
    settings = replace(arm.plan or setting.study.plan, preset="pass2", heads=None)
    # the plan is for the model as it is now: base plus the patches of the first pass
    return make_plan(evaluation.diagnosis, **keywords_of(settings))


def _one_pass(
    setting: StudySetting, arm: StudyArm, seed: int, plan: SurgeryPlan, folder: Path
) -> Patch:
    plan = changed(plan, seed=plan.seed + seed)
    if not (folder / "plan.yaml").exists():
        plan.save(folder / "plan.yaml")
    done = arm.treatment or arm.mode
    way = f"{done} on " * (done != arm.name)
    line = f"{arm.name} s{seed}: {way}{len(plan.target_heads)} heads"  # as workers name a run
    stage(line, setting.progress)
    keep = read_texts(arm.keep) if arm.keep else None
    request = setting.study.request(arm, seed, plan)

    def carried_out(request: RepairRequest, out: Path) -> RepairRun:
        return repair(
            setting.loaded,
            plan,
            setting.corpus(arm.corpus, request),
            request.recipe,
            out=out,
            mode=arm.mode,
            treatment=arm.treatment,
            dose=arm.dose,
            seed=seed,
            changes=request.changes,
            keep=keep,
            excluded=TextSet("heldout", tuple(setting.excluded)),
            resume=(out / RUN).exists(),
            progress=setting.progress,
        )

    if isinstance(setting.study.rate, list) and arm.mode in TRAINED:
        request = _at_its_best_rate(request, setting.study.rate, carried_out, folder)
    return carried_out(request, folder).patch


def _at_its_best_rate(
    request: RepairRequest,
    grid: Sequence[float],
    carried_out: Callable[[RepairRequest, Path], RepairRun],
    folder: Path,
) -> RepairRequest:
    """The request at the rate with the least loss on the corpus's own validation text.

    Every rate gets a whole run, in `rates/` of the run's folder. Held-out text has no say.
    """
    losses = {}
    for rate in grid:
        one = replace(request, changes={**request.changes, "lr": rate})
        losses[rate] = carried_out(one, folder / "rates" / f"{rate:g}").state.best_loss
    best = min(grid, key=lambda rate: losses[rate])
    return replace(request, changes={**request.changes, "lr": best})


def _prove(
    setting: StudySetting,
    patches: list[Patch],
    folder: Path,
    before: Evaluation,
    checkpoints: list[tuple[int, Map]],
    whole_layers: bool,
) -> None:
    """Evaluate with all patches so far, and compare with stock by what they really touched."""
    path = folder / "evaluation.json"
    if not path.exists():
        targets = operated_heads(patch.info for patch in patches)
        _evaluate(setting, patches, {"operated": targets}, _ablated(setting, targets)).save(path)
    after = _own_evaluation(setting, path, patches)
    compared = folder / "comparison.json"
    if compared.exists():
        pair = Origin(f"the evaluations of {folder}", evaluations=identity_of([before, after]))
        require_same_origin(pair, origin_of(Comparison.load(compared), compared), _ANEW)
    else:
        compare(
            before,
            after,
            checkpoints=checkpoints,
            whole_layers=whole_layers,
        ).save(compared)


_ANEW = "put the file of this study back, or start anew in another --out"


def _own_evaluation(setting: StudySetting, path: Path, patches: list[Patch]) -> Evaluation:
    """An evaluation that lies in the study, if it is of its weights, patches and texts."""
    kept = Evaluation.load(path)
    texts = content_hash(sorted(losses.texts.sha256 for losses in kept.text_sets.values()))
    ours = replace(
        setting.origin(patches[-1].fingerprint() if patches else STOCK),
        texts=content_hash(sorted(texts.sha256 for texts in setting.heldout)),
    )
    require_same_origin(ours, replace(origin_of(kept, path), texts=texts), _ANEW)
    return kept


def arm_patches(out: Path, arm: StudyArm, seed: int) -> list[Path]:
    """The patch files of an arm, pass by pass."""
    folders = [run_folder(out, arm.name, seed, n) for n in range(1, arm.passes + 1)]
    return [path for folder in folders if (path := folder / PATCH).exists()]
