"use strict";
/* One page, no library: state -> render. Text goes in by textContent only, never as markup. */
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const $ = (id) => document.getElementById(id);
  const make = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
  const draw = (tag, attributes, ...children) =>
    fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
  function fill(element, attributes, children) {
    for (const [name, value] of Object.entries(attributes || {}))
      if (name === "class") element.setAttribute("class", value);
      else if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
      else if (value !== null && value !== undefined) element.setAttribute(name, value);
    element.append(...children.filter((child) => child !== null && child !== undefined));
    return element;
  }

  /* theme, sorting and downloads work on every page, with or without heads */
  const dark = matchMedia("(prefers-color-scheme: dark)");
  $("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const now = root.dataset.theme || (dark.matches ? "dark" : "light");
    root.dataset.theme = now === "dark" ? "light" : "dark";
  });

  for (const table of document.querySelectorAll("table.sheet"))
    table.querySelectorAll("thead th").forEach((th, index) =>
      th.querySelector("button").addEventListener("click", () => sortTable(table, th, index)));

  function sortTable(table, th, index) {
    const way = th.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    table.querySelectorAll("th").forEach((other) => other.removeAttribute("aria-sort"));
    th.setAttribute("aria-sort", way === 1 ? "ascending" : "descending");
    const value = (row) => {
      const cell = row.cells[index];
      return cell.dataset.sort !== undefined ? Number(cell.dataset.sort) : cell.textContent.trim();
    };
    const rows = [...table.tBodies[0].rows].map((row) => [value(row), row]);
    rows.sort(([a], [b]) => {
      if (a === "" || b === "") return (a === "") - (b === ""); /* empty cells stay last */
      if (typeof a === "number" && typeof b === "number") return way * (a - b);
      return way * String(a).localeCompare(String(b), "en", { numeric: true });
    });
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  function save(name, type, text) {
    const url = URL.createObjectURL(new Blob([text], { type }));
    make("a", { href: url, download: name }).click();
    setTimeout(() => URL.revokeObjectURL(url), 1000);
  }

  document.addEventListener("click", (event) => {
    const button = event.target.closest("[data-download]");
    if (!button) return;
    const kind = button.dataset.download;
    if (kind === "table") save(button.dataset.key + ".csv", "text/csv", data.tables[button.dataset.key]);
    if (kind === "data-json") save("headwise-report.json", "application/json", JSON.stringify(data));
    if (kind === "heads-csv") save("headwise-heads.csv", "text/csv", headsCsv());
  });

  function headsCsv() {
    const names = data.measures.map((measure) => measure.key);
    const rows = [["condition", "layer", "head", "class", ...names, "ablation_low", "ablation_high"].join(",")];
    for (const condition of data.conditions)
      for (let layer = 0; layer < data.layers; layer++)
        for (let head = 0; head < data.heads; head++) {
          const cost = condition.ablation ? condition.ablation[layer][head] : null;
          const cells = names.map((name) => valueOf(condition, name, layer, head));
          rows.push([condition.key, layer, head, data.classes[condition.classes[layer][head]], ...cells,
            cost ? cost[1] : "", cost ? cost[2] : ""].map((cell) => cell === null ? "" : cell).join(","));
        }
    return rows.join("\n") + "\n";
  }

  function valueOf(condition, name, layer, head, step) {
    if (name === "ablation") {
      const cost = condition.ablation && condition.ablation[layer][head];
      return cost ? cost[0] : null;
    }
    if (name === "change") {
      if (data.stock < 0) return null;
      const mass = valueOf(condition, "first_token_mass", layer, head, step);
      const paired = condition.before && step !== undefined && step < condition.steps.length;
      const start = (paired ? condition.before : data.conditions[data.stock].maps.first_token_mass)[layer][head];
      return mass === null ? null : mass - start;
    }
    if (step !== undefined && step < condition.steps.length)
      return (condition.film && condition.film[name] ? condition.film[name] : condition.stepMaps)[step][layer][head];
    const map = condition.maps[name];
    return map ? map[layer][head] : null;
  }

  if (!data.conditions.length || !$("grid")) return;

  const state = { measure: 0, condition: 0, step: 0, layer: 0, head: 0 };
  const current = () => data.conditions[state.condition];
  const measure = () => data.measures[state.measure];
  const filmed = (condition, key) => ["first_token_mass", "change"].includes(key) || Boolean(condition.film && condition.film[key]);
  const stepped = () => filmed(current(), measure().key) && current().steps.length > 0;
  const stepIndex = () => (stepped() ? state.step : undefined);
  const name = (layer, head) => "L" + data.numbers[layer] + "H" + head;
  const known = (value) => value !== null && value !== undefined && !Number.isNaN(value);
  function number(value, digits) {
    if (!known(value)) return "–";
    if (value !== 0 && Math.abs(value) < 0.001) return value.toExponential(1);
    return value.toFixed(digits);
  }

  /* colours: cividis for amounts, blue-white-red for changes; both safe for colour-blind readers */
  const RAMPS = {
    amount: ["#00224e", "#123570", "#3b496c", "#575d6d", "#707173", "#8a8678", "#a59c74", "#c3b369", "#e1cc55", "#fee838"],
    change: ["#053061", "#2166ac", "#4393c3", "#92c5de", "#d1e5f0", "#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f"],
  };
  const parsed = {};
  for (const [key, ramp] of Object.entries(RAMPS))
    parsed[key] = ramp.map((hex) => [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16)));
  function colour(ramp, share) {
    const stops = parsed[ramp];
    const place = Math.min(Math.max(share, 0), 1) * (stops.length - 1);
    const low = Math.min(Math.floor(place), stops.length - 2);
    return stops[low].map((value, i) => Math.round(value + (stops[low + 1][i] - value) * (place - low)));
  }
  const css = (rgb) => "rgb(" + rgb.join(",") + ")";
  const inkOn = (rgb) => (0.299 * rgb[0] + 0.587 * rgb[1] + 0.114 * rgb[2] > 140 ? "#111" : "#fff");

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
    return colour(measure().diverging ? "change" : "amount", (value - low) / (high - low));
  }

  /* controls */
  const arms = [...new Set(data.conditions.map((condition) => condition.armLabel))];
  for (const [i, one] of data.measures.entries()) $("measure").append(make("option", { value: i }, one.label));
  for (const arm of arms) $("arm").append(make("option", { value: arm }, arm));
  $("measure").addEventListener("change", (event) => { state.measure = Number(event.target.value); setSlider(true); render(); });
  $("arm").addEventListener("change", () => { setSeeds(); choose(Number($("seed").value)); });
  $("seed").addEventListener("change", (event) => choose(Number(event.target.value)));
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
    root.style.setProperty("--cell", data.layers > 20 ? "1.1rem" : data.layers > 12 ? "1.5rem" : "2.2rem");
    for (let layer = data.layers - 1; layer >= 0; layer--) { /* layer 0 at the bottom, as in the paper */
      axes.rows[layer] = make("span", { class: "axis y", role: "rowheader" }, "L" + data.numbers[layer]);
      const row = make("div", { role: "row" }, axes.rows[layer]);
      cells[layer] = [];
      for (let head = 0; head < data.heads; head++) {
        const cell = make("button", { type: "button", role: "gridcell", tabindex: "-1", "data-head": name(layer, head) });
        cell.addEventListener("click", () => select(layer, head));
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
  function select(layer, head) { state.layer = layer; state.head = head; render(); }

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
        cell.style.background = rgb ? css(rgb) : "repeating-linear-gradient(45deg, #999 0 2px, transparent 2px 6px)";
        cell.style.color = rgb ? inkOn(rgb) : "";
        cell.textContent = GLYPHS[label];
        cell.className = current().operated[layer][head] ? "operated" : current().watched[layer][head] ? "watched" : "";
        cell.setAttribute("aria-selected", here ? "true" : "false");
        cell.tabIndex = here ? 0 : -1;
        cell.setAttribute("aria-label", name(layer, head) + ", " + label.replace("_", " ") + ", " + measure().label + " " + number(value, measure().digits));
      }
    axes.rows.forEach((axis, layer) => axis.classList.toggle("on", layer === state.layer));
    axes.columns.forEach((axis, head) => axis.classList.toggle("on", head === state.head));
    const when = kind === "here" && current().steps.length ? ", " + $("step-text").textContent : "";
    $(kind === "stock" ? "title-stock" : "title-here").replaceChildren(condition.label + when + " ", make("span", { class: "dim" }, sick + " sick"));
  }
  function paintLegend() {
    const [low, high] = limits();
    const ramp = RAMPS[measure().diverging ? "change" : "amount"];
    const key = (text, label, style) => make("span", {}, make("span", { class: "key", style }, text), label);
    $("legend").replaceChildren(
      make("span", {}, number(low, measure().digits), make("span", { class: "ramp", style: "background:linear-gradient(to right," + ramp.join(",") + ")" }), number(high, measure().digits) + " " + measure().unit),
      key("s", "sink", ""), key("D", "dead", ""), key("e", "low entropy", ""),
      key("", "operated on", "box-shadow:inset 0 0 0 2px currentColor"));
    $("measure-help").textContent = measure().help
      + (stepped() || !current().steps.length ? "" : " Known for the final state only, so the slider rests.");
    const steps = current().steps;
    $("step-text").textContent = !steps.length ? "final (no steps)" : !stepped() ? "final"
      : state.step < steps.length ? "step " + steps[state.step] : "final, as judged";
  }

  function showTip(event, kind, layer, head) {
    const condition = shownIn(kind), step = stepIn(kind);
    const lines = [name(layer, head) + " · " + classAt(condition, layer, head, step).replace("_", " ")];
    for (const one of data.measures) {
      const value = valueOf(condition, one.key, layer, head, filmed(condition, one.key) ? step : undefined);
      if (known(value)) lines.push(one.label + " " + number(value, one.digits));
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

  /* the selected head */
  const SIZE = { width: 360, height: 130, left: 34, right: 8, top: 8, bottom: 22 };
  function frame(xs, low, high, xLabel, xText) {
    const { width, height, left, right, top, bottom } = SIZE;
    const x = (i) => left + (xs.length < 2 ? 0.5 : i / (xs.length - 1)) * (width - left - right);
    const y = (v) => top + (1 - (v - low) / (high - low || 1)) * (height - top - bottom);
    const svg = draw("svg", { viewBox: "0 0 " + width + " " + height, role: "img" });
    for (const v of [low, (low + high) / 2, high])
      svg.append(draw("line", { class: "ax", x1: left, x2: width - right, y1: y(v), y2: y(v) }),
        draw("text", { x: left - 5, y: y(v) + 3, "text-anchor": "end" }, String(Number(v.toPrecision(2)))));
    const every = Math.max(1, Math.ceil(xs.length / 7));
    const anchor = (i) => (i > 0 && i === xs.length - 1 ? "end" : "middle"); /* the last label must not leave the panel */
    xs.forEach((v, i) => { if (i % every === 0) svg.append(draw("text", { x: x(i) + (anchor(i) === "end" ? right : 0), y: height - 8, "text-anchor": anchor(i) }, xText ? xText(v) : String(v))); });
    svg.setAttribute("aria-label", xLabel);
    return { svg, x, y };
  }
  const pathOf = (values, x, y) => values.map((v, i) => (i ? "L" : "M") + x(i).toFixed(1) + " " + y(v).toFixed(1)).join("");

  function profileChart(layer, head) {
    if (!data.buckets.length) return null;
    const { svg, x, y } = frame(data.buckets, 0, 1, "first-token mass by query position");
    const stock = data.stock >= 0 ? data.conditions[data.stock] : null;
    svg.append(draw("line", { class: "ref", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: y(data.thresholds.sink), y2: y(data.thresholds.sink) }));
    if (stock && stock.profile && stock !== current()) svg.append(draw("path", { class: "old", d: pathOf(stock.profile[layer][head], x, y) }));
    if (!current().profile) return null;
    svg.append(draw("path", { class: "cur", d: pathOf(current().profile[layer][head], x, y) }));
    return section("Profile: first-token mass by query position", svg, stock && stock !== current() ? "blue: this condition, grey: stock" : "");
  }
  function pathChart(layer, head) {
    const head_ = head;
    const runs = data.conditions.filter((c) => c.steps.length > 1 && c.seed === (current().seed ?? c.seed));
    const main = current().steps.length > 1 ? current() : runs[0];
    if (!main) return null;
    const last = Math.max(...runs.map((c) => c.steps[c.steps.length - 1]), 1);
    const { svg, y } = frame([0, Math.round(last / 4), Math.round(last / 2), Math.round(3 * last / 4), last], 0, 1, "first-token mass over training steps");
    const x = (step) => SIZE.left + (step / last) * (SIZE.width - SIZE.left - SIZE.right);
    svg.append(draw("line", { class: "ref", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: y(data.thresholds.sink), y2: y(data.thresholds.sink) }));
    for (const c of [...runs.filter((c) => c !== current()), ...(current().steps.length > 1 ? [current()] : [])]) {
      const values = c.stepMaps.map((map) => map[layer][head]);
      const path = draw("path", { class: c === current() ? "cur" : "oth", d: pathOf(values, (i) => x(c.steps[i]), y) });
      path.append(draw("title", {}, c.label));
      svg.append(path);
    }
    for (const [step, head, kind] of main.marks || []) {
      const own = head === name(layer, head_);
      const mark = draw("line", { class: own ? "alarm on" : "alarm", x1: x(step), x2: x(step), y1: SIZE.top, y2: SIZE.height - SIZE.bottom });
      mark.append(draw("title", {}, "ALARM " + kind + ": " + head + " at step " + step));
      svg.append(mark);
    }
    if (stepped() && state.step < current().steps.length) {
      const v = current().stepMaps[state.step][layer][head];
      svg.append(draw("circle", { cx: x(current().steps[state.step]), cy: y(v), r: 4, fill: "var(--mark)" }));
    }
    return section("Trajectory over steps", svg, main.film ? "red: alarms, thick for this head; read on the probe texts" : "blue: this condition, grey: the others; read on validation blocks");
  }
  function costChart(layer, head) {
    const rows = data.conditions.filter((c) => c.ablation && c.ablation[layer][head]);
    if (!rows.length) return null;
    const all = rows.flatMap((c) => c.ablation[layer][head]);
    const low = Math.min(0, ...all), high = Math.max(0, ...all, low + 1e-9), height = rows.length * 17 + 24;
    const left = 128, right = 12, width = SIZE.width;
    const x = (v) => left + ((v - low) / (high - low || 1)) * (width - left - right);
    const svg = draw("svg", { viewBox: "0 0 " + width + " " + height, role: "img", "aria-label": "ablation cost in every condition" });
    svg.append(draw("line", { class: "ref", x1: x(0), x2: x(0), y1: 2, y2: height - 18 }));
    rows.forEach((c, i) => {
      const [v, a, b] = c.ablation[layer][head], y = 11 + i * 17, on = c === current();
      const tone = a > 0 ? "var(--good)" : b < 0 ? "var(--bad)" : "var(--dim)";
      const label = draw("text", { x: left - 8, y: y + 3, "text-anchor": "end", class: on ? "on-text" : "" }, c.label.length > 22 ? c.label.slice(0, 21) + "…" : c.label);
      const mark = draw("g", {}, draw("line", { x1: x(a), x2: x(b), y1: y, y2: y, stroke: tone, "stroke-width": 2.5 }), draw("circle", { cx: x(v), cy: y, r: on ? 4.5 : 3.5, fill: tone }));
      mark.append(draw("title", {}, c.label + ": " + number(v, 5) + " (" + number(a, 5) + " to " + number(b, 5) + ")"));
      svg.append(label, mark);
    });
    svg.append(draw("text", { x: x(low), y: height - 3 }, number(low, 4)), draw("text", { x: width - right, y: height - 3, "text-anchor": "end" }, number(high, 4)));
    return section("Ablation cost in every condition", svg, "rise of held-out loss without this head, 95% interval; green is above zero");
  }
  function neighbourChart(layer, head) {
    const condition = current(), step = stepIndex(), one = measure(), [low, high] = limits();
    const parts = [["same layer, L" + data.numbers[layer], data.heads, (i) => [layer, i], head, "H"], ["same column, H" + head, data.layers, (i) => [i, head], layer, "L"]];
    const height = 54, width = SIZE.width, box = make("div", {});
    for (const [title, count, place, at, letter] of parts) {
      const svg = draw("svg", { viewBox: "0 0 " + width + " " + (height + 14), role: "img", "aria-label": title });
      const zero = height * (1 - (0 - low) / (high - low)), wide = width / count;
      for (let i = 0; i < count; i++) {
        const value = valueOf(condition, one.key, ...place(i), step);
        if (!known(value)) continue;
        const top = height * (1 - (Math.min(Math.max(value, low), high) - low) / (high - low));
        const bar = draw("rect", { class: i === at ? "bar on" : "bar", x: i * wide + 1, width: Math.max(wide - 2, 1), y: Math.min(top, zero), height: Math.max(Math.abs(zero - top), 1) });
        bar.append(draw("title", {}, name(...place(i)) + " " + number(value, one.digits)));
        bar.addEventListener("click", () => select(...place(i)));
        svg.append(bar);
        if (count <= 16 || i % 4 === 0) svg.append(draw("text", { x: (i + 0.5) * wide, y: height + 11, "text-anchor": "middle", class: i === at ? "on-text" : "" }, letter + i));
      }
      box.append(make("p", { class: "dim small", style: "margin:.3rem 0 .1rem" }, title), svg);
    }
    return section("Neighbours: " + one.label, box, "");
  }
  function pooledChart(layer, head) {
    const pooled = current().pooled && current().pooled[layer] && current().pooled[layer][head];
    if (!pooled || !pooled.length) return null;
    const size = pooled.length, canvas = make("canvas", { width: size, height: size, style: "width:min(100%,14rem);image-rendering:pixelated" });
    const context = canvas.getContext("2d");
    pooled.forEach((row, q) => row.forEach((v, k) => { context.fillStyle = css(colour("amount", Math.sqrt(v))); context.fillRect(k, q, 1, 1); }));
    return section("Pooled attention map", canvas, "log2 buckets of positions: queries down, keys across; square-root colour scale");
  }
  function section(title, body, note) {
    return make("div", {}, make("h4", {}, title), body, note ? make("p", { class: "dim small", style: "margin:.1rem 0 0" }, note) : null);
  }
  function paintDetail() {
    const { layer, head } = state, condition = current(), stock = data.stock >= 0 ? data.conditions[data.stock] : null;
    const body = make("tbody", {});
    for (const one of data.measures) {
      if (one.key === "change") continue;
      const now = valueOf(condition, one.key, layer, head), before = stock ? valueOf(stock, one.key, layer, head) : null;
      if (!known(now) && !known(before)) continue;
      const change = known(now) && known(before) && stock !== condition ? now - before : null;
      body.append(make("tr", {}, make("td", {}, one.label), stock && stock !== condition ? make("td", {}, number(before, one.digits)) : null,
        make("td", {}, number(now, one.digits)), stock && stock !== condition ? make("td", {}, known(change) ? (change >= 0 ? "+" : "") + number(change, one.digits) : "–") : null));
    }
    const both = stock && stock !== condition;
    const header = make("tr", {}, make("th", { scope: "col" }, ""), both ? make("th", { scope: "col" }, "stock") : null, make("th", { scope: "col" }, both ? "here" : "value"), both ? make("th", { scope: "col" }, "change") : null);
    const role = condition.operated[layer][head] ? "operated on" : condition.watched[layer][head] ? "watched" : condition.mode === "stock" ? "" : "untouched";
    const was = stock ? data.classes[stock.classes[layer][head]].replace("_", " ") : "", is = data.classes[condition.classes[layer][head]].replace("_", " ");
    $("detail").replaceChildren(
      make("h3", { id: "detail-name" }, name(layer, head)),
      make("p", { class: "dim small", style: "margin:0 0 .6rem" }, condition.label + " · " + (both && was !== is ? was + " → " + is : is) + (role ? " · " + role : "")),
      make("table", {}, make("thead", {}, header), body),
      ...[profileChart, pathChart, costChart, neighbourChart, pooledChart].map((chart) => chart(layer, head)).filter(Boolean));
  }

  /* small multiples: one canvas a condition, a spot on the selected head */
  const frames = [];
  function buildMultiples() {
    data.conditions.forEach((condition, index) => {
      const canvas = make("canvas", { width: data.heads, height: data.layers, style: "aspect-ratio:" + Math.max(data.heads / data.layers, 0.8) });
      const spot = make("span", { class: "spot" });
      const note = make("span", {});
      const figure = make("figure", {}, make("div", { class: "frame" }, canvas, spot),
        make("figcaption", {}, make("button", { type: "button", onclick: () => choose(index) }, condition.label, note)));
      canvas.addEventListener("click", (event) => {
        const box = canvas.getBoundingClientRect();
        state.head = Math.min(Math.floor(((event.clientX - box.left) / box.width) * data.heads), data.heads - 1);
        state.layer = data.layers - 1 - Math.min(Math.floor(((event.clientY - box.top) / box.height) * data.layers), data.layers - 1);
        choose(index);
      });
      $("multiples").append(figure);
      frames.push({ figure, canvas, spot, note });
    });
  }
  function paintMultiples() {
    const range = limits(), one = measure();
    data.conditions.forEach((condition, index) => {
      const { figure, canvas, spot, note } = frames[index], context = canvas.getContext("2d");
      context.clearRect(0, 0, data.heads, data.layers);
      for (let layer = 0; layer < data.layers; layer++)
        for (let head = 0; head < data.heads; head++) {
          const rgb = shade(valueOf(condition, one.key, layer, head), range);
          context.fillStyle = rgb ? css(rgb) : "rgba(128,128,128,.25)";
          context.fillRect(head, data.layers - 1 - layer, 1, 1);
        }
      spot.style.cssText = "left:" + (100 * state.head) / data.heads + "%;width:" + 100 / data.heads + "%;top:" + (100 * (data.layers - 1 - state.layer)) / data.layers + "%;height:" + 100 / data.layers + "%";
      figure.className = index === state.condition ? "now" : "";
      note.textContent = name(state.layer, state.head) + " " + number(valueOf(condition, one.key, state.layer, state.head), one.digits);
    });
    $("multiples-note").textContent = one.label + ", final state; " + name(state.layer, state.head) + " marked";
  }

  function render() { paintLegend(); paintGrids(); paintDetail(); paintMultiples(); }
  if (data.stock >= 0) buildGrid($("grid-stock"), "stock");
  buildGrid($("grid"), "here");
  buildMultiples();
  document.querySelector(".multi-wrap").hidden = data.conditions.length < 2;
  [state.layer, state.head] = data.start;
  choose(data.open);
})();
