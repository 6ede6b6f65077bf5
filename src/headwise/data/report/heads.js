/* The head grids: measures, conditions, checkpoints, and which head is selected. */
if (!data.conditions.length || !$("grid")) return;

const state = { measure: 0, condition: 0, step: 0, layer: 0, head: 0 };
const current = () => data.conditions[state.condition];
const measure = () => data.measures[state.measure];
const filmed = (condition, key) => ["first_token_mass", "change"].includes(key) || Boolean(condition.film && condition.film[key]);
const stepped = () => filmed(current(), measure().key) && current().steps.length > 0;
const stepIndex = () => (stepped() ? state.step : undefined);
const atCheckpoint = () => stepped() && state.step < current().steps.length;
const name = (layer, head) => "L" + data.numbers[layer] + "H" + head;
const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
function number(value, digits) {
  if (!known(value)) return "–";
  if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
  return value.toFixed(digits);
}

/* colours: cividis for amounts, blue-white-red for changes, and for first-token mass a scale that
   turns from blue to orange at the threshold, as in the figures; all safe for colour-blind readers */
const RAMPS = {
  amount: ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"],
  change: ["#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"],
  below: ["#08306b", "#d3e4f3"],
  above: ["#fdd9b4", "#8c2d04"],
};
const turns = () => (measure().key === "first_token_mass" ? data.thresholds.sink : null);
const hex = (text) => [1, 3, 5].map((at) => parseInt(text.slice(at, at + 2), 16));
const parsed = {};
for (const [key, ramp] of Object.entries(RAMPS))
  parsed[key] = ramp.map(hex);
function colour(ramp, share) {
  const stops = parsed[ramp];
  const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
  const low = Math.min(Math.floor(place), stops.length - 2);
  return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (place - low)));
}
const css = (rgb) => "rgb(" + rgb.join(",") + ")";
const inkOn = (rgb) => (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140 ? "#111" : "#fff");

function words(one, value) { /* a value of a measure as people read it */
  return one.names && known(value) ? one.names[value] : number(value, one.digits);
}

function limits() {
  const one = measure();
  if (one.limits) return one.limits;
  let low = Infinity, high = -Infinity;
  for (const condition of data.conditions)
    for (let layer = 0; layer < data.layers; layer++)
      for (let head = 0; head < data.heads; head++) {
        const value = valueOf(condition, one.key, layer, head);
        if (known(value)) { low = Math.min(low, value); high = Math.max(high, value); }
      }
  if (one.diverging) { const reach = Math.max(Math.abs(low), Math.abs(high), 1e-9); return [-reach, reach]; }
  return [Math.min(low, 0), high > low ? high : low + 1e-9];
}
function shade(value, [low, high]) {
  if (!known(value)) return null;
  if (measure().names) return hex(measure().colours[value]);
  const cut = turns();
  if (cut !== null) return value > cut ? colour("above", (value - cut) / (1 - cut)) : colour("below", value / cut);
  return colour(measure().diverging ? "change" : "amount", (value - low) / (high - low));
}

/* controls */
const arms = [...new Set(data.conditions.map((condition) => condition.armLabel))];
for (const [i, one] of data.measures.entries()) $("measure").append(make("option", { value: i }, one.label));
for (const arm of arms) $("arm").append(make("option", { value: arm }, arm));
$("measure").addEventListener("change", (event) => { state.measure = Number(event.target.value); setSlider(true); render(); });
$("arm").addEventListener("change", () => { setSeeds(); choose(Number($("seed").value)); });
$("seed").addEventListener("change", (event) => choose(Number(event.target.value)));
$("step").closest("label").hidden = !data.conditions.some((c) => c.steps.length); /* a bare diagnosis has one state */
$("step").addEventListener("input", (event) => { state.step = Number(event.target.value); render(); });
$("controls").addEventListener("submit", (event) => event.preventDefault());

function setSeeds() {
  const wanted = current().seed;
  const select = $("seed");
  select.replaceChildren();
  data.conditions.forEach((condition, i) => {
    if (condition.armLabel !== $("arm").value) return;
    const text = condition.seed === null ? "–" : String(condition.seed);
    select.append(make("option", { value: i, selected: condition.seed === wanted ? "" : null }, text));
  });
  select.disabled = select.options.length < 2;
}
function choose(index) {
  state.condition = index;
  $("arm").value = current().armLabel;
  setSeeds();
  $("seed").value = String(index);
  setSlider(true);
  render();
}
function setSlider(toEnd) {
  const slider = $("step");
  slider.max = String(current().steps.length);
  if (toEnd) state.step = current().steps.length;
  slider.value = String(state.step);
  slider.disabled = !stepped();
}

