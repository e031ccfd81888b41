// Machines and the links between them. Up to four are a graph, with both directions of each link; more are boxes by site,
// with the links of the one that is chosen.

import { byId, draw, keyed, make, mark, put, show } from "./elements.js";
import { STATES, UNKNOWN, bits, count, memory, seconds, share } from "./words.js";

const GRAPH_WIDTH = { 2: 460, 3: 640, 4: 820 };
const MOST_LINKS = 6;
const graph = document.querySelector(".graph");
const boxes = document.querySelector(".machines");
const wires = document.querySelector(".wires");
const list = document.querySelector(".links");

let chosen = null;
let shown = null;

export function show_machines(overview, run) {
  shown = [overview, run];
  const machines = [...overview.machines].sort((one, other) => compare(one.site, other.site) || compare(one.name, other.name));
  const links = run?.links ?? [];
  show(byId("machines"), machines.length);
  const here = machines.find((machine) => machine.is_here);
  keyed(boxes, machines, (machine) => machine.id, build, (element, machine) => update(element, machine, run, here, machines));
  const is_graph = graph.clientWidth >= (GRAPH_WIDTH[machines.length] ?? Infinity);
  mark(graph, "class", is_graph ? `graph placed of-${machines.length}` : "graph boxes");
  wires.replaceChildren();
  if (is_graph) connect(machines, pairs(links));
  else arrange();
  show_links(machines, links, is_graph);
}

const compare = (one, other) => (one < other ? -1 : one > other ? 1 : 0);

function build(machine) {
  const box = make("button", { type: "button", class: "machine" },
    make("span", { class: "name" }), make("span", { class: "what" }), make("span", { class: "load" }), make("span", { class: "problem" }), make("span", { class: "dots" }));
  box.addEventListener("click", () => {
    chosen = chosen === machine.id ? null : machine.id;
    if (shown) show_machines(...shown);
  });
  return make("li", {}, box);
}

function update(element, machine, run, here, machines) {
  const box = element.firstElementChild;
  const [name, what, load, problem, dots] = box.children;
  mark(box, "class", `machine ${machine.state}${machine.is_here ? " here" : ""}`);
  mark(box, "aria-pressed", chosen === machine.id);
  const has_sites = new Set(machines.map((each) => each.site)).size > 1;
  put(name, machine.name + (machine.is_here ? " (here)" : "") + (has_sites && machine.site ? ` · ${machine.site}` : ""));
  put(what, hardware(machine));
  put(load, usage(machine));
  const is_other = here && machine.version && here.version && machine.version !== here.version;
  put(problem, machine.problem || (is_other ? `covey ${machine.version}: it may tell less` : ""));
  const ranks = (run?.ranks ?? []).filter((rank) => rank.machine === machine.id);
  keyed(dots, ranks, (rank) => rank.rank, () => make("span"), (dot, rank) => {
    const [shape, word] = STATES[rank.state] ?? ["?", rank.state];
    mark(dot, "class", `dot-rank ${rank.state}`);
    mark(dot, "title", `rank ${rank.rank}: ${word}`);
    put(dot, rank.state === "active" ? String(rank.rank) : `${rank.rank}${shape}`);
  });
}

function hardware(machine) {
  const parts = [];
  if (machine.cores) parts.push(count(machine.cores, "core"));
  for (const gpu of machine.gpus ?? []) parts.push(gpu.name);
  return parts.join(" · ") || (machine.state === "silent" ? "does not answer" : "hardware not known");
}

function usage(machine) {
  const parts = [`CPU ${share(machine.processor)}`];
  if (is_known(machine.memory_used)) parts.push(`memory ${part(machine.memory_used, machine.memory_total)}`);
  for (const gpu of machine.gpus ?? []) {
    parts.push(`GPU ${share(gpu.busy)}${is_known(gpu.memory_used) ? `, ${part(gpu.memory_used, gpu.memory_total)}` : ""}`);
  }
  if (is_known(machine.temperature)) parts.push(`${Math.round(machine.temperature)} °C`);
  if (machine.age > 3) parts.push(`${seconds(machine.age)} ago`);
  return parts.join(" · ");
}

const is_known = (value) => value !== null && value !== undefined;

/** "6.0/32 GiB" */
const part = (used, total) => (is_known(total) ? `${(used / 2 ** 30).toPrecision(2)}/${memory(total)}` : memory(used));

/** Links of both directions together, by pair. */
function pairs(links) {
  const found = new Map();
  for (const link of links) {
    if (link.source === link.target) continue;
    const is_first = link.source < link.target;
    const key = is_first ? `${link.source} ${link.target}` : `${link.target} ${link.source}`;
    const pair = found.get(key) ?? { one: is_first ? link.source : link.target, other: is_first ? link.target : link.source };
    pair[is_first ? "there" : "back"] = link;
    found.set(key, pair);
  }
  return [...found.values()];
}

