// Line charts in SVG, each with its figures in words, and values at the pointer or by arrow keys.
//
// A chart is drawn anew every two seconds. Its reader (the line at one moment, and the box with the
// values) is not part of that description: it is drawn into elements that are described as empty, and
// put back by `refreshReader`.

import { h } from "./dom.js";
import { clock, day } from "./words.js";

const LEFT = 58;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 22;
const SVG = "http://www.w3.org/2000/svg";
// An axis reaches at least this far: with nothing to show, one to 1 B would say nothing.
const LEAST_BYTES = 1024;

const MINUTE = 60_000;
const HOUR = 60 * MINUTE;
const SPANS = {
  "5m": { ms: 5 * MINUTE, words: "the last five minutes" },
  "1h": { ms: HOUR, words: "the last hour" },
  "1d": { ms: 24 * HOUR, words: "the last day" },
};

// About four lines at round values; of bytes, at round KiB, MiB and so on.
function steps(highest, isBytes) {
  const rough = Math.max(highest, 1e-9) / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = isBytes
    ? 2 ** Math.max(0, Math.ceil(Math.log2(rough)))
    : [1, 2, 2.5, 5, 10].map((one) => one * power).find((one) => one >= rough) ?? 10 * power;
  return [0, 1, 2, 3, 4].map((at) => at * step).filter((at, i) => i === 0 || at - step < highest);
}

function path(points) {
  return points.map(([x, y], at) => `${at ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

function highestOf(series) {
  return series.reduce((most, one) =>
    one.points.reduce((so, [, value]) => Math.max(so, value ?? 0), most), 0);
}

function words(one, say) {
  const values = one.points.map(([, value]) => value ?? 0);
  if (!values.length) return `${one.name}: no figures yet`;
  return `${one.name}: ${say(values.at(-1))} now, ${say(Math.max(...values))} at most`;
}

// Where the broker was down there are no points, and no line.
function unbroken(points, gap) {
  const parts = [];
  points.forEach((point, at) => {
    if (!at || point[0] - points[at - 1][0] > gap) parts.push([]);
    parts.at(-1).push(point);
  });
  return parts;
}

function axis(window, now, isNarrow) {
  if (window === "5m") {
    const minutes = isNarrow ? [4, 2, 0] : [5, 4, 3, 2, 1, 0];
    return minutes.map((at) => [now - at * MINUTE, at ? `-${at} min` : "now"]);
  }
  const step = window === "1h" ? (isNarrow ? 20 : 10) * MINUTE : (isNarrow ? 8 : 4) * HOUR;
  const zone = new Date(now).getTimezoneOffset() * MINUTE;
  const last = Math.floor((now - zone) / step) * step + zone;
  const found = [];
  for (let at = last; at > now - SPANS[window].ms; at -= step) found.unshift([at, clock(at).slice(0, 5)]);
  return found;
}

// Series are {name, tone, points: [[unix ms, value], …]}; `say` puts a value into words.
export function lineChart(title, series, { say, width, isBytes = false, height = 190, now = Date.now(), window = "5m", every = 2 }) {
  const { ms: span, words: spanWords } = SPANS[window];
  const inside = Math.max(80, width - LEFT - RIGHT);
  const tall = height - TOP - BOTTOM;
  const first = now - span;
  const shown = series.map((one) => ({ ...one, points: one.points.filter(([ms]) => ms >= first) }));
  const highest = highestOf(shown);
  const ticks = steps(isBytes ? Math.max(highest, LEAST_BYTES) : highest || 1, isBytes);
  const top = ticks.at(-1);
  const x = (ms) => LEFT + ((Math.max(first, ms) - first) / span) * inside;
  const y = (value) => TOP + tall - (Math.max(0, value) / top) * tall;
  const text = shown.map((one) => words(one, say)).join("; ");
  const gap = 2500 * Math.max(every, 20);
  const lines = shown.map((one) => h("g", { key: one.name, class: `series ${one.tone}` },
    unbroken(one.points, gap).map((part) => {
      const points = part.map(([ms, value]) => [x(ms), y(value ?? 0)]);
      if (points.length < 2) return h("circle", { class: "dot", cx: points[0][0], cy: points[0][1], r: 2 });
      const area = `${path(points)}L${points.at(-1)[0].toFixed(1)} ${y(0)}L${points[0][0].toFixed(1)} ${y(0)}Z`;
      return [h("path", { class: "area", d: area }), h("path", { class: "line", d: path(points) })];
    })));
  const reading = { title, series: shown, say, x, y, width, top: TOP, bottom: TOP + tall, window };
  const times = shown[0]?.points ?? [];
  return h("figure", { class: "chart" },
    h("figcaption", null,
      shown.map((one) =>
        h("span", { key: one.name, class: "legend" },
          h("span", { class: `swatch ${one.tone}` }), words(one, say)))),
    h("div", { class: "plot" },
      h("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}, ${spanWords}. ${text}.` },
        ticks.map((value) => h("g", { key: `y${value}`, class: "grid" },
          h("line", { x1: LEFT, x2: LEFT + inside, y1: y(value), y2: y(value) }),
          h("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, say(value, true)))),
        axis(window, now, inside < 360).map(([ms, label]) =>
          h("text", {
            key: label, class: "axis", x: x(ms), y: height - 5,
            "text-anchor": x(ms) > LEFT + inside - 16 ? "end" : x(ms) < LEFT + 16 ? "start" : "middle",
          }, label)),
        lines,
        h("g", { key: "reader", class: "reader" })),
      times.length ? h("div", {
        key: "handle", class: "handle", tabindex: 0, role: "slider", "aria-label": `${title}: value at a time`,
        "aria-valuemin": 0, "aria-valuemax": times.length - 1, "aria-valuenow": times.length - 1,
        "aria-valuetext": spoken(reading, times.length - 1),
        onread: reading,
        onpointermove: (event) => readAt(event.currentTarget, nearest(reading, event)),
        onpointerdown: (event) => readAt(event.currentTarget, nearest(reading, event)),
        onpointerleave: (event) => { if (document.activeElement !== event.currentTarget) stopReading(); },
        onfocus: (event) => { if (reader.node !== event.currentTarget) readAt(event.currentTarget, times.length - 1); },
        onblur: stopReading,
        onkeydown: (event) => steer(event),
      }) : h("p", { key: "none", class: "no-points note" }, "No data for this time range."),
      h("div", { key: "tip", class: "tip", "aria-hidden": "true" })));
}