/* two grids: stock, and the chosen condition at the chosen checkpoint */
const grids = [];
function buildGrid(root, kind) {
  const cells = [], axes = { rows: [], columns: [] };
  root.style.gridTemplateColumns = "1.9rem repeat(" + data.heads + ", minmax(0, 1fr))";
  root.style.setProperty("--layers", data.layers);
  root.style.setProperty("--cell", data.layers > 20 ? "1.1rem" : data.layers > 12 ? "1.5rem" : "2.2rem");
  for (let layer = data.layers - 1; layer >= 0; layer--) { /* layer 0 at the bottom, as in the paper */
    const slides = data.sliding.includes(layer);
    axes.rows[layer] = make("span", { class: slides ? "axis y slides" : "axis y", role: "rowheader", title: slides ? "attention slides over a window" : "" }, "L" + data.numbers[layer]);
    const row = make("div", { role: "row" }, axes.rows[layer]);
    cells[layer] = [];
    for (let head = 0; head < data.heads; head++) {
      const cell = make("button", { type: "button", role: "gridcell", tabindex: "-1", "data-head": name(layer, head) });
      cell.addEventListener("click", () => { select(layer, head); openBelow(kind); });
      cell.addEventListener("pointerenter", (event) => showTip(event, kind, layer, head));
      cell.addEventListener("pointermove", moveTip);
      cell.addEventListener("pointerleave", hideTip);
      row.append(cell);
      cells[layer][head] = cell;
    }
    root.append(row);
  }
  const every = data.heads > 20 ? 4 : data.heads > 8 ? 2 : 1;
  const foot = make("div", { role: "row" }, make("span", { class: "axis", role: "columnheader" }));
  for (let head = 0; head < data.heads; head++) {
    axes.columns[head] = make("span", { class: "axis", role: "columnheader" }, head % every ? "" : "H" + head);
    foot.append(axes.columns[head]);
  }
  root.append(foot);
  root.addEventListener("keydown", (event) => onKey(event, cells));
  grids.push({ root, cells, axes, kind });
}
const shownIn = (kind) => (kind === "stock" ? data.conditions[data.stock] : current());
const stepIn = (kind) => (kind === "stock" ? undefined : stepIndex());
function onKey(event, cells) {
  const move = { ArrowUp: [1, 0], ArrowDown: [-1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
  if (!move) return;
  event.preventDefault();
  select(Math.min(Math.max(state.layer + move[0], 0), data.layers - 1),
    Math.min(Math.max(state.head + move[1], 0), data.heads - 1));
  cells[state.layer][state.head].focus();
}
function select(layer, head) {
  [state.layer, state.head] = [layer, head];
  history.replaceState(null, "", "#" + name(layer, head)); /* the address of this head */
  render();
}
function readAddress() {
  const found = /^#L(\d+)H(\d+)$/.exec(location.hash);
  const layer = found ? data.numbers.indexOf(Number(found[1])) : -1;
  if (layer < 0 || Number(found[2]) >= data.heads) return false;
  [state.layer, state.head] = [layer, Number(found[2])];
  return true;
}

const HATCH = "repeating-linear-gradient(45deg, #999 0 2px, transparent 2px 6px)";
const GLYPHS = { healthy: "", low_entropy: "e", sink: "s", dead: "D" };
function classAt(condition, layer, head, step) {
  if (step === undefined || step >= condition.steps.length) return data.classes[condition.classes[layer][head]];
  const mass = condition.stepMaps[step][layer][head]; /* a step knows the mass only, not the entropy */
  return mass > data.thresholds.dead ? "dead" : mass > data.thresholds.sink ? "sink" : "healthy";
}
function paintGrids() {
  const alone = data.stock < 0 || current() === data.conditions[data.stock];
  $("pair").classList.toggle("alone", alone);
  for (const grid of grids) if (grid.kind === "here" || !alone) paintGrid(grid);
}
function paintGrid({ cells, axes, kind }) {
  const range = limits(), condition = shownIn(kind), step = stepIn(kind);
  let sick = 0;
  for (let layer = 0; layer < data.layers; layer++)
    for (let head = 0; head < data.heads; head++) {
      const cell = cells[layer][head];
      const value = valueOf(condition, measure().key, layer, head, step);
      const rgb = shade(value, range);
      const label = classAt(condition, layer, head, step);
      const here = layer === state.layer && head === state.head;
      sick += label === "sink" || label === "dead";
      cell.style.background = rgb ? css(rgb) : HATCH;
      cell.style.color = rgb ? inkOn(rgb) : "";
      cell.textContent = !measure().names ? GLYPHS[label] : rgb ? measure().letters[value] : "";
      cell.className = current().operated[layer][head] ? "operated" : current().watched[layer][head] ? "watched" : "";
      cell.setAttribute("aria-selected", here ? "true" : "false");
      cell.tabIndex = here ? 0 : -1;
      cell.setAttribute("aria-label", name(layer, head) + ", " + label.replace("_", " ") + ", " + measure().label + " " + words(measure(), value));
    }
  axes.rows.forEach((axis, layer) => axis.classList.toggle("on", layer === state.layer));
  axes.columns.forEach((axis, head) => axis.classList.toggle("on", head === state.head));
  const when = kind === "here" && current().steps.length ? ", " + $("step-text").textContent.replace(", as judged", "") : "";
  $(kind === "stock" ? "title-stock" : "title-here").replaceChildren(condition.label + when + " ", make("span", { class: "dim" }, sick + " sick"));
}
function hatched() {
  for (const grid of grids.filter(({ root }) => root.offsetParent))
    for (let layer = 0; layer < data.layers; layer++)
      for (let head = 0; head < data.heads; head++)
        if (!known(valueOf(shownIn(grid.kind), measure().key, layer, head, stepIn(grid.kind)))) return true;
  return false;
}
function paintLegend() {
  const [low, high] = limits();
  const cut = turns(), at = " " + 100 * cut + "%";
  const ramp = cut !== null ? [RAMPS.below[0] + " 0%", RAMPS.below[1] + at, RAMPS.above[0] + at, RAMPS.above[1] + " 100%"]
    : RAMPS[measure().diverging ? "change" : "amount"];
  const key = (text, label, style) => make("span", {}, make("span", { class: "key", style }, text), label);
  const scale = measure().names
    ? measure().names.map((label, i) => key(measure().letters[i], label, "color:#111;background:" + measure().colours[i]))
    : [make("span", {}, number(low, measure().digits), make("span", { class: "ramp", style: "background:linear-gradient(to right," + ramp.join(",") + ")" }), number(high, measure().digits) + " " + measure().unit),
      key("s", "sink", ""), key("D", "dead", ""), key("e", "low entropy", "")];
  const some = (map) => map.some((row) => row.some(Boolean));
  $("legend").replaceChildren(...scale,
    ...(hatched() ? [key("", measure().names ? "not judged" : "not measured", "background:" + HATCH)] : []),
    ...(some(current().operated) ? [key("", "operated on", "box-shadow:inset 0 0 0 2px currentColor")] : []),
    ...(some(current().watched) ? [key("", "watched", "box-shadow:inset 0 0 0 1px currentColor")] : []));
  $("measure-help").textContent = measure().help
    + (stepped() || !current().steps.length ? "" : " Known for the final state only, so the slider rests.");
}
function paintStep() {
  const steps = current().steps;
  $("step-text").textContent = !steps.length ? "final (no steps)" : !stepped() ? "final"
    : state.step < steps.length ? "step " + steps[state.step] : "final, as judged";
}

function showTip(event, kind, layer, head) {
  if (event.pointerType === "touch") return; /* the panel opens below instead */
  const condition = shownIn(kind), step = stepIn(kind);
  const lines = [name(layer, head) + " · " + classAt(condition, layer, head, step).replace("_", " ")];
  for (const one of data.measures) {
    const value = valueOf(condition, one.key, layer, head, step);
    if (known(value)) lines.push(one.label + " " + words(one, value));
  }
  $("tip").textContent = lines.join("\n");
  $("tip").hidden = false;
  moveTip(event);
}
function moveTip(event) {
  const tip = $("tip"), box = tip.getBoundingClientRect();
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - box.width - 6)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6)) + "px";
}
function hideTip() { $("tip").hidden = true; }
