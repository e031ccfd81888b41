// The ranks: a table of few, a grid of cells for many. Their order never changes by itself.

import { byId, keyed, make, mark, put, show } from "./elements.js";
import { STATES, UNKNOWN, bytes, number, seconds, share } from "./words.js";

const CELLS_FROM = 17;
const CELLS_FROM_ON_PHONE = 5;
const STALE = 3;
const GONE = ["lost", "left"];
const NOTHING = { compute: null, sync: null, sent_per_second: null, received_per_second: null };
const is_phone = matchMedia("(max-width: 640px)");
const panel = byId("ranks");
const cells = panel.querySelector(".cells");
const rows = panel.querySelector("tbody");
const table = panel.querySelector("table");
const detail = byId("rank-detail");

let wants_table = sessionStorage.getItem("covey-table") === "yes";
let slowest_first = false;
let chosen = null;
let shown = null;

byId("as-table").addEventListener("click", () => {
  wants_table = !wants_table;
  sessionStorage.setItem("covey-table", wants_table ? "yes" : "no");
  if (shown) show_ranks(...shown);
});
byId("slowest").addEventListener("click", () => {
  slowest_first = !slowest_first;
  if (shown) show_ranks(...shown);
});

is_phone.addEventListener("change", () => { if (shown) show_ranks(...shown); });

const time_of = (rank) => (rank.compute ?? 0) + (rank.state === "lost" || rank.state === "silent" ? 1e9 : 0);

export function show_ranks(run, machines) {
  shown = [run, machines];
  const names = new Map(machines.map((machine) => [machine.id, machine.name]));
  let ranks = (run?.ranks ?? []).map((rank) => (GONE.includes(rank.state) ? { ...rank, ...NOTHING } : rank));
  if (slowest_first) ranks = [...ranks].sort((one, other) => time_of(other) - time_of(one) || one.rank - other.rank);
  const is_many = ranks.length >= (is_phone.matches ? CELLS_FROM_ON_PHONE : CELLS_FROM);
  const is_grid = is_many && !wants_table;
  show(byId("no-ranks"), ranks.length === 0);
  show(cells, is_grid);
  show(table, ranks.length > 0 && !is_grid);
  show(byId("as-table"), is_many);
  show(byId("slowest"), ranks.length > 1);
  mark(byId("as-table"), "aria-pressed", wants_table);
  mark(byId("slowest"), "aria-pressed", slowest_first);
  const longest = Math.max(1e-9, ...ranks.map((rank) => (rank.compute ?? 0) + (rank.sync ?? 0)));
  keyed(cells, is_grid ? ranks : [], (rank) => rank.rank, build_cell, (element, rank) => update_cell(element, rank, names, longest));
  keyed(rows, is_grid ? [] : ranks, (rank) => rank.rank, build_row, (element, rank) => update_row(element, rank, names, longest));
  const found = is_grid ? ranks.find((rank) => rank.rank === chosen) : null;
  show(detail, found);
  if (found) put(detail, described(found, names));
}

function described(rank, names) {
  const [, word] = STATES[rank.state] ?? ["?", rank.state];
  const parts = [`Rank ${rank.rank} on ${names.get(rank.machine) ?? rank.machine}: ${word}`];
  if (rank.reason) parts.push(rank.reason);
  if (rank.waits_for?.length) parts.push(`waits for ${ranks_text(rank.waits_for)}`);
  if (rank.operation) parts.push(`in ${rank.operation} for ${seconds(rank.operation_age)}`);
  parts.push(`step ${number(rank.step)}`, `compute ${seconds(rank.compute)}`, `sync ${seconds(rank.sync)}`);
  parts.push(`sends ${bytes(rank.sent_per_second)}`, `pid ${rank.pid}`);
  if (rank.age > STALE) parts.push(`figures ${seconds(rank.age)} old`);
  return parts.join(" · ");
}

export function ranks_text(ranks) {
  const list = ranks.slice(0, 3).join(", ");
  return `${ranks.length === 1 ? "rank" : "ranks"} ${list}${ranks.length > 3 ? ` and ${ranks.length - 3} others` : ""}`;
}

function bar() {
  return make("span", { class: "bar", "aria-hidden": "true" }, make("span", { class: "compute" }), make("span", { class: "sync" }));
}

function update_bar(element, rank, longest) {
  const [compute, sync] = element.children;
  compute.style.width = `${(100 * (rank.compute ?? 0)) / longest}%`;
  sync.style.width = `${(100 * (rank.sync ?? 0)) / longest}%`;
}

function build_cell(rank) {
  const button = make("button", { type: "button" },
    make("span", { class: "number" }), make("span", { class: "sign", "aria-hidden": "true" }), make("span", { class: "word" }), bar());
  button.addEventListener("click", () => {
    chosen = chosen === rank.rank ? null : rank.rank;
    if (shown) show_ranks(...shown);
  });
  return make("li", {}, button);
}

function update_cell(element, rank, names, longest) {
  const button = element.firstElementChild;
  const [figure, sign, word, bars] = button.children;
  const [shape, text] = STATES[rank.state] ?? ["?", rank.state];
  mark(button, "class", `cell ${rank.state}`);
  mark(button, "aria-pressed", chosen === rank.rank);
  mark(button, "title", described(rank, names));
  put(figure, String(rank.rank));
  put(sign, shape);
  put(word, text);
  update_bar(bars, rank, longest);
}

function build_row() {
  const times = make("td", { "data-label": "Compute and sync" }, bar(), make("span", { class: "times" }));
  return make("tr", {},
    make("th", { scope: "row", "data-label": "Rank" }), make("td", { "data-label": "Machine" }),
    make("td", { "data-label": "State", class: "state" }, make("span", { class: "sign", "aria-hidden": "true" }), make("span", { class: "word" }), make("span", { class: "reason" })),
    make("td", { "data-label": "Step", class: "figure" }), times, make("td", { "data-label": "Waits for" }),
    make("td", { "data-label": "Sent", class: "figure" }), make("td", { "data-label": "Received", class: "figure" }), make("td", { "data-label": "Saved", class: "figure" }));
}

function figure(cell, text) {
  const is_unknown = text === UNKNOWN;
  put(cell, is_unknown ? "–" : text);
  mark(cell, "aria-label", is_unknown ? UNKNOWN : null);
  mark(cell, "title", is_unknown ? UNKNOWN : null);
}

function update_row(row, rank, names, longest) {
  const [head, machine, state, step, times, waits, sent, received, saved] = row.children;
  const [shape, word] = STATES[rank.state] ?? ["?", rank.state];
  mark(row, "class", rank.state);
  put(head, String(rank.rank));
  put(machine, names.get(rank.machine) ?? rank.machine);
  put(state.children[0], shape);
  put(state.children[1], word);
  put(state.children[2], rank.reason || (rank.age > STALE ? `figures ${seconds(rank.age)} old` : ""));
  figure(step, number(rank.step));
  update_bar(times.children[0], rank, longest);
  const known = rank.compute !== null && rank.compute !== undefined;
  put(times.children[1], GONE.includes(rank.state) ? "" : known ? `${seconds(rank.compute)} + ${seconds(rank.sync)}` : UNKNOWN);
  put(waits, rank.waits_for?.length ? ranks_text(rank.waits_for) : "");
  figure(sent, bytes(rank.sent_per_second));
  figure(received, bytes(rank.received_per_second));
  figure(saved, share(rank.saved));
  mark(saved, "title", rank.codec ? `${rank.codec}${rank.codec_reason ? `: ${rank.codec_reason}` : ""}` : null);
}
