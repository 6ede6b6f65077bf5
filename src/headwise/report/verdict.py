"""The verdict in words: what was found, what was done, what changed, and which controls say so.

Rules, in order of weight: paired held-out loss against stock, then against the controls, then
functional recovery; first-token mass alone never counts, because heads that were only
reinitialised pass it too. A result that does not favour the operation is said as plainly as one
that does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from headwise.alarms import Alarm
from headwise.diagnosis.values import Diagnosis
from headwise.heads import heads_where
from headwise.intervals import Interval
from headwise.proof.zones import roles_played
from headwise.provenance import text_name
from headwise.pruning.values import RANDOM
from headwise.report.drift import moved_untouched
from headwise.report.effect import (
    effect_text,
    not_sick_text,
    perplexity_change,
    recovered_text,
    together_text,
    untested_text,
)
from headwise.report.finding import Finding, Tone, Verdict, film_verdict
from headwise.report.source import PRUNED, Condition, Source

# what each control holds fixed, and so what a difference to it is due to
CONTROLS = {
    "sham": "the same operation without training",
    "gradient-only": "the same heads trained as they were, without reinitialising",
    "random-heads": "the same operation on as many healthy heads",
    "lora": "low-rank training of the same layers",
    "ablate": "the same heads silenced for good",
}


def judge(source: Source) -> Verdict:
    """The verdict on a study, a run or a bare measurement; alarms come before everything else."""
    found = _judge(source)
    if not source.alarms:
        return found
    grave = [alarm for alarm in source.alarms if alarm.kind != "empty-completions"]
    if not grave:
        return replace(found, alarms=source.alarms)
    if _ruined(source, grave):
        told = "The operation ruined the model: it reads worse than token frequencies would."
        return replace(found, headline=told, tone="bad", alarms=source.alarms)
    count = _count(len(grave), "alarm")
    without = Finding("Without the alarms it would read", found.headline, "caution")
    return Verdict(
        f"{count}: do not believe these numbers before they are explained.",
        "bad",
        (without, *found.findings),
        found.basis,
        source.alarms,
    )


def _ruined(source: Source, alarms: Sequence[Alarm]) -> bool:
    """Whether only the changed model reads so badly: then the numbers are right, and bad."""
    evaluated = None if source.stock is None else source.stock.evaluation
    before = [condition.run.alarms for condition in source.runs if condition.run]  # on stock
    if evaluated is None or evaluated.alarms or not before or any(before):
        return False
    return all(alarm.kind.startswith("loss-above") for alarm in alarms)


def _judge(source: Source) -> Verdict:
    main = main_run(source)
    found = [_sickness(source), _triaged(source), *_searched(source)]
    film = None if source.stock is None else source.stock.film
    if film is not None:
        return film_verdict(film, found)
    if main is None and source.stock is None and source.searches:
        said = source.searches[0].sentences[0 if source.kind == PRUNED else 1]
        return Verdict(f"{said[0].upper()}{said[1:]}.", "plain", tuple(f for f in found if f))
    if main is None:
        return Verdict(_sick_headline(source), "plain", tuple(f for f in found if f))
    found += [
        _operation(source, main),
        _untrained(main),
        _own_validation(source, main),
        _for_whom(main),
        _by_mass(source, main),
        _by_function(source, main),
        _roles(source, main),
    ]
    found += [
        _loss(source, main),
        *_controls(source, main),
        _side_effects(source, main),
        _gaps(source),
    ]
    headline, tone = _headline(source, main)
    return Verdict(headline, tone, tuple(f for f in found if f is not None), _basis(source, main))


def _basis(source: Source, main: Condition) -> str:
    """The size of the effect, steps, seeds and recovered heads: what a headline must not hide."""
    change, losses, size = source.against_stock(main.arm), source.stock_losses(), ""
    if change is not None and losses is not None:
        size = effect_text(change, losses.loss.value, losses.unigram_loss) + " "
    worse = [name for name, other in _elsewhere(source, main) if other.low > 0]
    if worse and size and change is not None and change.value < 0:
        size += f"Text of {_listed(worse)} is read worse for it. "
    if main.run is None:
        return size.strip()
    passes = [c.run for c in source.runs if (c.arm, c.seed) == (main.arm, main.seed) and c.run]
    steps, seeds = sum(run.recipe.steps for run in passes), len(source.of_arm(main.arm))
    text = f"After {steps} training steps, {seeds} seed{'s' * (seeds > 1)}"
    ours = source.recoveries(main.arm)
    if ours and not untested_text(ours):
        text += f"; alone, {recovered_text(ours)} judged heads functionally recovered"
        together = together_text(ours)
        text += together and f"; {together}"
    several = len({condition.arm for condition in source.runs}) > 1
    return (
        f"{size}{text}." + several * " Other budgets may order the arms otherwise." + _rates(source)
    )


def _rates(source: Source) -> str:
    """At which learning rates the arms are compared: the rate may decide which is best."""
    summary = source.summary
    if summary is None or not summary.rate_rule or len(summary.rates) < 2:
        return ""
    each = [
        f"{arm} {'/'.join(f'{rate:.2g}' for rate in sorted(set(rates)))}"
        for arm, rates in summary.rates.items()
        if rates
    ]
    return f" Learning rates: {summary.rate_rule} ({', '.join(each)})." if each else ""


def main_run(source: Source) -> Condition | None:
    """The run the verdict is about: the arm `auto`, the first surgery arm, or else the first."""
    finals = source.finals
    surgery = [c for c in finals if c.mode == "surgery"]
    chosen = [c for c in surgery if c.arm == "auto"] or surgery or finals
    return chosen[0] if chosen else None


def interval(estimate: Interval, form: str = "+.4f") -> str:
    """An estimate in a sentence."""
    value, low, high = (format(x, form) for x in (estimate.value, estimate.low, estimate.high))
    return f"{value} (95% interval {low} to {high})"


def _sick_headline(source: Source) -> str:
    stock = source.stock
    if stock is None or stock.diagnosis is None:
        return "Nothing was judged yet: this run has no evaluation."
    counts = stock.diagnosis.counts
    if not counts["sick"]:
        return f"None of the {counts['total']} heads of {source.model_name} is sick."
    share = f"{counts['sick'] / counts['total']:.0%}"
    return f"{counts['sick']} of {counts['total']} heads of {source.model_name} ({share}) are sick."


def _sickness(source: Source) -> Finding | None:
    stock = source.stock
    if stock is None or stock.diagnosis is None:
        return None
    counts, cuts = stock.diagnosis.counts, stock.diagnosis.thresholds
    share = counts["sick"] / counts["total"]
    text = (
        f"{counts['sick']} of {counts['total']} heads ({share:.1%}) give more than "
        f"{cuts.sink:.2f} of their attention to the first token; {counts['dead']} of them more "
        f"than {cuts.dead:.2f}{_counted_on(stock.diagnosis)}."
    )
    if counts["sick"]:
        at = stock.diagnosis.threshold_sweep.counts
        same = at["0.40"] == at["0.60"]
        text += (
            f" It would be {at['0.40']} at a threshold of 0.40 and {at['0.60']} at 0.60: the "
            f"number {'does not depend' if same else 'depends'} on where the line is drawn."
        )
        text += _planned_on(source, counts["sick"])
        if source.triage is None and all(c.therapy is None for c in source.runs):
            text += " It is a symptom; whether they sleep, idle or work is what triage measures."
    return Finding("Heads that are sick in stock", text)


def _planned_on(source: Source, sick: int) -> str:
    """Which count the plan rests on, where it is another one: one story has one count."""
    main = main_run(source)
    key = None if main is None else (main.arm, main.seed)
    # a second pass counts on what the first one left
    first = next((c.run for c in source.runs if (c.arm, c.seed) == key and c.number == 1), None)
    plan = None if first is None else first.plan
    if plan is None or not plan.diagnosed:
        return ""
    own = len(plan.heads_of(plan.sick)) if plan.sick else 0
    return "" if own == sick else f" The plan rests on another count: {plan.diagnosed}."


def _counted_on(diagnosis: Diagnosis) -> str:
    """On which texts a count rests."""
    return diagnosis.provenance.basis and f", counted on {diagnosis.provenance.basis}"


def _triaged(source: Source) -> Finding | None:
    if source.triage is None:
        told = next((run.therapy.found for run in source.runs if run.therapy), "")
        return Finding("Why they are sick", f"Triage on training text: {told}.") if told else None
    counts = ", ".join(f"{count} {name}" for name, count in source.triage.counts.items() if count)
    judged = _count(len(source.triage.heads), "head")
    return Finding("Why they are sick", f"Triage of {judged}: {counts or 'none judged'}.")


def _searched(source: Source) -> list[Finding]:
    """What prune and stream promise, and what a random choice of as many would cost."""
    rows = []
    for search in source.searches:
        text = "; ".join(line.strip() for line in search.sentences)
        if search.chosen:
            text += f"; in the order in which they leave: {', '.join(search.groups)}"
        chance = search.cost(search.chosen, "held_out", RANDOM)
        if chance is not None:
            text += f"; as many taken at random: {interval(chance)} on held-out text"
        title = "Heads that can go" if search.kind == PRUNED else "Groups that need no long cache"
        rows.append(Finding(title, f"{text[0].upper()}{text[1:]}."))
    return rows


def _kept_promise(source: Source, change: Interval) -> tuple[str, Tone]:
    """A pruned model beside the limit below which its search promised to stay."""
    search = source.searches[0]
    limit = f"the {search.settings.search.max_loss:g} nats per token that prune promised"
    without = f"Without {_count(len(search.heads), 'head')}"
    if change.high < 0:
        return f"{without} the model reads this text better.", "good"
    if change.low > search.settings.search.max_loss:
        return f"{without} the model loses more on this text than {limit}.", "bad"
    if change.high < search.settings.search.max_loss:
        return f"{without} the model loses less on this text than {limit}.", "good"
    return f"{without}: not shown whether the loss on this text is below {limit}.", "plain"


def _untrained(main: Condition) -> Finding | None:
    """A run whose patch is not what training made is named as what it is."""
    outcome = "" if main.run is None else main.run.outcome
    if outcome == "empty":
        said = "it was not better than stock on validation text: leaving the model alone is best"
        told = said if main.therapy is None else main.therapy.sentence
        return Finding("The patch is empty", f"{told[0].upper()}{told[1:]}.", "caution")
    if outcome == "sham":
        return Finding(
            "The operation without training",
            "No trained state was better on validation text than the start: this patch is the "
            "sham, the untrained operation.",
            "caution",
        )
    return None


def _operation(source: Source, main: Condition) -> Finding | None:
    if main.run is None:
        return None
    passes = [c for c in source.runs if (c.arm, c.seed) == (main.arm, main.seed) and c.run]
    summary = (passes[0].run or main.run).plan.summary
    if summary is None:
        return None
    first = passes[0]
    seeds, steps = len(source.of_arm(main.arm)), first.steps_taken
    changed, shared = _own_slices(first), _shared_slices(first)
    verb = {
        "surgery": f"reinitialised the {_listed(changed[:-1] or changed)} and silenced the "
        f"{changed[-1]} of"
        if changed[-1:] == ["outputs"]
        else "reinitialised",
        "gradient-only": "trained, without reinitialising,",
        "sham": "reinitialised and silenced, without training,",
        "ablate": "silenced",
        "lora": "trained low-rank changes in the layers of",
        "random-heads": "reinitialised healthy heads, as many as",
    }.get(main.mode, "changed")
    if main.mode == "surgery" and main.run.plan.treatments:
        words = {"none": "no treatment, but training,"}
        given = main.run.plan.treatments.items()
        verb = f"gave {', '.join(f'{words.get(name, name)} to {heads}' for name, heads in given)}: "
        verb += "treated"
    weights = sum(first.slices.values()) or summary.trainable_weights
    total = None if source.model is None else source.model.num_parameters
    share = weights / total if total else summary.trainable_share
    text = f"{main.arm.capitalize()} {verb} {summary.heads} heads in {summary.layers} layers"
    if shared and main.mode == "surgery":
        done = "changed" if main.run.plan.treatments else "reinitialised"
        text += f", and {done} the {shared}, whose heads are all treated"
    if steps:
        text += (
            f", then trained only their {weights:,} weights"
            + (f" ({share:.2%} of the model)" if share else "")
            + f" for {steps} steps on {text_name(main.run.corpus.name)!r}"
        )
    if first.slices:
        held = f"their {_listed(changed)}{shared and f', the {shared}'}"
        text += f". The patch holds {held}, and nothing else"
    if len(passes) > 1:
        again = len(main.run.plan.target_heads)
        text += f"; a second pass treated {_count(again, 'head')} that were still or newly sick"
    return Finding("What was done", f"{text}; {_count(seeds, 'seed')}.")


_ROLES = {"q": "queries", "k": "keys", "v": "values", "o": "outputs"}


def _own_slices(condition: Condition) -> list[str]:
    """What the patch holds of single heads (L5H14.q); all where it is not at hand."""
    held = {_role(name) for name in condition.slices if "KV" not in name}
    return [word for role, word in _ROLES.items() if role in held or not condition.slices]


def _shared_slices(condition: Condition) -> str:
    """What it holds of groups that share keys and values (L5KV1.k), of how many groups."""
    shared = [name for name in condition.slices if "KV" in name]
    roles, groups = set(map(_role, shared)), {name.partition(".")[0] for name in shared}
    words = [word for role, word in _ROLES.items() if role in roles]
    return f"{_listed(words)} of {_count(len(groups), 'key/value group')}" if words else ""


def _role(name: str) -> str:
    return name.rpartition(".")[2].removesuffix("_bias")


def _own_validation(source: Source, main: Condition) -> Finding | None:
    """What the run itself knows of the loss, where no evaluation says more."""
    change = _own_change(source, main)
    if change is None or main.run is None or main.run.stock_loss is None:
        return None
    stock = main.run.stock_loss
    words = "worse than" if change > 0 else "better than" if change < 0 else "as good as"
    text = (
        f"On the run's own validation text the patch is {abs(change):.4f} nats per token {words} "
        f"stock ({stock:.4f} before, {stock + change:.4f} after). It was not evaluated on held-out "
        "text."
    )
    return Finding("What the run itself knows", text, "bad" if change > 0 else "plain")


def _own_change(source: Source, main: Condition) -> float | None:
    """The change of loss on the run's own validation text; None where an evaluation says more."""
    stock = None if main.run is None else main.run.stock_loss
    if source.against_stock(main.arm) is not None or stock is None or not main.validations:
        return None
    return min(main.validations.values()) - stock


