// Curves by hand: a report of the program, and the parts of a step, with losses and joins as marks.

import { byId, draw, mark, options, put, show } from "./elements.js";
import { ask } from "./session.js";
import { UNKNOWN, clock, number, seconds, value_of } from "./words.js";

const MOST_POINTS = 4000;
const GAP = 6;
const BORDER = { left: 62, right: 10, top: 16, bottom: 20 };
const MARKS = { lost: "✕", joined: "+", left: "–" };

let run_id = null;
let points = [];
let report = sessionStorage.getItem("covey-report") ?? "loss";
let span = 600;
let shown_run = null;
const pointers = new Map();

byId("report").addEventListener("change", (event) => {
  report = event.target.value;
  sessionStorage.setItem("covey-report", report);
  redraw();
});
byId("span").addEventListener("change", (event) => {
  span = Number(event.target.value);
  redraw();
});

/** Take what an overview tells of a run; its history before that is asked for once. */
export function show_curves(run, taken) {
  shown_run = run;
  if (run?.id !== run_id || (points.length && taken - points.at(-1).at > GAP)) {
    const is_other = run?.id !== run_id;
    run_id = run?.id ?? null;
    if (is_other) points = [];
    if (run) fetch_history(run.id);
  }
  if (run) add({ at: taken, step: run.step, reports: run.reports, compute_seconds: run.compute_seconds, sync_seconds: run.sync_seconds });
  redraw();
}

function add(point) {
  if (points.length && point.at <= points.at(-1).at) return;
  points.push(point);
  if (points.length > MOST_POINTS) points.splice(0, points.length - MOST_POINTS);
}

async function fetch_history(id) {
  try {
    const moments = await ask(`/api/history?run=${encodeURIComponent(id)}`);
    if (id !== run_id) return;
    const newest = moments.at(-1)?.at ?? 0;
    points = [...moments, ...points.filter((point) => point.at > newest)].slice(-MOST_POINTS);
    redraw();
  } catch {
    // The next overview after a gap asks again.
  }
}

function redraw() {
  const names = Object.keys(shown_run?.reports ?? {}).filter((name) => name !== "step" && name !== "samples").sort();
  const chosen = names.includes(report) || !names.length ? report : names.includes("loss") ? "loss" : names[0];
  options(byId("report"), names.map((name) => [name, name]), chosen);
  show(byId("report").parentElement, names.length > 1);
  put(byId("loss-title"), names.length > 1 ? "Report" : names.length ? chosen.slice(0, 1).toUpperCase() + chosen.slice(1) : "Loss");
  const has_report = points.some((point) => point.reports && chosen in point.reports);
  show(byId("loss-plot"), has_report);
  show(byId("loss-hint"), !has_report);
  show(byId("loss-reading"), has_report);
  if (!has_report) hint();
  else curve(byId("loss-plot"), byId("loss-reading"), chosen);
  const has_steps = points.some((point) => point.compute_seconds !== null && point.compute_seconds !== undefined);
  for (const id of ["steps-plot", "steps-legend", "steps-span"]) show(byId(id), has_steps);
  show(byId("steps-hint"), !has_steps);
  if (has_steps) parts(byId("steps-plot"), byId("steps-reading"));
  else put(byId("steps-reading"), "");
}

function hint() {
  const is_waiting = shown_run?.state === "waiting";
  put(byId("loss-hint"), is_waiting ? "The run has not begun." : shown_run ? "The program reports no loss. One line is enough: group.report(step=step, loss=loss)" : "No run to show.");
}

const recent = () => {
  const end = points.at(-1)?.at ?? 0;
  return points.filter((point) => point.at >= end - span);
};

/** At most one point for each two pixels: the last of each, so that the newest is always there. */
function thinned(list, width) {
  const step = Math.max(1, Math.ceil(list.length / Math.max(1, width / 2)));
  return step === 1 ? list : list.filter((_, place) => (list.length - 1 - place) % step === 0);
}

function frame(plot, lowest, highest, begin, end, format) {
  const width = Math.max(160, plot.clientWidth), height = Math.max(120, plot.clientHeight);
  const inner = { width: width - BORDER.left - BORDER.right, height: height - BORDER.top - BORDER.bottom };
  const x = (at) => BORDER.left + ((at - begin) / Math.max(1e-9, end - begin)) * inner.width;
  const y = (value) => BORDER.top + (1 - (value - lowest) / Math.max(1e-12, highest - lowest)) * inner.height;
  const picture = draw("svg", { viewBox: `0 0 ${width} ${height}`, width, height, "aria-hidden": "true" });
  for (const part of [0, 0.5, 1]) {
    const value = lowest + part * (highest - lowest);
    picture.append(draw("line", { class: "rule", x1: BORDER.left, x2: width - BORDER.right, y1: y(value), y2: y(value) }));
    picture.append(draw("text", { class: "tick", x: BORDER.left - 6, y: y(value) + 4, "text-anchor": "end" }, format(value)));
  }
  picture.append(draw("text", { class: "tick", x: BORDER.left, y: height - 5 }, clock(begin)));
  picture.append(draw("text", { class: "tick", x: width - BORDER.right, y: height - 5, "text-anchor": "end" }, clock(end)));
  return { picture, x, y, width, height };
}

function put_marks({ picture, x, height }, begin, end) {
  for (const each of shown_run?.happenings ?? []) {
    if (!(each.kind in MARKS) || each.at < begin || each.at > end) continue;
    const line = draw("g", { class: `event ${each.kind}` },
      draw("line", { x1: x(each.at), x2: x(each.at), y1: BORDER.top, y2: height - BORDER.bottom }),
      draw("text", { x: x(each.at), y: BORDER.top - 4, "text-anchor": "middle" }, MARKS[each.kind]),
      draw("title", {}, `${clock(each.at)} ${each.text}`));
    picture.append(line);
  }
}

