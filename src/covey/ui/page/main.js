// The page: takes an overview a second, and shows it. Order is by urgency; what has nothing to say is not shown.

import { show_applicants, show_run_actions } from "./actions.js";
import { show_curves } from "./charts.js";
import { byId, command, keyed, make, mark, options, put, show } from "./elements.js";
import { show_output } from "./logs.js";
import { show_machines } from "./machines.js";
import { show_past } from "./past.js";
import { show_ranks } from "./ranks.js";
import { begin, on_overview, on_state, silence } from "./session.js";
import { show_happenings } from "./timeline.js";
import { UNKNOWN, count, lasting, many, number, seconds, share, value_of } from "./words.js";

const ANNOUNCE_EVERY = 10_000;
const LEVELS = { fine: 0, note: 1, warning: 2, error: 3 };
const SIGNS = { fine: "✓", note: "i", warning: "!", error: "✕" };

let chosen_run = sessionStorage.getItem("covey-run");
let newest = null;
let state = "connecting";
let announced = -ANNOUNCE_EVERY;

on_overview((overview) => {
  newest = overview;
  render();
});
on_state((next, detail) => {
  state = next;
  render_state(detail);
});

byId("run").addEventListener("change", (event) => {
  chosen_run = event.target.value;
  sessionStorage.setItem("covey-run", chosen_run);
  render();
});

function current_run() {
  const runs = newest?.runs ?? [];
  return runs.find((run) => run.id === chosen_run) ?? runs.find((run) => run.state === "running") ?? runs[0] ?? null;
}

function render() {
  const run = current_run();
  show(byId("main"), true);
  show(byId("outside"), false);
  render_head(run);
  render_sentences(run);
  show_applicants(newest);
  render_figures(run);
  show_machines(newest, run);
  for (const id of ["ranks", "timeline", "logs", "loss", "steps"]) show(byId(id), run);
  show_ranks(run, newest.machines);
  show_curves(run, newest.taken);
  show_happenings(run);
  show_output(run, newest.machines);
  show_run_actions(run);
  show_past(newest);
  show(byId("add"), newest.cluster);
  document.body.classList.toggle("one-machine", newest.machines.length === 1 && run !== null);
  render_live();
}

function render_head(run) {
  put(byId("cluster"), newest.cluster || "this machine");
  const runs = newest.runs;
  show(byId("run-choice"), runs.length > 1);
  show(byId("run-name"), runs.length === 1);
  put(byId("run-name"), run ? run.name : "");
  if (run) options(byId("run"), runs.map((each) => [each.id, `${each.name}${each.state === "running" ? "" : ` (${each.state})`}`]), run.id);
  const chip = byId("run-state");
  show(chip, run);
  if (run) {
    mark(chip, "class", `chip ${run.state}`);
    put(chip, run.state + (run.state === "running" && run.began ? ` ${lasting(newest.taken - run.began)}` : ""));
  }
  document.title = run ? `${run.name} · ${newest.cluster || "covey"}` : newest.cluster || "covey";
}

// Sentences

function render_sentences(run) {
  const is_of_a_run = newest.runs.some((each) => each.sentence.text === newest.sentence.text);
  const found = [run?.sentence, is_of_a_run ? null : newest.sentence].filter((each) => each?.text);
  const shown = found.sort((one, other) => LEVELS[other.level] - LEVELS[one.level])
    .filter((each, place) => place === 0 || LEVELS[each.level] >= LEVELS.warning);
  keyed(byId("sentences"), shown, (each) => (each === newest.sentence ? "all" : "run"), build_sentence, update_sentence);
  announce(shown.filter((each) => each.level !== "fine").map((each) => each.text).join(" "));
}

function build_sentence() {
  const why = make("button", { type: "button", class: "why", "aria-expanded": "false" }, "why?");
  const reasons = make("ul", { class: "reasons", hidden: true });
  why.addEventListener("click", () => {
    show(reasons, reasons.hidden);
    mark(why, "aria-expanded", !reasons.hidden);
  });
  return make("div", {}, make("span", { class: "sign", "aria-hidden": "true" }), make("span", { class: "text" }), why, reasons, make("span", { class: "commands" }));
}

function update_sentence(element, sentence) {
  const [sign, text, why, reasons, commands] = element.children;
  mark(element, "class", `sentence ${sentence.level}`);
  put(sign, SIGNS[sentence.level]);
  put(text, sentence.text);
  show(why, sentence.why?.length);
  if (!sentence.why?.length) show(reasons, false);
  keyed(reasons, sentence.why ?? [], (line) => line, () => make("li"), put);
  keyed(commands, sentence.commands ?? [], (line) => line, command, () => {});
}

