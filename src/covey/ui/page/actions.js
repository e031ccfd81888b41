// What a person can do: checkpoint, stop, approve, deny, show the join code.

import { byId, copy, draw, keyed, make, mark, put, show } from "./elements.js";
import { act } from "./session.js";
import { count, lasting } from "./words.js";

const CODE_SECONDS = 60;
const KILL_AFTER = 30;
const RESULT_SECONDS = 12;
const result = byId("result");
let run = null;
let stopping = null;
let result_timer = 0;
const later = new Set(JSON.parse(sessionStorage.getItem("covey-later") ?? "[]"));
let applicants_shown = null;

async function perform(path, body, done) {
  try {
    const answer = await act(path, body);
    tell(answer.text || done);
    return answer;
  } catch (error) {
    tell(error.message, "error");
    return null;
  }
}

function tell(text, level = "note") {
  put(result, text);
  mark(result, "class", `banner ${level}`);
  show(result, true);
  clearTimeout(result_timer);
  result_timer = setTimeout(() => show(result, false), RESULT_SECONDS * 1000);
}

export function show_run_actions(next) {
  run = next;
  show(byId("checkpoint"), run?.can_checkpoint);
  show(byId("stop"), run?.can_stop);
  if (!run || run.state === "ended" || run.state === "failed") stopping = null;
  const is_due = stopping !== null && stopping.run === run?.id && performance.now() - stopping.at > KILL_AFTER * 1000;
  show(byId("stop-kill"), is_due);
}

byId("checkpoint").addEventListener("click", () => run && perform("/api/checkpoint", { run: run.id }, "A checkpoint was asked for."));

// Stop

const stop_dialog = byId("stop-dialog");
byId("stop").addEventListener("click", () => {
  if (!run) return;
  const machines = new Set(run.ranks.map((rank) => rank.machine)).size;
  put(byId("stop-title"), `Stop ${run.name}?`);
  put(byId("stop-text"), `${count(run.ranks.length, "rank")} on ${count(machines, "machine")} get SIGTERM, and 30 s to save their work.`);
  stop_dialog.showModal();
});
byId("stop-cancel").addEventListener("click", () => stop_dialog.close());
byId("stop-confirm").addEventListener("click", async () => {
  stop_dialog.close();
  if (!run) return;
  stopping = { run: run.id, at: performance.now() };
  await perform("/api/stop", { run: run.id }, `${run.name} was told to stop.`);
});
byId("stop-kill").addEventListener("click", async () => {
  stop_dialog.close();
  if (run) await perform("/api/stop", { run: run.id, kill: true }, `${run.name} was killed.`);
});

// Machines that ask to join

export function show_applicants(overview) {
  applicants_shown = overview;
  const waiting = overview.applicants.filter((each) => !later.has(each.id));
  const panel = byId("applicants");
  show(panel, waiting.length);
  keyed(panel.querySelector("ul"), waiting, (each) => each.id, build_applicant, (element, each) => update_applicant(element, each, overview));
}

function build_applicant(applicant) {
  const button = (word, kind, listener) => make("button", { type: "button", class: kind, on: { click: listener } }, word);
  const decide = (path, done) => () => perform(path, { id: applicant.id }, done);
  return make("li", {},
    make("div", { class: "who-asks" }, make("strong"), make("span", { class: "from" }), make("code", { class: "whole-id" }), make("span", { class: "hint" })),
    make("div", { class: "buttons" },
      button("Approve", "primary", decide("/api/approve", `${applicant.name} was approved.`)),
      button("Deny", "danger", decide("/api/deny", `${applicant.name} was denied.`)),
      button("Later", "", () => {
        later.add(applicant.id);
        sessionStorage.setItem("covey-later", JSON.stringify([...later]));
        show_applicants(applicants_shown);
      })));
}

function update_applicant(element, applicant, overview) {
  const [name, from, id, hint] = element.firstElementChild.children;
  const [approve, deny] = element.lastElementChild.children;
  put(name, applicant.name);
  put(from, `from ${applicant.address || "an unknown address"}, ${lasting(applicant.age)} ago`);
  put(id, applicant.id);
  show(approve, overview.can_approve);
  show(deny, overview.can_approve);
  const where = overview.approver ? `Machines are approved on ${overview.approver}: type covey allow there.` : "Machines are approved where the owner key is: type covey allow there.";
  put(hint, overview.can_approve ? "Compare the id with what covey up prints on that machine." : where);
}

// The join code

const code_dialog = byId("code-dialog");
let code_until = 0;

byId("show-code").addEventListener("click", async () => {
  const answer = await perform("/api/code", {}, "The join code is shown for a minute.");
  if (!answer) return;
  put(byId("code-text"), answer.code);
  byId("code-qr").replaceChildren(picture(answer.qr));
  code_until = performance.now() + CODE_SECONDS * 1000;
  count_down();
  code_dialog.showModal();
});
byId("code-close").addEventListener("click", () => code_dialog.close());
byId("code-copy").addEventListener("click", (event) => copy(byId("code-text").textContent, event.target));
code_dialog.addEventListener("close", forget_code);
window.addEventListener("blur", () => mark(byId("code-secret"), "class", "blurred"));
window.addEventListener("focus", () => mark(byId("code-secret"), "class", null));

function forget_code() {
  put(byId("code-text"), "");
  byId("code-qr").replaceChildren();
  code_until = 0;
}

function count_down() {
  const left = Math.ceil((code_until - performance.now()) / 1000);
  put(byId("code-left"), `It is shown for ${Math.max(0, left)} s.`);
  if (left <= 0) {
    if (code_dialog.open) code_dialog.close();
    forget_code();
  } else setTimeout(count_down, 500);
}

function picture(rows) {
  const size = rows.length + 8;
  const path = rows.flatMap((row, y) => [...row].map((bit, x) => (bit === "1" ? `M${x + 4} ${y + 4}h1v1h-1z` : ""))).join("");
  return draw("svg", { viewBox: `0 0 ${size} ${size}`, role: "img", "aria-label": "QR code of the join code", "shape-rendering": "crispEdges" },
    draw("rect", { width: size, height: size, fill: "#fff" }), draw("path", { d: path, fill: "#000" }));
}
