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
  return section("Profile: first-token mass by query position", svg, (stock && stock !== current() ? "blue: this condition, grey: stock" : "") + lateNote());
}
function pathChart(layer, head) {
  const runs = data.conditions.filter((c) => c.steps.length > 1 && c.seed === (current().seed ?? c.seed));
  const main = current().steps.length > 1 ? current() : runs[0];
  if (!main) return null;
  const last = Math.max(...runs.map((c) => c.steps[c.steps.length - 1]), 1);
  const { svg, y } = frame(last < 4 ? [...Array(last + 1).keys()] : [0, 1, 2, 3, 4].map((i) => Math.round((i * last) / 4)), 0, 1, "first-token mass over training steps");
  const x = (step) => SIZE.left + (step / last) * (SIZE.width - SIZE.left - SIZE.right);
  svg.append(draw("line", { class: "ref", x1: SIZE.left, x2: SIZE.width - SIZE.right, y1: y(data.thresholds.sink), y2: y(data.thresholds.sink) }));
  for (const c of [...runs.filter((c) => c !== current()), ...(current().steps.length > 1 ? [current()] : [])]) {
    const values = c.stepMaps.map((map) => map[layer][head]);
    const path = draw("path", { class: c === current() ? "cur" : "oth", d: pathOf(values, (i) => x(c.steps[i]), y) });
    path.append(draw("title", {}, c.label));
    svg.append(path);
  }
  for (const [step, marked, kind] of main.marks || []) {
    const mark = draw("line", { class: marked === name(layer, head) ? "alarm on" : "alarm", x1: x(step), x2: x(step), y1: SIZE.top, y2: SIZE.height - SIZE.bottom });
    mark.append(draw("title", {}, "ALARM " + kind + ": " + marked + " at step " + step));
    svg.append(mark);
  }
  if (atCheckpoint()) {
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
  if (measure().names) return null; /* classes have no height */
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
      bar.append(draw("title", {}, name(...place(i)) + " " + words(one, value)));
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
  return section("Pooled attention map", canvas, "log2 buckets of positions: queries down, keys across; square-root colour scale" + lateNote());
}
function wakingText(layer, head) {
  const waking = current().waking, own = waking && waking.heads[name(layer, head)];
  if (!own) return null;
  const percent = (g) => Math.round(100 * g) + "%";
  const kinds = Object.entries(own.kinds).sort((a, b) => b[1] - a[1]).map(([kind, g]) => kind + " " + percent(g)).join(", ");
  const tokens = own.tokens.map(([token, g, count]) => JSON.stringify(token) + " (" + percent(g) + ", " + count + " times)").join(", ");
  const most = Math.max(...own.text), small = { class: "small", style: "margin:.2rem 0" };
  const says = "A head is awake by the share of its attention that is not on the first token. ";
  if (Math.max(most, own.base) < 0.005) return section("What wakes it", make("p", small, says + "Nothing wakes this one: 0% at every kind of token of these texts."));
  const text = make("p", { class: "waking" });
  waking.tokens.forEach((token, i) => {
    const g = own.text[i] || 0;
    text.append(make("span", { style: "background:rgba(213,94,0," + (0.85 * g / Math.max(most, 0.01)).toFixed(2) + ")", title: percent(g) + " awake" }, token.replace(/\n/g, "\u21b5\n")));
  });
  const body = make("div", {}, make("p", small, says + "This one: " + percent(own.base) + " awake on average; by kind of token: " + kinds + "."),
    tokens ? make("p", small, "Most awake at " + tokens + ".") : null, text);
  return section("What wakes it", body, "the start of one text; the darkest token is " + percent(most) + " awake");
}
const lateNote = () => (atCheckpoint() ? "; of the final state" : "");
function section(title, body, note) {
  return [make("h4", {}, title), body, note ? make("p", { class: "dim small note" }, note) : null];
}

/* what the panel says of the selected head, at the checkpoint of the slider */
function paintDetail() {
  const { layer, head } = state, condition = current(), step = stepIndex();
  const stock = data.stock >= 0 && data.conditions[data.stock] !== condition ? data.conditions[data.stock] : null;
  const paired = atCheckpoint() && condition.before; /* read on the same blocks as the checkpoints */
  const body = make("tbody", {});
  for (const one of data.measures) {
    if (one.key === "change") continue;
    const now = valueOf(condition, one.key, layer, head, step);
    const before = !stock || one.names ? null : paired && one.key === "first_token_mass" ? condition.before[layer][head] : valueOf(stock, one.key, layer, head);
    if (!known(now) && !known(before)) continue;
    const once = stock && one.names; /* a class that stock was given, whatever was done to it */
    const change = known(now) && known(before) ? now - before : null;
    body.append(make("tr", {}, make("td", {}, one.label), stock ? make("td", {}, once ? words(one, now) : number(before, one.digits)) : null,
      make("td", {}, once ? "–" : words(one, now)), stock ? make("td", {}, known(change) ? (change >= 0 ? "+" : "") + number(change, one.digits) : "–") : null));
  }
  const columns = ["", ...(stock ? ["stock"] : []), atCheckpoint() ? "step " + condition.steps[state.step] : stock ? "here" : "value", ...(stock ? ["change"] : [])];
  const header = make("tr", {}, ...columns.map((text) => make("th", { scope: "col" }, text)));
  const role = condition.operated[layer][head] ? "operated on" : condition.watched[layer][head] ? "watched" : condition.mode === "stock" ? "" : "untouched";
  const was = stock ? classAt(stock, layer, head).replace("_", " ") : "", is = classAt(condition, layer, head, step).replace("_", " ");
  $("detail").replaceChildren(
    make("h3", { id: "detail-name" }, name(layer, head)),
    make("p", { class: "dim small", style: "margin:0 0 .6rem" }, condition.label + " · " + (stock && was !== is ? was + " → " + is : is) + (role ? " · " + role : "")),
    make("table", {}, make("thead", {}, header), body),
    ...(atCheckpoint() && !condition.film ? [make("p", { class: "dim small note" }, "A checkpoint knows the first-token mass alone; move the slider to its end for the rest.")] : []));
  CARDS.forEach((chart, i) => {
    const parts = (chart(layer, head) || []).filter(Boolean);
    cards[i].replaceChildren(...parts);
    cards[i].hidden = !parts.length;
  });
}

/* cards that fit beside the grids stand there, the others below; a narrow page has one column */
const CARDS = [pathChart, wakingText, profileChart, costChart, neighbourChart, pooledChart];
const cards = CARDS.map(() => make("div", { class: "card-chart panel" }));
const narrow = matchMedia("(max-width: 60rem)");
function placeCards() {
  const [left, right, below] = [$("left"), $("right"), $("below")];
  below.append(...cards);
  right.append($("detail"));
  const room = narrow.matches ? 0 : left.getBoundingClientRect().bottom;
  for (const card of cards) {
    right.append(card);
    if (card.getBoundingClientRect().bottom > room) { below.prepend(...cards.slice(cards.indexOf(card))); return; }
  }
}
/* on a narrow page the panel opens below the row that was tapped; a second tap puts it back */
const opened = { kind: null, layer: -1, head: -1 };
function openBelow(kind) {
  const same = opened.kind === kind && opened.layer === state.layer && opened.head === state.head;
  if (!narrow.matches || same) { opened.kind = null; placeCards(); return; }
  Object.assign(opened, { kind, layer: state.layer, head: state.head });
  const panel = $("detail");
  panel.remove(); /* so that the rows count from the top again */
  const { root } = grids.find((grid) => grid.kind === kind);
  root.insertBefore(panel, root.children[data.layers - state.layer]);
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
    note.textContent = name(state.layer, state.head) + " " + words(one, valueOf(condition, one.key, state.layer, state.head));
  });
  $("multiples-note").textContent = one.label + ", final state; " + name(state.layer, state.head) + " marked";
}

function render() { paintStep(); paintGrids(); paintLegend(); paintDetail(); paintMultiples(); }
if (data.stock >= 0) buildGrid($("grid-stock"), "stock");
buildGrid($("grid"), "here");
buildMultiples();
document.querySelector(".multi-wrap").hidden = data.conditions.length < (data.stock >= 0 ? 3 : 2); /* a pair stands above */
[state.layer, state.head] = data.start;
const addressed = readAddress();
choose(data.open);
placeCards();
narrow.addEventListener("change", () => { opened.kind = null; placeCards(); });
addEventListener("hashchange", () => { if (readAddress()) render(); });
if (addressed) $("heads").scrollIntoView();