def _for_whom(main: Condition) -> Finding | None:
    """On what text auto's patch is better, where in a text, and what it does to other text."""
    therapy = main.therapy
    if therapy is None or therapy.judged is None or not therapy.better:
        return None
    text = f"Text like the corpus: {therapy.judged}"
    if therapy.judged.by_position:
        text += f"; along the context, {therapy.judged.positions}"
    harmed = therapy.elsewhere is not None and therapy.elsewhere.change.low > 0
    other = f" {therapy.other[0].upper()}{therapy.other[1:]}." if therapy.other else ""
    return Finding("Better for whom", f"{text}.{other}", "bad" if harmed else "plain")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _by_mass(source: Source, main: Condition) -> Finding | None:
    ours = source.recoveries(main.arm)
    if not ours:
        return None
    text = f"{not_sick_text(ours)} operated heads are not sick by first-token mass."
    sham = next((c.arm for c in source.finals if c.mode == "sham"), main.arm)
    untrained = source.recoveries(sham)
    if untrained and sham != main.arm:
        text += (
            f" That says little: in the sham, where nothing was learnt, "
            f"{not_sick_text(untrained)} pass too. A random head looks healthy by this measure."
        )
    else:
        text += " That alone is no recovery: a head passes the moment it is reinitialised."
    return Finding("By first-token mass", text, "caution")


