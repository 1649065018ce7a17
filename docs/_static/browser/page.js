// The page "labkit in the browser": sends what the controls say to labkit (worker.js), and draws the numbers it returns.
const FIELDS = {
  // name: [label, value at first, list of choices that labkit fills, or undefined for a text field]
  schedule: {
    preset: ["schedule", "1f1b", "preset"], pp: ["pipeline ranks", "4"], microbatches: ["microbatches", "8"],
    chunks: ["chunks (interleaved)", "2"], forward: ["time of F", "1"], input_grad: ["of I", "1"], weight_grad: ["of W", "1"],
  },
  groups: {
    order: ["order, fastest first", "tp-cp-ep-dp-pp"], world_size: ["GPUs", "64"], gpus_per_node: ["per node", "8"],
    tp: ["tp", "4"], cp: ["cp", "1"], ep: ["ep", "1"], pp: ["pp", "2"],
    model: ["model", "table1_8_3b", "model"], batch: ["global batch", "512"],
  },
  plan: {
    preset: ["model", "table1_8_3b", "plan_preset"], machine: ["machine", "h100", "machine"], gpus: ["GPUs", "512"],
    batch: ["global batch", "512"],
  },
};
const GROUP_COLORS = ["#332288", "#CC6677", "#44AA99", "#DDCC77", "#AA4499", "#88CCEE", "#999933", "#661100"];
const DARK = new Set(["#332288", "#AA4499", "#661100"]); // the groups' numbers are white on these
const PART_COLORS = { gemm: "#0072B2", attention: "#56B4E9", memory: "#009E73", launch: "#F0E442", tp: "#EE8866",
  cp: "#FFAABB", ep: "#AAAA00", dp: "#77AADD", pp: "#EEDD88", bubble: "#999999", recompute: "#CC79A7",
  optimizer: "#332288", host: "#DDCC77" };
const parts = {}; // name -> {box, rows, kind, ask}

