"""The page of a board: learners in rows, exercises that somebody has tried in columns."""

PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>labkit board</title>
<style>
:root { color-scheme: light dark; --line: #8886; --solved: #1a7f37; --tried: #b35900; }
@media (prefers-color-scheme: dark) { :root { --solved: #3fb950; --tried: #f0a34e; } }
body { font: 18px/1.4 system-ui, sans-serif; margin: 1.5rem; }
h1 { font-size: 1.3rem; margin: 0 0 .2rem; }
p { margin: 0 0 1rem; }
div { overflow-x: auto; }
table { border-collapse: collapse; }
th, td { padding: .25rem .6rem; border-bottom: 1px solid var(--line); text-align: center; white-space: nowrap; }
th:first-child, td:first-child { text-align: left; position: sticky; left: 0; background: Canvas; }
.solved { color: var(--solved); font-weight: 600; }
.tried { color: var(--tried); }
.new { outline: 3px solid currentColor; outline-offset: -3px; }
tfoot td { border: 0; }
</style></head><body>
<h1>Who has solved what</h1>
<p id="state" role="status">connecting</p>
<div><table aria-label="learners and exercises"><thead></thead><tbody></tbody><tfoot></tfoot></table></div>
<script>
const rows = new Map(), names = new Map(), columns = new Set();
const cell = (tag, text, kind) => {
  const made = document.createElement(tag);
  made.textContent = text;
  if (kind) made.className = kind;
  return made;
};
let waiting = null, latest = "";
function draw() {
  waiting = null;
  const exercises = [...columns].sort();
  const learners = [...names].sort((a, b) => a[1].localeCompare(b[1]));
  const head = document.createElement("tr");
  head.append(cell("th", "learner"), ...exercises.map(name => cell("th", name)));
  document.querySelector("thead").replaceChildren(head);
  document.querySelector("tbody").replaceChildren(...learners.map(([learner, name]) => {
    const line = document.createElement("tr");
    line.append(cell("td", name), ...exercises.map(exercise => {
      const found = rows.get(learner + " " + exercise);
      if (!found) return cell("td", "");
      const solved = found.passed === found.total && found.total > 0;
      const made = cell("td", solved ? "solved" : found.passed + "/" + found.total, solved ? "solved" : "tried");
      made.title = found.tries + (found.tries === 1 ? " try" : " tries");
      if (learner + " " + exercise === latest) made.classList.add("new");
      return made;
    }));
    return line;
  }));
  const foot = document.createElement("tr");
  foot.append(cell("td", "solved by"), ...exercises.map(exercise => {
    const done = learners.filter(([learner]) => {
      const found = rows.get(learner + " " + exercise);
      return found && found.total > 0 && found.passed === found.total;
    });
    return cell("td", done.length + " of " + learners.length);
  }));
  document.querySelector("tfoot").replaceChildren(foot);
  state.textContent = learners.length ? learners.length + (learners.length === 1 ? " learner" : " learners")
    : "nobody has posted a score yet";
}
const state = document.getElementById("state");
const events = new EventSource("events" + location.search);
events.onopen = () => { if (!waiting) waiting = requestAnimationFrame(draw); };
events.onerror = () => { state.textContent = "the board does not answer; trying again"; };
events.onmessage = message => {
  const row = JSON.parse(message.data);
  latest = row.learner + " " + row.exercise;
  rows.set(latest, row);
  names.set(row.learner, row.name);
  columns.add(row.exercise);
  if (!waiting) waiting = requestAnimationFrame(draw);
};
</script></body></html>
"""
