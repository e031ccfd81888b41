// The token, and one stream of overviews for all tabs.
//
// A browser opens six connections to a host, so one tab reads the stream (it holds a Web Lock), and passes overviews on
// to the others. A tab without a token asks the others for it: only pages of this origin can answer.

const KEY = "covey-token";
const STREAM_LOCK = "covey-stream";
const TOKEN_WAIT = 700;
const RETRY_EVERY = 1000;
const STALE_AFTER = 3500;

const channel = new BroadcastChannel("covey");
const listeners = { overview: [], state: [] };
let token = sessionStorage.getItem(KEY);
let heard = performance.now();
let state = "connecting";
let latest = null;

export const on_overview = (listener) => listeners.overview.push(listener);
export const on_state = (listener) => listeners.state.push(listener);

/** Seconds since the last overview came to this tab. */
export const silence = () => (performance.now() - heard) / 1000;

function become(next, detail = "") {
  if (next === "refused") {
    token = null;
    sessionStorage.removeItem(KEY);
  }
  if (next === state && next !== "live") return;
  state = next;
  for (const listener of listeners.state) listener(next, detail);
}

function take(overview) {
  if (!token) return;
  heard = performance.now();
  latest = overview;
  become("live");
  for (const listener of listeners.overview) listener(overview);
}

channel.onmessage = ({ data }) => {
  if (data.kind === "overview") take(data.overview);
  else if (data.kind === "state" && token) become(data.state, data.detail);
  else if (data.kind === "who" && token) {
    channel.postMessage({ kind: "token", token });
    if (latest) channel.postMessage({ kind: "overview", overview: latest });
    if (state !== "live") channel.postMessage({ kind: "state", state, detail: "" });
  }
  else if (data.kind === "token" && !token) remember(data.token);
};

let told_token = () => {};

function remember(given) {
  token = given;
  sessionStorage.setItem(KEY, given);
  told_token();
}

const headers = () => ({ Authorization: `Bearer ${token}` });

/** Ask for something below /api/; an Error with the words of the server if it refuses. */
export async function ask(path) {
  return answered(await fetch(path, { headers: headers(), cache: "no-store" }));
}

/** Do something: only by POST, with JSON. */
export async function act(path, body) {
  const answer = await fetch(path, {
    method: "POST",
    headers: { ...headers(), "Content-Type": "application/json" },
    body: JSON.stringify(body),
  });
  return answered(answer);
}

async function answered(answer) {
  if (answer.ok) return answer.json();
  if (answer.status === 401) become("refused");
  throw new Error((await answer.text()).trim() || `the server says ${answer.status}`);
}

/** Enter with the ticket of the link, with the token of this tab, or with that of another tab; then show overviews. */
export async function begin() {
  const ticket = new URLSearchParams(location.hash.slice(1)).get("ticket");
  if (ticket) {
    history.replaceState(null, "", "/");
    try {
      const answer = await fetch("/api/enter", {
        method: "POST",
        headers: { "Content-Type": "application/json" },
        body: JSON.stringify({ ticket }),
      });
      if (answer.ok) remember((await answer.json()).token);
      else if (!token) return become("refused", "used");
    } catch {
      become("offline");
    }
  }
  if (token) channel.postMessage({ kind: "who" });
  else await asked_others();
  if (!token) return become("refused", "none");
  setInterval(watch_silence, 500);
  navigator.locks.request(STREAM_LOCK, read_for_all);
}

function asked_others() {
  return new Promise((resolve) => {
    told_token = resolve;
    channel.postMessage({ kind: "who" });
    setTimeout(resolve, TOKEN_WAIT);
  });
}

function watch_silence() {
  if (state === "live" && performance.now() - heard > STALE_AFTER) become("stale");
}

function tell(next, detail = "") {
  become(next, detail);
  channel.postMessage({ kind: "state", state: next, detail });
}

async function read_for_all() {
  while (token) {
    try {
      const answer = await fetch("/api/overviews", { headers: headers(), cache: "no-store" });
      if (answer.status === 401) return tell("refused");
      if (answer.ok) await read_lines(answer.body);
      if (state !== "refused") tell("offline");
    } catch {
      tell("offline");
    }
    await new Promise((resolve) => setTimeout(resolve, RETRY_EVERY));
  }
}

async function read_lines(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    const last = lines.at(-1);
    if (last) {
      const overview = JSON.parse(last);
      take(overview);
      channel.postMessage({ kind: "overview", overview });
    }
  }
}