// -- the reader -----------------------------------------------------------------------------

// Which chart is read, and at which time: charts move on, and the time stays.
const reader = { node: null, ms: 0 };

function nearest({ series, x }, event) {
  const box = event.currentTarget.getBoundingClientRect();
  const at = event.clientX - box.left;
  const { points } = series[0];
  let best = 0;
  points.forEach(([ms], i) => { if (Math.abs(x(ms) - at) < Math.abs(x(points[best][0]) - at)) best = i; });
  return best;
}

function steer(event) {
  const node = event.currentTarget;
  const { points } = node.onread.series[0];
  const now = reader.node === node ? indexOf(points, reader.ms) : points.length - 1;
  const step = event.shiftKey ? 10 : 1;
  const to = {
    ArrowLeft: now - step, ArrowDown: now - step, ArrowRight: now + step, ArrowUp: now + step,
    Home: 0, End: points.length - 1, PageDown: now - 10, PageUp: now + 10,
  }[event.key];
  if (event.key === "Escape" && reader.node === node) stopReading();
  else if (to === undefined) return;
  else readAt(node, Math.max(0, Math.min(points.length - 1, to)));
  event.preventDefault();
}

function indexOf(points, ms) {
  let best = 0;
  points.forEach(([at], i) => { if (Math.abs(at - ms) < Math.abs(points[best][0] - ms)) best = i; });
  return best;
}

function timeWords(ms, window) {
  return window === "1d" ? `${day(ms).slice(5)} ${clock(ms).slice(0, 5)}` : clock(ms);
}

function spoken({ series, say, window }, at) {
  const ms = series[0].points[at]?.[0];
  const values = series.map((one) => `${one.name} ${say(one.points[at]?.[1] ?? 0)}`);
  return ms === undefined ? "" : `${timeWords(ms, window)}: ${values.join(", ")}`;
}

function svg(tag, attributes) {
  const node = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function line(className, ...children) {
  const node = document.createElement("span");
  node.className = className;
  node.append(...children);
  return node;
}

function readAt(node, at) {
  if (reader.node !== null && reader.node !== node) stopReading();
  const reading = node.onread;
  const { series, say, x, y, window } = reading;
  const ms = series[0].points[at][0];
  Object.assign(reader, { node, ms });
  const left = x(ms);
  const [layer, tip] = [node.parentNode.querySelector(".reader"), node.parentNode.querySelector(".tip")];
  layer.replaceChildren(
    svg("line", { x1: left, x2: left, y1: reading.top, y2: reading.bottom }),
    ...series.map((one) => svg("circle", { class: one.tone, cx: left, cy: y(one.points[at]?.[1] ?? 0), r: 4 })),
  );
  tip.replaceChildren(
    line("tip-time", timeWords(ms, window)),
    ...series.map((one) => line("tip-value", line(`swatch ${one.tone}`), line("", one.name), line("tip-number", say(one.points[at]?.[1] ?? 0)))),
  );
  tip.classList.add("shown");
  const wide = tip.offsetWidth;
  tip.style.left = `${Math.max(0, left + 12 + wide > reading.width ? left - 12 - wide : left + 12)}px`;
  node.setAttribute("aria-valuenow", at);
  node.setAttribute("aria-valuetext", spoken(reading, at));
}

function stopReading() {
  const { node } = reader;
  reader.node = null;
  if (!node?.parentNode) return;
  node.parentNode.querySelector(".reader").replaceChildren();
  node.parentNode.querySelector(".tip").classList.remove("shown");
}

// After the page was drawn anew: the same time, where that is now.
export function refreshReader() {
  const { node, ms } = reader;
  if (node === null) return;
  if (!node.isConnected) reader.node = null;
  else readAt(node, indexOf(node.onread.series[0].points, ms));
}

// -- small lines ----------------------------------------------------------------------------

// All of them have the same length of time: fewer values begin further right.
export function sparkline(values, { tone = "in", width = 120, height = 32, slots = 60, title = "" } = {}) {
  const last = values.slice(-slots);
  const highest = Math.max(...last, 0) || 1;
  const points = last.map((value, at) =>
    [((slots - last.length + at) / (slots - 1)) * width, height - 2 - (value / highest) * (height - 4)]);
  return h("svg", { class: "sparkline", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", preserveAspectRatio: "none" },
    title ? h("title", null, title) : null,
    points.length > 1
      ? h("g", { class: `series ${tone}` },
        h("path", { class: "area", d: `${path(points)}L${width} ${height}L${points[0][0].toFixed(1)} ${height}Z` }),
        h("path", { class: "line", d: path(points) }))
      : h("g", null, h("line", { class: "flat", x1: 0, x2: width, y1: height - 2, y2: height - 2 })));
}
