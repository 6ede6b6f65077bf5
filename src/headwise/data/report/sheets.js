/* One page, no library: state -> render. Text goes in by textContent only, never as markup.
   sheets.js, heads.js and detail.js are joined into one function, in this order. */
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

/* a table that is wider than the page says so, and fades where it goes on */
function markWide() {
  for (const box of document.querySelectorAll(".scroll")) {
    const hidden = box.scrollWidth - box.clientWidth;
    box.classList.toggle("more-left", box.scrollLeft > 1);
    box.classList.toggle("more-right", hidden - box.scrollLeft > 1);
    box.nextElementSibling.querySelector(".hint").hidden = hidden <= 1;
  }
}
for (const box of document.querySelectorAll(".scroll")) box.addEventListener("scroll", markWide, { passive: true });
addEventListener("resize", markWide);
markWide();

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
        const cells = data.measures.map((one) => {
          const value = valueOf(condition, one.key, layer, head);
          return one.names && value !== null ? one.names[value] : value;
        });
        rows.push([condition.key, layer, head, data.classes[condition.classes[layer][head]], ...cells,
          cost ? cost[1] : "", cost ? cost[2] : ""].map((cell) => cell === null ? "" : cell).join(","));
      }
  return rows.join("\n") + "\n";
}

function valueOf(condition, name, layer, head, step) {
  if (name === "triage") return data.triage[layer][head]; /* of the model as it was, in every condition */
  const past = step !== undefined && step < condition.steps.length;
  if (past && condition.film && condition.film[name]) return condition.film[name][step][layer][head];
  if (past && name === "first_token_mass") return condition.stepMaps[step][layer][head];
  if (past && name !== "change") return null; /* a checkpoint knows the mass alone, a film some more */
  if (name === "ablation") {
    const cost = condition.ablation && condition.ablation[layer][head];
    return cost ? cost[0] : null;
  }
  if (name === "change") {
    if (data.stock < 0) return null;
    const mass = valueOf(condition, "first_token_mass", layer, head, step);
    const start = (past && condition.before ? condition.before : data.conditions[data.stock].maps.first_token_mass)[layer][head];
    return mass === null ? null : mass - start;
  }
  const map = condition.maps[name];
  return map ? map[layer][head] : null;
}