def _by_function(source: Source, main: Condition) -> Finding | None:
    ours = source.recoveries(main.arm)
    if not ours:
        return None
    if untested := untested_text(ours):
        return Finding("By function", untested, "caution")
    text = (
        f"Alone: {recovered_text(ours)} judged heads are functionally recovered: ill in stock, "
        "not ill now, and ablating them costs held-out loss, more than it did in stock, with 95% "
        "confidence." + _together(main)
    )
    others = [
        f"{arm} {recovered_text(found)}"
        for arm in source.arms()
        if arm != main.arm and (found := source.recoveries(arm))
    ]
    if others:
        text += f" Beside it: {'; '.join(others)}."
    useful = _useful_in_stock(source, main)
    if useful is not None:
        text += (
            f" In stock, {useful} of these heads cost loss when ablated (false discovery rate 5%)."
        )
    # heads that work in a model that reads worse are no success: the loss gives the colour
    change = source.against_stock(main.arm)
    most = 2 * sum(r.functional for r in ours) > sum(r.judged for r in ours)
    tone: Tone = "plain"
    if change is not None and (change.high < 0 or change.low > 0):
        tone = "bad" if change.low > 0 else "good" if most else "plain"
    return Finding("By function", text, tone)


def _together(main: Condition) -> str:
    """What all treated heads are worth at once: single heads carry little of a joint gain."""
    recovery = None if main.evaluation is None else main.evaluation.recovery
    if recovery is None or recovery.joint_now is None:
        return ""
    text = f" Together: losing all treated heads costs {interval(recovery.joint_now)} nats now"
    if recovery.joint_stock is not None and recovery.joint_rise is not None:
        text += f"; in stock: {interval(recovery.joint_stock)}"
        text += f"; the difference is {interval(recovery.joint_rise)}"
    return text + "."