function curve(plot, reading, name) {
  const list = recent().filter((point) => point.reports && name in point.reports);
  const values = list.map((point) => value_of(point.reports[name]));
  const finite = values.filter(Number.isFinite);
  let lowest = Math.min(...finite), highest = Math.max(...finite);
  if (!finite.length) [lowest, highest] = [0, 1];
  if (lowest === highest) [lowest, highest] = [lowest - Math.abs(lowest || 1) / 2, highest + Math.abs(highest || 1) / 2];
  const begin = list[0]?.at ?? 0, end = Math.max(begin + 1, list.at(-1)?.at ?? 1);
  const area = frame(plot, lowest, highest, begin, end, (value) => number(value, 3));
  let path = "", is_down = false;
  for (const point of thinned(list, area.width)) {
    const value = value_of(point.reports[name]);
    if (!Number.isFinite(value)) {
      area.picture.append(draw("text", { class: "not-finite", x: area.x(point.at), y: area.height - BORDER.bottom - 3, "text-anchor": "middle" }, "✕"));
      is_down = false;
      continue;
    }
    path += `${is_down ? "L" : "M"}${area.x(point.at).toFixed(1)} ${area.y(value).toFixed(1)}`;
    is_down = true;
  }
  area.picture.append(draw("path", { class: "curve", d: path }));
  put_marks(area, begin, end);
  const last = list.at(-1);
  const first_finite = finite[0];
  const at_pointer = picked(plot, area, list);
  const read = at_pointer ?? last;
  put(reading, read ? `${number(read.reports[name])}${read.step !== null && read.step !== undefined ? ` at step ${number(read.step)}` : ""}` : UNKNOWN);
  mark(reading, "class", read && !Number.isFinite(value_of(read.reports[name])) ? "reading bad" : "reading");
  mark(plot, "aria-label", `${name}: ${number(last?.reports[name])} now, ${number(first_finite)} at the beginning of the curve`);
  place(plot, area, at_pointer);
}

function parts(plot, reading) {
  const list = recent().filter((point) => point.compute_seconds !== null && point.compute_seconds !== undefined);
  const sync = (point) => point.sync_seconds ?? 0;
  const highest = Math.max(1e-6, ...list.map((point) => point.compute_seconds + sync(point)));
  const begin = list[0]?.at ?? 0, end = Math.max(begin + 1, list.at(-1)?.at ?? 1);
  const area = frame(plot, 0, highest, begin, end, (value) => (value ? seconds(value) : "0"));
  area.picture.append(hatching());
  const few = thinned(list, area.width);
  if (few.length) {
    const edge = (height_of) => few.map((point) => `${area.x(point.at).toFixed(1)} ${area.y(height_of(point)).toFixed(1)}`);
    const bottom = edge(() => 0), middle = edge((point) => point.compute_seconds), upper = edge((point) => point.compute_seconds + sync(point));
    area.picture.append(draw("path", { class: "compute", d: `M${middle.join("L")}L${[...bottom].reverse().join("L")}Z` }));
    area.picture.append(draw("path", { class: "sync", fill: "url(#hatching)", d: `M${upper.join("L")}L${[...middle].reverse().join("L")}Z` }));
  }
  put_marks(area, begin, end);
  const at_pointer = picked(plot, area, list);
  const read = at_pointer ?? list.at(-1);
  put(reading, read ? `${seconds(read.compute_seconds + sync(read))}: compute ${seconds(read.compute_seconds)}, sync ${seconds(read.sync_seconds)}` : UNKNOWN);
  mark(plot, "aria-label", `Step time: ${reading.textContent}`);
  place(plot, area, at_pointer);
}

function hatching() {
  return draw("defs", {}, draw("pattern", { id: "hatching", width: 5, height: 5, patternUnits: "userSpaceOnUse", patternTransform: "rotate(45)" },
    draw("rect", { width: 5, height: 5, class: "hatch-ground" }), draw("rect", { width: 2, height: 5, class: "hatch-line" })));
}

/** The point under the pointer or chosen by arrow keys. */
function picked(plot, area, list) {
  const pointer = pointers.get(plot);
  if (!pointer || !list.length) return null;
  if (pointer.back !== undefined) return list[Math.max(0, list.length - 1 - pointer.back)];
  return list.reduce((best, point) => (Math.abs(area.x(point.at) - pointer.x) < Math.abs(area.x(best.at) - pointer.x) ? point : best));
}

function place(plot, area, at_pointer) {
  if (at_pointer) {
    const x = area.x(at_pointer.at);
    area.picture.append(draw("line", { class: "pointer", x1: x, x2: x, y1: BORDER.top, y2: area.height - BORDER.bottom }));
  }
  plot.replaceChildren(area.picture);
}

for (const id of ["loss-plot", "steps-plot"]) {
  const plot = byId(id);
  plot.addEventListener("pointermove", (event) => {
    pointers.set(plot, { x: event.clientX - plot.getBoundingClientRect().left });
    redraw();
  });
  for (const end of ["pointerleave", "blur"]) plot.addEventListener(end, () => { pointers.delete(plot); redraw(); });
  plot.addEventListener("keydown", (event) => {
    const by = { ArrowLeft: 1, ArrowRight: -1 }[event.key];
    if (!by) return;
    pointers.set(plot, { back: Math.max(0, (pointers.get(plot)?.back ?? 0) + by) });
    event.preventDefault();
    redraw();
  });
}
new ResizeObserver(redraw).observe(byId("loss"));
