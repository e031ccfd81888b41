// Output of the ranks of all machines, asked for once a second while the panel is open.

import { byId, make, mark, options, put } from "./elements.js";
import { ask } from "./session.js";
import { clock } from "./words.js";

const KEPT = 5000;
const SHOWN = 400;
const ASK_EVERY = 1000;
const KEY = "covey-output";

const panel = byId("logs-open");
const machine = byId("log-machine"), rank = byId("log-rank"), filter = byId("log-filter"), errors = byId("log-errors");
const box = byId("log-lines"), note = byId("log-note"), pause = byId("log-pause");

const saved = JSON.parse(sessionStorage.getItem(KEY) ?? "{}");
let run_id = null;
let lines = [];
let next = "";
let left_out = 0;
let is_paused = false;
let is_asking = false;
let problem = "";

const wanted = { machine: saved.machine ?? "", rank: saved.rank ?? "" };
filter.value = saved.filter ?? "";
errors.checked = saved.errors ?? false;
panel.open = saved.open ?? false;

function save() {
  const kept = { machine: wanted.machine, rank: wanted.rank, filter: filter.value, errors: errors.checked, open: panel.open };
  sessionStorage.setItem(KEY, JSON.stringify(kept));
}

machine.addEventListener("change", () => { wanted.machine = machine.value; redraw(); });
rank.addEventListener("change", () => { wanted.rank = rank.value; redraw(); });
filter.addEventListener("input", redraw);
errors.addEventListener("change", redraw);
panel.addEventListener("toggle", () => { save(); look(); });
pause.addEventListener("click", () => {
  is_paused = !is_paused;
  mark(pause, "aria-pressed", is_paused);
  put(pause, is_paused ? "Continue" : "Pause");
  if (!is_paused) redraw();
});

export function show_output(run, machines) {
  if (run?.id !== run_id) {
    run_id = run?.id ?? null;
    lines = [];
    next = "";
    left_out = 0;
  }
  options(machine, [["", "all"], ...machines.map((each) => [each.name, each.name])], wanted.machine);
  options(rank, [["", "all"], ...(run?.ranks ?? []).map((each) => [String(each.rank), String(each.rank)])], wanted.rank);
}

async function look() {
  if (!panel.open || is_asking || run_id === null) return;
  is_asking = true;
  const asked = run_id;
  try {
    const page = await ask(`/api/output?run=${encodeURIComponent(asked)}&since=${encodeURIComponent(next)}`);
    if (asked === run_id) {
      next = page.next;
      left_out += page.left_out;
      lines = lines.concat(page.lines);
      if (lines.length > KEPT) lines = lines.slice(-KEPT);
      problem = "";
    }
  } catch (error) {
    problem = error.message;
  } finally {
    is_asking = false;
  }
  if (!is_paused) redraw();
}
setInterval(look, ASK_EVERY);

const is_wanted = (line, text) =>
  (!wanted.machine || line.machine === wanted.machine) && (!wanted.rank || String(line.rank) === wanted.rank)
  && (!errors.checked || line.is_error) && (!text || line.text.toLowerCase().includes(text));

function redraw() {
  save();
  const text = filter.value.trim().toLowerCase();
  const found = lines.filter((line) => is_wanted(line, text));
  const is_at_end = box.scrollTop + box.clientHeight >= box.scrollHeight - 8;
  box.replaceChildren(...found.slice(-SHOWN).map(built));
  if (is_at_end) box.scrollTop = box.scrollHeight;
  const parts = [];
  if (problem) parts.push(problem);
  else if (!lines.length) parts.push("No output is kept for this run so far. covey run keeps that of its ranks; for plain python, set COVEY_KEEP_OUTPUT=1.");
  else if (!found.length) parts.push("No line fits the filters.");
  if (found.length > SHOWN) parts.push(`The last ${SHOWN} of ${found.length} lines are shown.`);
  if (left_out) parts.push(`${left_out} lines were left out: they came faster than this page shows them.`);
  put(note, parts.join(" "));
}

function built(line) {
  return make("div", { class: line.is_error ? "line error-line" : "line" },
    make("span", { class: "when" }, line.at ? clock(line.at) : ""),
    make("span", { class: "who" }, line.rank === null || line.rank === undefined ? line.machine : `${line.machine} ${line.rank}`),
    make("span", { class: "said" }, (line.is_error ? "! " : "") + line.text));
}