def _roles(source: Source, main: Condition) -> Finding | None:
    """Which role each treated head plays now, and which it played in stock."""
    zones = main.zones
    stock, now = (None if c is None else c.diagnosis for c in (source.stock, main))
    if zones is None or not zones.operated.any() or stock is None or now is None:
        return None
    if main.run is None:  # heads that are out attend as before, and play no role
        return None
    played = roles_played(stock, now, zones.operated)
    if played is None:
        return None
    was, is_now = (_by_role({h: two[at] for h, two in played.items()}) for at in (0, 1))
    total = _count(int(zones.operated.sum()), "treated head")
    text = f"Of {total}, with a role now: {is_now}; in stock: {was}{_counted_on(now)}."
    return Finding("Roles", text + " A role is attention, not proof of use.")


def _by_role(played: dict[str, str]) -> str:
    """`3: induction L4H7, L5H6; local L1H2`."""
    heads: dict[str, list[str]] = {}
    for head, role in played.items():
        heads.setdefault(role, []).append(head)
    known = {role.replace("_", " "): some for role, some in heads.items() if role}
    parts = "; ".join(f"{role} {', '.join(some)}" for role, some in known.items())
    return f"{sum(map(len, known.values()))} ({parts})" if known else "none"


def _useful_in_stock(source: Source, main: Condition) -> int | None:
    if source.stock is None or source.stock.evaluation is None or main.evaluation is None:
        return None
    recovery = main.evaluation.recovery
    costs = source.stock.evaluation.heads.ablation_zero
    heads = recovery.heads if recovery else ()
    return sum(costs[head].is_useful for head in heads if head in costs)