/** Tell readers, at most every ten seconds, and only what is new. */
function announce(text) {
  const region = byId("announce");
  if (region.textContent === text || performance.now() - announced < ANNOUNCE_EVERY) return;
  announced = performance.now();
  put(region, text);
}

// Figures

function render_figures(run) {
  show(byId("figures"), run);
  if (!run) return;
  const active = run.ranks.filter((rank) => rank.state !== "lost" && rank.state !== "left").length;
  const machines = new Set(run.ranks.map((rank) => rank.machine)).size;
  const figures = [["Ranks", String(active), machines ? `on ${count(machines, "machine")}` : ""], ["Step", number(run.step), ""]];
  const reports = Object.entries(run.reports ?? {}).filter(([name]) => name !== "step" && name !== "samples")
    .sort(([one], [other]) => (other === "loss") - (one === "loss") || (one < other ? -1 : 1));
  for (const [name, value] of reports.slice(0, 2)) figures.push([name, number(value), "", !Number.isFinite(value_of(value))]);
  if (!reports.length) figures.push(["Loss", UNKNOWN, ""]);
  figures.push(["Samples", run.samples_per_second === null ? UNKNOWN : `${many(run.samples_per_second)}/s`, ""]);
  const parts = run.compute_seconds === null ? "" : `compute ${seconds(run.compute_seconds)}, sync ${seconds(run.sync_seconds)}`.replaceAll(/ (m?s)\b/g, "\u00a0$1");
  figures.push(["Step time", seconds(run.step_seconds), parts]);
  const is_plain = run.saved === null && run.ranks.some((rank) => rank.sent_per_second) && run.ranks.every((rank) => !rank.codec);
  figures.push(["Saved by compression", is_plain ? "none is used" : share(run.saved), ""]);
  keyed(byId("figures"), figures, ([name]) => name, ([name]) => make("div", {}, make("dt", {}, name), make("dd"), make("dd", { class: "beside" })), update_figure);
}

function update_figure(element, [, value, beside, is_bad]) {
  const [, figure, note] = element.children;
  put(figure, value);
  mark(figure, "class", is_bad ? "bad" : value === UNKNOWN || value === "none is used" ? "unknown" : null);
  put(note, beside);
}

// Whether what is shown is true

function render_live() {
  const age = Math.max(0, Math.round(silence()));
  const words = { live: age > 2 ? `${age} s ago` : "live", stale: "old", offline: "offline", refused: "not connected", connecting: "connecting" };
  put(byId("live-text"), words[state]);
  mark(byId("live"), "class", `live ${state}`);
  const is_gone = state === "offline" || state === "stale";
  show(byId("offline"), is_gone);
  mark(byId("main"), "class", is_gone ? "old" : null);
  if (is_gone) put(byId("offline"), `covey ui does not answer${newest ? `; figures are ${age} s old` : ""}. If it has ended, type covey ui, here or on another machine of the cluster.`);
}

function render_state(detail) {
  if (state === "refused") {
    show(byId("main"), false);
    show(byId("outside"), true);
    put(byId("outside-title"), "This link is not valid any more.");
    put(byId("outside-text"), detail === "none" ? "This tab has no link, and no other tab is open that has one. For a new link, type" : "It was used, is older than five minutes, or covey ui was started again. For another, type");
    byId("outside-command").replaceChildren(command("covey ui --link"));
    announced = -ANNOUNCE_EVERY;
    announce("This link is not valid any more. Type covey ui --link for another.");
  }
  render_live();
}

// Light and dark, and the menu on small screens

const theme = byId("theme");
const prefers_dark = matchMedia("(prefers-color-scheme: dark)");
function set_theme(chosen) {
  mark(document.documentElement, "data-theme", chosen);
  const is_dark = chosen ? chosen === "dark" : prefers_dark.matches;
  put(theme, is_dark ? "Light" : "Dark");
}
theme.addEventListener("click", () => {
  const next = theme.textContent === "Dark" ? "dark" : "light";
  localStorage.setItem("covey-theme", next);
  set_theme(next);
});
prefers_dark.addEventListener("change", () => set_theme(localStorage.getItem("covey-theme")));
set_theme(localStorage.getItem("covey-theme"));

const is_small = matchMedia("(max-width: 640px)");
const open_menu = () => { byId("menu").open = !is_small.matches; };
is_small.addEventListener("change", open_menu);
open_menu();

byId("pair").append(command("covey pair"));
byId("enroll").append(command("covey enroll"));
setInterval(render_live, 500);
begin();
