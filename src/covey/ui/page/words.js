// Figures as words. What is not known is said so: it is never 0.

export const UNKNOWN = "not known";

/** A number that JSON may have as a word: nan, inf, -inf. */
export const value_of = (raw) => (raw === null || raw === undefined ? null : Number(raw === "inf" ? Infinity : raw === "-inf" ? -Infinity : raw));

export function number(raw, digits = 4) {
  const value = value_of(raw);
  if (value === null) return UNKNOWN;
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (Number.isInteger(value) && Math.abs(value) < 1e15) return grouped(value);
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2);
  return value.toPrecision(size >= 1000 ? Math.max(digits, 5) : digits).replace(/\.?0+$/, "");
}

const grouped = (value) => String(value).replace(/\B(?=(\d{3})+(?!\d))/g, "\u202f");

export function many(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value >= 1e6) return `${(value / 1e6).toPrecision(3)} M`;
  if (value >= 1e4) return `${(value / 1e3).toPrecision(3)} k`;
  return value >= 100 ? grouped(Math.round(value)) : number(value, 3);
}

/** A speed of a link, in bits as links are sold. */
export function bits(rate) {
  if (rate === null || rate === undefined) return UNKNOWN;
  const value = rate * 8;
  if (value >= 1e9) return `${(value / 1e9).toPrecision(3)} Gbit/s`;
  return value >= 1e6 ? `${short(value / 1e6)} Mbit/s` : `${short(value / 1e3)} kbit/s`;
}

/** What is moved now, in bytes. */
export function bytes(rate) {
  if (rate === null || rate === undefined) return UNKNOWN;
  if (rate >= 1e9) return `${(rate / 1e9).toPrecision(3)} GB/s`;
  if (rate >= 1e6) return `${short(rate / 1e6)} MB/s`;
  return rate >= 1e3 ? `${short(rate / 1e3)} kB/s` : `${Math.round(rate)} B/s`;
}

export function memory(size) {
  if (size === null || size === undefined) return UNKNOWN;
  return size >= 1e9 ? `${short(size / 2 ** 30)} GiB` : `${Math.round(size / 2 ** 20)} MiB`;
}

const short = (value) => (value >= 100 ? String(Math.round(value)) : value.toPrecision(value >= 10 ? 2 : 2));

/** A short time: of a step, a round trip. */
export function seconds(value) {
  if (value === null || value === undefined) return UNKNOWN;
  if (value < 0.0995) return `${value < 0.00995 ? (value * 1e3).toFixed(1) : Math.round(value * 1e3)} ms`;
  return value < 9.95 ? `${value.toFixed(2)} s` : `${Math.round(value)} s`;
}

/** A long time: of a run. */
export function lasting(value) {
  if (value === null || value === undefined) return UNKNOWN;
  const whole = Math.max(0, Math.round(value));
  if (whole < 120) return `${whole} s`;
  if (whole < 7200) return `${Math.floor(whole / 60)} min`;
  const hours = Math.floor(whole / 3600);
  return hours < 48 ? `${hours} h ${Math.floor((whole % 3600) / 60)} min` : `${Math.floor(hours / 24)} days`;
}

export const share = (value) => (value === null || value === undefined ? UNKNOWN : `${Math.round(value * 100)} %`);

export const clock = (at) => new Date(at * 1000).toLocaleTimeString([], { hour12: false });

/** "1 rank", "2 ranks". */
export const count = (amount, noun) => `${amount} ${noun}${amount === 1 ? "" : "s"}`;

export const STATES = {
  active: ["●", "active"],
  waiting: ["◌", "waits"],
  late: ["▲", "late"],
  stopped: ["■", "stopped"],
  silent: ["?", "silent"],
  lost: ["✕", "lost"],
  left: ["–", "left"],
  joining: ["+", "joining"],
};
