// What happened to the run, the newest first.

import { byId, keyed, make, mark, put, show } from "./elements.js";
import { clock } from "./words.js";

const SIGNS = { lost: "✕", joined: "+", left: "–", checkpoint: "⬓", plan: "↹", codec: "≋", moved: "⇄" };
const list = document.querySelector(".happenings");

export function show_happenings(run) {
  const happenings = [...(run?.happenings ?? [])].reverse();
  const seen = new Map();
  const items = happenings.map((each) => {
    const name = `${each.at} ${each.kind} ${each.text}`;
    seen.set(name, (seen.get(name) ?? 0) + 1);
    return [`${name} ${seen.get(name)}`, each];
  });
  keyed(list, items, ([key]) => key, build, update);
  show(byId("no-happenings"), items.length === 0);
}

function build() {
  return make("li", {}, make("time"), make("span", { class: "sign", "aria-hidden": "true" }), make("span", { class: "kind" }), make("span", { class: "text" }));
}

function update(element, [, happening]) {
  const [time, sign, kind, text] = element.children;
  mark(element, "class", `${happening.level} ${happening.kind}`);
  put(time, clock(happening.at));
  mark(time, "datetime", new Date(happening.at * 1000).toISOString());
  put(sign, SIGNS[happening.kind] ?? "·");
  put(kind, happening.kind);
  put(text, happening.text);
}