def _loss(source: Source, main: Condition) -> Finding | None:
    change = source.against_stock(main.arm)
    if change is None:
        return None
    losses = source.stock_losses()
    text = f"Held-out loss changed by {interval(change)} nats per token against stock"
    if losses is not None:
        text += f"; perplexity {perplexity_change(change, losses.loss.value)}"
    tone: Tone = "good" if change.high < 0 else "bad" if change.low > 0 else "plain"
    others = [f"on {name} {interval(other)}" for name, other in _elsewhere(source, main)]
    tail = f" Elsewhere: {'; '.join(others)}." if others else ""
    return Finding("Against stock", f"{text}: {_reading(change)}.{tail}", tone)


def _elsewhere(source: Source, main: Condition) -> list[tuple[str, Interval]]:
    """The change of loss on the text sets that the verdict does not rest on."""
    changes = {name: source.against_stock(main.arm, name) for name in main.text_sets}
    return [
        (text_name(name), found)
        for name, found in changes.items()
        if found and name != source.judged_set
    ]


def _reading(change: Interval) -> str:
    if change.high < 0:
        return "better, with 95% confidence"
    return "worse, with 95% confidence" if change.low > 0 else "no difference shown"


def between(source: Source, left: str, right: str) -> Interval | None:
    """Paired loss of one arm minus another on the judged text set."""
    if source.summary is None or source.judged_set is None:
        return None
    pair = source.summary.between_arms.get(f"{left} - {right}", {})
    found = pair.get(source.judged_set)
    return None if found is None else found.interval