const center = (element) => {
  const inner = element.getBoundingClientRect(), outer = graph.getBoundingClientRect();
  return { x: inner.left - outer.left + inner.width / 2, y: inner.top - outer.top + inner.height / 2, width: inner.width, height: inner.height };
};

/** Lines with the speeds of both directions; the label of a diagonal is nearer to one end, so that they do not meet. */
function connect(machines, found) {
  const places = new Map(machines.map((machine) => [machine.id, center(boxes.keyed.get(machine.id))]));
  mark(wires, "viewBox", `0 0 ${graph.clientWidth} ${graph.clientHeight}`);
  for (const pair of found) {
    const one = places.get(pair.one), other = places.get(pair.other);
    if (!one || !other) continue;
    const is_lying = Math.abs(one.y - other.y) < 20;
    const [left, right] = one.x <= other.x ? [one, other] : [other, one];
    const ahead = left === one ? pair.there : pair.back, back = left === one ? pair.back : pair.there;
    const is_diagonal = machines.length === 4 && !is_lying && Math.abs(one.x - other.x) > 20;
    const part = is_diagonal ? 0.3 : 0.5;
    const x = left.x + (right.x - left.x) * part, y = left.y + (right.y - left.y) * part;
    wires.append(draw("line", { class: "wire", x1: one.x, y1: one.y, x2: other.x, y2: other.y }));
    const [to, from] = is_lying || is_diagonal ? ["→", "←"] : left.y <= right.y ? ["↓", "↑"] : ["↑", "↓"];
    const texts = [`${to} ${bits(ahead?.bytes_per_second)}`, medium(pair), `${from} ${bits(back?.bytes_per_second)}`].filter(Boolean);
    const label = draw("g", { class: "speed" });
    const width = 12 + 6.6 * Math.max(...texts.map((text) => text.length));
    label.append(draw("rect", { x: x - width / 2, y: y - 9 * texts.length, width, height: 18 * texts.length, rx: 5 }));
    texts.forEach((text, place) => label.append(draw("text", { x, y: y - 9 * texts.length + 18 * place + 13, "text-anchor": "middle" }, text)));
    wires.append(label);
  }
}

function medium(pair) {
  const link = pair.there ?? pair.back;
  return [link.medium || link.lane, link.relay ? `by ${link.relay}` : ""].filter(Boolean).join(" ");
}

/** Lines from the chosen machine to its partners, behind the boxes. */
function arrange() {
  const links = shown[1]?.links ?? [];
  const from = boxes.keyed?.get(chosen);
  mark(wires, "viewBox", `0 0 ${graph.clientWidth} ${graph.clientHeight}`);
  if (!from) return;
  const one = center(from);
  for (const pair of pairs(links)) {
    if (pair.one !== chosen && pair.other !== chosen) continue;
    const to = boxes.keyed.get(pair.one === chosen ? pair.other : pair.one);
    if (!to) continue;
    const other = center(to);
    wires.append(draw("line", { class: "wire", x1: one.x, y1: one.y, x2: other.x, y2: other.y }));
  }
}

/** Links as words: those of the chosen machine, or else the slowest ones. */
function show_links(machines, links, is_graph) {
  const names = new Map(machines.map((machine) => [machine.id, machine.name]));
  let wanted = links.filter((link) => link.source !== link.target && names.has(link.source) && names.has(link.target));
  if (chosen) wanted = wanted.filter((link) => link.source === chosen || link.target === chosen);
  else if (is_graph) wanted = [];
  else {
    wanted = [...wanted].sort((one, other) => (one.bytes_per_second ?? Infinity) - (other.bytes_per_second ?? Infinity)
      || compare(names.get(one.source), names.get(other.source)) || compare(names.get(one.target), names.get(other.target))).slice(0, MOST_LINKS);
  }
  show(list, wanted.length);
  keyed(list, wanted, (link) => `${link.source} ${link.target}`, () => make("li", {}, make("span", { class: "route" }), make("span", { class: "speeds" })), (item, link) => {
    put(item.children[0], `${names.get(link.source)} → ${names.get(link.target)}`);
    const speed = !is_known(link.bytes_per_second) ? `speed ${UNKNOWN}` : bits(link.bytes_per_second);
    const parts = [speed, link.medium, link.lane, link.interface, link.relay ? `by relay ${link.relay}` : ""];
    if (is_known(link.round_trip)) parts.push(seconds(link.round_trip));
    if (link.sent_per_second) parts.push(`now ${bits(link.sent_per_second)}`);
    put(item.children[1], parts.filter(Boolean).join(" · "));
  });
}

new ResizeObserver(() => { if (shown) show_machines(...shown); }).observe(document.getElementById("machines"));
