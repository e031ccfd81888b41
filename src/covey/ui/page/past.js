// Runs that were started on this machine and are over: asked for when a run begins or ends, and while the panel is open.

import { byId, command, keyed, make, mark, put, show } from "./elements.js";
import { ask } from "./session.js";
import { count, lasting, number, value_of } from "./words.js";

const ASK_EVERY = 15_000;
const AGAIN_AFTER = 3_000;

const panel = byId("past"), opened = byId("past-open"), list = document.querySelector(".past");
let states = null;
let is_asking = false;

/** Look at the history again if a run has begun or ended; once more a little later: its end is written down then. */
export function show_past(overview) {
  const now = overview.runs.map((run) => `${run.id} ${run.state}`).sort().join("\n");
  if (now === states) return;
  states = now;
  look();
  setTimeout(look, AGAIN_AFTER);
}

opened.addEventListener("toggle", look);
setInterval(() => { if (opened.open) look(); }, ASK_EVERY);

async function look() {
  if (is_asking) return;
  is_asking = true;
  try {
    const rows = (await ask("/api/past")).filter((row) => row.state !== "running");
    show(panel, rows.length);
    put(byId("past-count"), count(rows.length, "run"));
    keyed(list, rows, (row) => row.id, build, update);
  } catch {
    // The page says by itself that covey ui does not answer.
  } finally {
    is_asking = false;
  }
}

function build() {
  const names = ["sign", "name", "when", "lasted", "outcome", "report"];
  const summary = make("summary", {}, ...names.map((name) => make("span", { class: name })));
  mark(summary.firstElementChild, "aria-hidden", true);
  return make("li", {}, make("details", {}, summary, make("dl", { class: "facts" })));
}

function update(element, row) {
  const [summary, facts] = element.firstElementChild.children;
  const [sign, name, when, lasted, outcome, report] = summary.children;
  mark(element, "class", row.has_failed ? "failed" : null);
  put(sign, row.has_failed ? "✕" : "✓");
  put(name, row.run);
  put(when, new Date(row.began * 1000).toLocaleString([], { dateStyle: "medium", timeStyle: "short", hourCycle: "h23" }));
  put(lasted, row.seconds === null ? "" : lasting(row.seconds));
  put(outcome, row.outcome);
  put(report, reported(row.report));
  const shown = [
    ["Command", [row.program]],
    ["Ranks", [`${count(row.ranks, "rank")} on ${row.machines.join(", ")}`]],
    ["Checkpoints", row.checkpoints.slice(-3)],
    ["Last operations", row.traces.slice(-3)],
    ["Output", row.logs ? [row.logs] : []],
  ];
  keyed(facts, shown.filter(([, lines]) => lines.length), ([title]) => title, ([title]) => make("div", {}, make("dt", {}, title), make("dd")), update_fact);
}

function update_fact(element, [title, lines]) {
  const build_line = (line) => (title === "Output" ? command(line) : make("code", {}, line));
  keyed(element.lastElementChild, lines, (line) => line, build_line, () => {});
}

function reported(report) {
  if (!report) return "";
  const values = Object.entries(report.values).filter(([name]) => name !== "samples")
    .sort(([one], [other]) => (other === "loss") - (one === "loss") || (one < other ? -1 : 1)).slice(0, 2);
  const words = values.map(([name, value]) => `${name} ${number(value_of(value))}`);
  return [...(report.step === null ? [] : [`step ${report.step}`]), ...words].join(", ");
}
