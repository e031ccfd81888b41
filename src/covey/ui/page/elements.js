// Elements of the page. Texts come from other machines: they are only ever set as text, never parsed.

const SVG = "http://www.w3.org/2000/svg";

export const byId = (id) => document.getElementById(id);

/** Make an element: attributes by name, `on` for listeners, then children that are elements or texts. */
export function make(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** The same for SVG. */
export function draw(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Set a text, and touch nothing if it is the same: selections and readers stay where they are. */
export function put(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function show(element, is_shown) {
  if (element.hidden === Boolean(is_shown)) element.hidden = !is_shown;
}

export function mark(element, name, value) {
  if (value === null || value === undefined || value === false) element.removeAttribute(name);
  else if (element.getAttribute(name) !== String(value)) element.setAttribute(name, String(value));
}

/** Make the children of an element match items, by key and in their order; elements of items that stay are kept. */
export function keyed(parent, items, key_of, build, update) {
  const before = parent.keyed ?? new Map();
  const after = new Map();
  let place = parent.firstElementChild;
  for (const item of items) {
    const key = key_of(item);
    const element = before.get(key) ?? build(item);
    after.set(key, element);
    update(element, item);
    if (element === place) place = place.nextElementSibling;
    else parent.insertBefore(element, place);
  }
  for (const [key, element] of before) if (!after.has(key)) element.remove();
  parent.keyed = after;
}

/** Make the options of a choice match values; the chosen one stays, even if it is not among them now. */
export function options(select, values, chosen) {
  const all = values.some(([value]) => value === chosen) ? values : [...values, [chosen, chosen]];
  keyed(select, all, ([value]) => value, ([value]) => make("option", { value }), (element, [, text]) => put(element, text));
  if (select.value !== chosen) select.value = chosen;
}

/** A command with a button that copies it. */
export function command(text) {
  const button = make("button", { type: "button", class: "copy", "aria-label": `Copy ${text}` }, "copy");
  button.addEventListener("click", () => copy(text, button));
  return make("span", { class: "command" }, make("code", {}, text), button);
}

export async function copy(text, button) {
  const label = button.textContent;
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "copied";
  } catch {
    button.textContent = "not copied";
  }
  setTimeout(() => { button.textContent = label; }, 1500);
}