const escaped = (text) => String(text).replace(/[&<>"]/g, (sign) => `&#${sign.charCodeAt(0)};`);
const short = (number) => Number(number.toPrecision(4)).toString();
const percent = (share) => `${(100 * share).toFixed(1)}%`;
const sized = (bytes) => (bytes < 1e12 ? `${short3(bytes / 1e9)} GB` : `${short3(bytes / 1e12)} TB`);
const short3 = (number) => Number(number.toPrecision(3)).toString();

// ---- asking labkit ----
function startLabkit() {
  if (window.labkitAnswer) return async (kind, request) => JSON.parse(await window.labkitAnswer(kind, request)); // tests
  const worker = new Worker(new URL("worker.js", import.meta.url), { type: "module" });
  const waiting = new Map();
  worker.onmessage = ({ data: { id, answer, text, failed } }) => {
    if (id) return waiting.get(id)(JSON.parse(answer));
    for (const { box } of Object.values(parts))
      box.querySelector(".say").textContent = failed ? `labkit could not start: ${failed}` : `${text} ...`;
  };
  worker.onerror = () => (worker.onmessage({ data: { failed: "this browser runs no module in a worker." } }));
  let last = 0;
  return (kind, request) => new Promise((resolve) => {
    waiting.set(++last, resolve);
    worker.postMessage({ id: last, kind, request });
  });
}

// Ask with what the controls say now. While an answer is awaited, only the newest question waits.
function asker(part, draw) {
  let busy = false, again = false;
  return async function ask() {
    if (busy) return void (again = true);
    busy = true;
    const started = performance.now();
    remember(part);
    if (part.name === "plan") part.box.querySelector(".say").textContent = "Searching ...";
    const answer = await labkit(part.name, JSON.stringify(request(part)));
    part.box.querySelector(".problem").textContent = answer.problem ?? "";
    part.box.querySelector(".drawn").classList.toggle("old", Boolean(answer.problem));
    if (answer.problem) part.box.querySelector(".say").textContent = "The picture is of the last setting that could be.";
    else draw(part, answer);
    if (part.name === "schedule") markCells(part, answer.problem ?? "");
    performance.measure(`labkit-${part.name}`, { start: started });
    busy = false;
    if (again) { again = false; ask(); }
  };
}

function request(part) {
  const given = Object.fromEntries([...part.box.querySelectorAll("form [name]")].map((each) => [each.name, each.value]));
  return part.rows ? { ...given, rows: part.rows } : given;
}

// ---- the address carries the state ----
function remember(part) {
  const state = new URLSearchParams({ part: part.name, ...request(part) });
  if (part.rows) state.set("rows", part.rows.map((row) => row.join(".").replace(/ /g, ".")).join("_"));
  if (part.asked) history.replaceState(null, "", `#${state}`); // not for what was there at first
  part.asked = true;
}

function recalled() {
  const state = new URLSearchParams(location.hash.slice(1)), part = parts[state.get("part")];
  if (!part) return;
  for (const each of part.box.querySelectorAll("form [name]")) if (state.has(each.name)) each.value = state.get(each.name);
  if (state.has("rows")) part.rows = state.get("rows").split("_").map((row) => row.split("."));
  part.box.scrollIntoView();
}

// ---- a part: its controls, its picture, and the reason below it ----
function addPart(box, draw) {
  const name = box.dataset.part, part = (parts[name] = { name, box, rows: null });
  const fields = Object.entries(FIELDS[name]).map(([key, [label, value, list]]) => `<label>${label} ${list
    ? `<select name="${key}"><option>${value}</option></select>`
    : `<input name="${key}" value="${value}" size="${key === "order" ? 14 : 4}" autocomplete="off" spellcheck="false">`}</label>`);
  const button = name === "plan" ? "<button>Plan</button>" : name === "schedule" ? '<button type="reset">Start over</button>' : "";
  box.innerHTML = `<form>${fields.join("")}${button}</form><div class="drawn"></div>
    <p class="say" role="status">Starting ...</p><pre class="problem" role="alert"></pre>`;
  part.ask = asker(part, draw);
  const form = box.querySelector("form");
  form.onsubmit = (event) => { event.preventDefault(); part.ask(); };
  form.onreset = () => setTimeout(() => { part.rows = null; part.ask(); });
  form.oninput = (event) => {
    if (["preset", "pp", "microbatches", "chunks"].includes(event.target.name)) part.rows = null;
    if (name !== "plan") part.ask();
  };
  return part;
}

function fill(lists) {
  for (const { name, box } of Object.values(parts))
    for (const [key, [, value, list]] of Object.entries(FIELDS[name]).filter(([, spec]) => spec[2])) {
      const select = box.querySelector(`[name=${key}]`);
      select.innerHTML = lists[list].map((each) => `<option${each === value ? " selected" : ""}>${each}</option>`).join("");
    }
}

// ---- schedules ----
function drawSchedule(part, answer) {
  const { rows, times, pp, makespan, peaks } = answer, left = 58, lane = 26, wide = 640, scale = wide / makespan;
  const blocks = rows.flatMap((row, rank) => row.map((cell, place) => {
    const [, stage, kind, microbatch] = cell.match(/(\d+)([FBIW])(\d+)/), [start, end] = times[rank][place];
    const x = left + start * scale, width = (end - start) * scale, y = rank * lane;
    const later = stage >= pp ? `<rect x="${x}" y="${y + 18}" width="${width}" height="4" class="later"/>` : "";
    const text = width > 7 * microbatch.length + 3 ? `<text x="${x + width / 2}" y="${y + 15}" class="on${kind}">${microbatch}</text>` : "";
    return `<g><title>${cell}: ${short(start)} to ${short(end)}</title>
      <rect x="${x}" y="${y + 2}" width="${width}" height="20" class="k${kind}"/>${later}${text}</g>`;
  }));
  const lanes = peaks.map((peak, rank) => `<text x="0" y="${rank * lane + 17}" class="name">rank ${rank}</text>
    <rect x="${left}" y="${rank * lane + 2}" width="${wide}" height="20" class="idle"/>
    <text x="${left + wide + 8}" y="${rank * lane + 17}" class="name">${short(peak)}</text>`);
  const height = rows.length * lane, ticks = [0, 0.25, 0.5, 0.75, 1].map((share) =>
    `<text x="${left + wide * share}" y="${height + 16}" class="tick${share === 1 ? " end" : ""}">${short(makespan * share)}</text>`);
  const words = `bubble ${percent(answer.bubble)}, ${short(makespan)} units of time, at most ${short(Math.max(...peaks))} microbatches in flight`;
  const kinds = [["F", "forward"], ["B", "backward"], ["I", "input gradient"], ["W", "weight gradient"]].filter(([kind]) =>
    rows.some((row) => row.some((cell) => cell.includes(kind))));
  const keys = kinds.map(([kind, name]) => `<span><i class="k${kind}"></i>${kind} ${name}</span>`);
  if (rows.some((row) => row.some((cell) => parseInt(cell) >= pp))) keys.push('<span><i class="k later"></i>a second chunk or later</span>');
  const verdicts = answer.verdicts.map(([transport, runs, why]) => runs ? `<li>${transport}: it runs</li>`
    : `<li>${transport}: no, <details><summary>${escaped(why.split("\n")[0])}</summary><pre>${escaped(why)}</pre></details></li>`);
  if (answer.megatron) verdicts.push(`<li>in Megatron: no, ${escaped(answer.megatron.split("\n")[0])}</li>`);
  part.box.querySelector(".drawn").innerHTML = `<svg viewBox="0 0 760 ${height + 22}" role="img" aria-label="Timeline: ${words}">
      <text x="760" y="${height + 16}" class="name end">in flight</text>${lanes.join("")}${blocks.join("")}${ticks.join("")}</svg>
    <p class="key">${keys.join("")}</p><p><b>${words}</b>; ${escaped(answer.split)}.</p>
    <ul class="verdicts">${verdicts.join("")}</ul>`;
  part.box.querySelector(".say").textContent = part.rows ? "Your table." : `labkit's ${request(part).preset}.`;
  if (part.rows) part.rows = rows;
  drawTable(part, rows);
}

function drawTable(part, rows) {
  const before = part.box.querySelector(".cells"), focused = before?.querySelector("input:focus");
  const typed = focused && focused.value !== focused.dataset.was ? focused.value : null;
  const place = focused ? part.place : null;
  const columns = Math.max(...rows.map((row) => row.length));
  const heads = Array.from({ length: columns + 1 }, (_, column) => `<th scope="col">${column}</th>`);
  const lines = rows.map((row, rank) => `<tr><th scope="row">rank ${rank}</th>${[...row, ""].map((cell, column) =>
    `<td><input value="${escaped(cell)}" data-was="${escaped(cell)}" data-at="${rank},${column}" tabindex="-1" spellcheck="false"
      autocomplete="off" aria-label="rank ${rank}, position ${column}" class="c${cell.match(/[FBIW]/)?.[0] ?? ""}"></td>`).join("")}</tr>`);
  const cells = before ?? Object.assign(document.createElement("div"), { className: "cells" });
  const { scrollLeft } = cells;
  cells.innerHTML = `<table role="grid" aria-label="Actions of each rank"><thead><tr><th></th>${heads.join("")}</tr></thead><tbody>${lines.join("")}</tbody></table>`;
  if (!before) {
    part.box.querySelector(".drawn").after(cells);
    cells.addEventListener("keydown", (event) => onKey(part, event));
    cells.addEventListener("focusin", ({ target }) => {
      part.place = target.dataset.at.split(",").map(Number);
      roam(part, target);
      target.select();
    });
    cells.addEventListener("change", ({ target }) => commit(part, target));
  }
  cells.scrollLeft = scrollLeft;
  part.shown = rows;
  roam(part, at(part, ...(part.place ?? [0, 0])) ?? at(part, 0, 0));
  if (place) {
    go(part, ...place);
    if (typed !== null) document.activeElement.value = typed;
  }
}

const at = (part, rank, column) => part.box.querySelector(`[data-at="${rank},${column}"]`);

function roam(part, cell) { // one cell at a time can be reached by Tab
  for (const each of part.box.querySelectorAll('.cells [tabindex="0"]')) each.tabIndex = -1;
  cell.tabIndex = 0;
}

function go(part, rank, column) {
  const row = Math.min(Math.max(rank, 0), part.shown.length - 1);
  at(part, row, Math.min(Math.max(column, 0), part.shown[row].length))?.focus();
}

function edit(part, change) {
  part.rows = part.shown.map((row) => [...row]);
  change(part.rows);
  part.rows = part.rows.map((row) => row.flatMap((cell) => cell.trim().split(/\s+/)).filter(Boolean));
  drawTable(part, part.rows);
  part.ask();
}

function commit(part, cell) {
  if (cell.value === cell.dataset.was) return;
  const [rank, column] = cell.dataset.at.split(",").map(Number), text = cell.value;
  cell.dataset.was = text;
  edit(part, (rows) => { rows[rank][column] = text; });
}

function onKey(part, event) {
  const cell = event.target, [rank, column] = part.place, { key } = event;
  const whole = cell.selectionStart === 0 && cell.selectionEnd === cell.value.length;
  const move = (row, place) => { event.preventDefault(); commit(part, cell); go(part, row, place); };
  const step = key === "ArrowLeft" ? -1 : 1, edge = step < 0 ? cell.selectionEnd === 0 : cell.selectionStart === cell.value.length;
  if (key === "ArrowUp" || key === "ArrowDown") move(rank + (key === "ArrowUp" ? -1 : 1), column);
  else if (key === "Enter") move(rank, column + 1);
  else if (key === "Escape") { cell.value = cell.dataset.was; cell.select(); }
  else if ((key === "ArrowLeft" || key === "ArrowRight") && event.shiftKey) {
    event.preventDefault();
    const other = column + step, row = part.shown[rank];
    if (other < 0 || other >= row.length || column >= row.length) return;
    part.place = [rank, other];
    edit(part, (rows) => { [rows[rank][column], rows[rank][other]] = [rows[rank][other], rows[rank][column]]; });
  } else if ((key === "ArrowLeft" || key === "ArrowRight") && (whole || edge)) move(rank, column + step);
  else if ((key === "Delete" || key === "Backspace") && whole) {
    event.preventDefault();
    if (cell.value) edit(part, (rows) => rows[rank].splice(column, 1));
  }
}

function markCells(part, problem) {
  for (const each of part.box.querySelectorAll('.cells [aria-invalid="true"]')) each.removeAttribute("aria-invalid");
  for (const [, rank, column] of problem.matchAll(/rank (\d+), position (\d+)/g)) at(part, rank, column)?.setAttribute("aria-invalid", "true");
}

// ---- groups ----
function drawGroups(part, answer) {
  const kinds = Object.keys(answer.groups).filter((kind) => answer.groups[kind][0].length > 1);
  const kind = kinds.includes(part.kind) ? part.kind : (kinds[0] ?? "tp"), groups = answer.groups[kind], owner = [];
  groups.forEach((group, number) => group.forEach((rank) => (owner[rank] = number)));
  const nodes = Math.ceil(answer.world / answer.node), small = answer.world > 128;
  const lines = Array.from({ length: nodes }, (_, node) => `<tr><th scope="row">node ${node}</th>${owner
    .slice(node * answer.node, (node + 1) * answer.node).map((group, gpu) => {
      const color = GROUP_COLORS[group % 8], rank = node * answer.node + gpu;
      return `<td style="background:${color};color:${DARK.has(color) ? "#fff" : "#000"}" title="rank ${rank}, ${kind} group ${group}">${small ? group : `${rank}<small>g${group}</small>`}</td>`;
    }).join("")}</tr>`);
  const radios = kinds.map((each) => `<label><input type="radio" name="kind" value="${each}"${each === kind ? " checked" : ""}> ${each}
    <small>${answer.groups[each].length} x ${answer.groups[each][0].length}</small></label>`);
  const rows = Object.entries(answer.bytes), most = Math.max(1, ...rows.map(([, sizes]) => Math.max(...sizes)));
  const bar = (bytes, where) => `<td><i class="bar ${where}" style="width:${(100 * bytes) / most}%"></i>${sized(bytes)}</td>`;
  const sum = rows.reduce((all, [, [, between]]) => all + between, 0);
  const best = answer.best_bytes < sum * (1 - 1e-12) ? `Of the ${answer.orders} orders, ${answer.best} sends least between nodes: ${sized(answer.best_bytes)}.`
    : `No order of these axes sends less (${answer.orders} tried).`;
  part.box.querySelector(".drawn").innerHTML = `<fieldset class="kinds"><legend>groups of</legend>${radios.join("") || "no axis above 1"}</fieldset>
    <div class="grid"><table aria-label="${kind} group of each rank">${lines.join("")}</table></div>
    <table class="bytes"><thead><tr><th>kind</th><th>inside nodes, per step</th><th>between nodes</th></tr></thead><tbody>${rows.map(([each, [inside, between]]) =>
      `<tr><th scope="row">${each}</th>${bar(inside, "inside")}${bar(between, "between")}</tr>`).join("")}</tbody></table>
    <p><b>${sized(sum)} between nodes</b> in one step. ${best}</p>`;
  part.box.querySelector(".say").textContent = `${groups.length} groups of ${groups[0].length} along ${kind}; a colour repeats after eight groups, the number does not.`;
  part.box.querySelector(".kinds").onchange = ({ target }) => {
    part.kind = target.value;
    drawGroups(part, answer);
    part.box.querySelector(`[value="${part.kind}"]`).focus();
  };
}

// ---- plans ----
function drawPlan(part, answer) {
  const longest = Math.max(...answer.best.map((each) => each.seconds));
  const used = Object.keys(answer.kinds).filter((kind) => answer.best.some((each) => (each.parts[kind] ?? 0) > each.seconds / 500));
  const rows = answer.best.map((each, number) => `<tr><th scope="row">${number + 1}</th><td>${each.layout.replaceAll(",", " ")}</td>
    <td>${each.seconds.toPrecision(4)}</td><td>${each.low.toPrecision(3)} to ${each.high.toPrecision(3)}</td><td>${percent(each.mfu)}</td><td>${each.gb.toFixed(1)}</td></tr>
    <tr class="step"><td></td><td colspan="5"><div style="width:${(100 * each.seconds) / longest}%">${used.map((kind) =>
      `<i style="flex-grow:${1e6 * (each.parts[kind] ?? 0)};background:${PART_COLORS[kind]}" title="${answer.kinds[kind]}: ${((each.parts[kind] ?? 0) * 1e3).toPrecision(3)} ms"></i>`).join("")}</div></td></tr>`);
  part.box.querySelector(".drawn").innerHTML = `<p>${(answer.parameters / 1e9).toPrecision(4)} billion parameters on ${answer.machine}, ${answer.usable.toFixed(1)} GB of each GPU usable.
    ${answer.counts}.</p><div class="wide"><table class="best"><thead><tr><th></th><th>layout</th><th>s/step</th><th>80 % interval</th><th>MFU</th><th>GB</th></tr></thead>
    <tbody>${rows.join("")}</tbody></table></div><p class="key">${used.map((kind) => `<span><i style="background:${PART_COLORS[kind]}"></i>${answer.kinds[kind]}</span>`).join("")}</p>`;
  part.box.querySelector(".say").textContent = "Predicted, not measured.";
}

// ---- start ----
const DRAW = { schedule: drawSchedule, groups: drawGroups, plan: drawPlan };
for (const box of document.querySelectorAll(".labkit-live")) addPart(box, DRAW[box.dataset.part]);
const labkit = startLabkit();
fill(await labkit("choices", "{}"));
recalled();
await parts.schedule.ask();
performance.mark("labkit-first-picture");
await parts.groups.ask();
parts.plan.box.querySelector(".say").textContent = "Press Plan: it takes a few seconds.";
if (new URLSearchParams(location.hash.slice(1)).get("part") === "plan") parts.plan.ask();