def _control_gaps(source: Source, main: Condition) -> list[tuple[str, str, Interval]]:
    """(arm, mode, loss of the main arm minus the control)."""
    found: list[tuple[str, str, Interval]] = []
    for control in source.finals:
        if control.mode in CONTROLS and control.arm not in {arm for arm, *_ in found}:
            gap = between(source, main.arm, control.arm)
            if gap is not None and control.arm != main.arm:
                found.append((control.arm, control.mode, gap))
    return found


def _controls(source: Source, main: Condition) -> list[Finding]:
    rows = []
    for arm, mode, gap in _control_gaps(source, main):
        if gap.high < 0:
            tone: Tone = "good"
            reading = f"{main.arm} did better, with 95% confidence"
        elif gap.low > 0:
            tone, reading = "bad", f"{arm} did better, with 95% confidence"
        else:
            tone, reading = "plain", "no difference shown"
        text = f"{CONTROLS[mode].capitalize()}. Loss of {main.arm} minus {arm}: {interval(gap)}: "
        rows.append(Finding(f"Against {arm}", text + reading + ".", tone))
    return rows


def _side_effects(source: Source, main: Condition) -> Finding | None:
    moved = moved_untouched(source, main)
    was, now = (None if c is None else c.sick for c in (source.stock, main))
    if moved is None or main.zones is None or was is None or now is None:
        return None
    operated = main.zones.operated
    layers = None if main.diagnosis is None else main.diagnosis.model.layers
    harmed = [str(head) for head in heads_where(~was & now & ~operated, layers)]
    healed = heads_where(was & ~now & ~operated, layers)
    text = (
        f"{_count(len(harmed), 'head')} that nobody touched fell ill"
        + (f" ({', '.join(harmed[:6])}{', ...' if len(harmed) > 6 else ''})" if harmed else "")
        + f", {len(healed)} healed untreated"
        f"{'' if main.diagnosis is None else _counted_on(main.diagnosis)}. Of "
        f"{_count(moved[1], 'untouched head')} that can move {moved[0]} changed by more than 0.05, "
        f"on {moved[2]}."
    )
    return Finding("Side effects", text, "bad" if len(harmed) > len(healed) else "plain")


def _gaps(source: Source) -> Finding | None:
    if not source.missing:
        return None
    return Finding(
        "Not finished",
        f"No result yet for {', '.join(source.missing)}; everything here is without them.",
        "caution",
    )


def _headline(source: Source, main: Condition) -> tuple[str, Tone]:
    change = source.against_stock(main.arm)
    if main.run is not None and main.run.outcome == "empty":
        return "Leaving the model alone is best: no repair was shown to be better.", "plain"
    name = "The operation" if main.mode == "surgery" else main.arm.capitalize()
    if change is None:
        own = _own_change(source, main)
        if own is None or own <= 0:
            return _sick_headline(source), "plain"
        place = "on its own validation text; it was not evaluated on held-out text"
        return f"{name} made the model worse {place}.", "bad"
    if source.kind == PRUNED:
        return _kept_promise(source, change)
    if change.low > 0:
        return f"{name} made the model worse on held-out text.", "bad"
    if change.high >= 0:
        return f"{name} made no difference that this held-out text can show.", "plain"
    gaps = _control_gaps(source, main)
    better = [arm for arm, _, gap in gaps if gap.low > 0]
    equal = [arm for arm, _, gap in gaps if gap.low <= 0 <= gap.high]
    if better:
        return (
            f"{name} made the model better, but {_listed(better)} made it better still.",
            "caution",
        )
    if equal:
        return (
            f"The model got better, but so it did without the operation: no difference to "
            f"{_listed(equal)} is shown.",
            "caution",
        )
    if not gaps:
        return f"{name} made the model better; no control says why.", "caution"
    return f"{name} made the model better, and better than {_listed([g[0] for g in gaps])}.", "good"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else ", ".join(names[:-1]) + " and " + names[-1]
