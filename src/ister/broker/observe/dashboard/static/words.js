// Numbers, sizes and times as people read them.

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const BYTES = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const THOUSANDS = ["", "k", "M", "G", "T"];

export function count(value) {
  return value === null || value === undefined ? "–" : whole.format(value);
}

export function plural(value, one, many = `${one}s`) {
  return `${count(value)} ${value === 1 ? one : many}`;
}

function scaled(value, step, units) {
  let size = Math.abs(value);
  let at = 0;
  while (size >= step - 0.5 && at < units.length - 1) {
    size /= step;
    at += 1;
  }
  const digits = at === 0 ? (size < 10 && size % 1 !== 0 ? 1 : 0) : size < 100 ? 1 : 0;
  return [`${value < 0 ? "-" : ""}${size.toFixed(digits)}`, units[at]];
}

export function bytes(value) {
  if (value === null || value === undefined) return "–";
  const [number, unit] = scaled(value, 1024, BYTES);
  return `${unit === "B" ? whole.format(value) : number} ${unit}`;
}

export function short(value) {
  if (value === null || value === undefined) return "–";
  const [number, unit] = scaled(value, 1000, THOUSANDS);
  return unit ? `${number} ${unit}` : number;
}

export function messageRate(value) {
  if (value === null || value === undefined) return "–";
  const [number, unit] = scaled(value, 1000, THOUSANDS);
  return unit ? `${number} ${unit} msg/s` : `${number} msg/s`;
}

export function byteRate(value) {
  return value === null || value === undefined ? "–" : `${bytes(Math.round(value))}/s`;
}

export function span(seconds) {
  const value = Math.max(0, seconds);
  if (value > 0 && value < 0.1) return "under 0.1 s";
  if (value < 60) return `${value < 10 && value % 1 !== 0 ? value.toFixed(1) : Math.round(value)} s`;
  if (value < 3600) return `${Math.round(value / 60)} min`;
  if (value < 2 * 86400) return `${(value / 3600).toFixed(1)} h`;
  return `${(value / 86400).toFixed(1)} days`;
}

export function ago(ms, now = Date.now()) {
  return `${span(Math.round((now - ms) / 1000))} ago`;
}

const two = (value) => String(value).padStart(2, "0");

export function day(ms) {
  const at = new Date(ms);
  return `${at.getFullYear()}-${two(at.getMonth() + 1)}-${two(at.getDate())}`;
}

export function clock(ms, withMilliseconds = false) {
  const at = new Date(ms);
  const time = `${two(at.getHours())}:${two(at.getMinutes())}:${two(at.getSeconds())}`;
  return withMilliseconds ? `${time}.${String(at.getMilliseconds()).padStart(3, "0")}` : time;
}

export function moment(ms, withMilliseconds = false) {
  if (ms === null || ms === undefined || Number.isNaN(ms)) return "–";
  return `${day(ms)} ${clock(ms, withMilliseconds)}`;
}

// Names of settings keep their small letters.
export function sentence(words) {
  const text = String(words);
  return text && !/^\w+[._]\w/.test(text) ? text[0].toUpperCase() + text.slice(1) : text;
}

export function list(words) {
  if (words.length < 2) return words.join("");
  return `${words.slice(0, -1).join(", ")} and ${words.at(-1)}`;
}
