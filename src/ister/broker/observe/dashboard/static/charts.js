// Small line charts in SVG, each with its figures in words.

import { h } from "./dom.js";
import { clock } from "./words.js";

const LEFT = 58;
const RIGHT = 8;
const TOP = 10;
const BOTTOM = 22;
// An axis reaches at least this far: with nothing to show, one to 1 B would say nothing.
const LEAST_BYTES = 1024;

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

// Series are {name, tone, points: [[unix ms, value], …]}; `say` puts a value into words.
export function lineChart(title, series, { say, width, isBytes = false, height = 190, now = Date.now(), span = 300_000 }) {
  const inside = Math.max(80, width - LEFT - RIGHT);
  const tall = height - TOP - BOTTOM;
  const highest = highestOf(series);
  const ticks = steps(isBytes ? Math.max(highest, LEAST_BYTES) : highest || 1, isBytes);
  const top = ticks.at(-1);
  const first = now - span;
  const x = (ms) => LEFT + ((Math.max(first, ms) - first) / span) * inside;
  const y = (value) => TOP + tall - (Math.max(0, value) / top) * tall;
  const text = series.map((one) => words(one, say)).join("; ");
  const lines = series.map((one) => {
    const points = one.points.filter(([ms]) => ms >= first).map(([ms, value]) => [x(ms), y(value ?? 0)]);
    if (points.length < 2) return null;
    const area = `${path(points)}L${points.at(-1)[0].toFixed(1)} ${y(0)}L${points[0][0].toFixed(1)} ${y(0)}Z`;
    return h("g", { key: one.name, class: `series ${one.tone}` },
      h("path", { class: "area", d: area }), h("path", { class: "line", d: path(points) }));
  });
  const minutes = [5, 4, 3, 2, 1, 0].map((at) => [now - at * 60_000, at ? `-${at} min` : "now"]);
  const shown = inside < 360 ? minutes.filter((_, at) => at % 2 === 1) : minutes;
  return h("figure", { class: "chart" },
    h("figcaption", null,
      series.map((one) =>
        h("span", { key: one.name, class: "legend" },
          h("span", { class: `swatch ${one.tone}` }), words(one, say)))),
    h("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `${title}, the last five minutes. ${text}.` },
      ticks.map((value) => h("g", { key: `y${value}`, class: "grid" },
        h("line", { x1: LEFT, x2: LEFT + inside, y1: y(value), y2: y(value) }),
        h("text", { x: LEFT - 8, y: y(value) + 4, "text-anchor": "end" }, say(value, true)))),
      shown.map(([ms, label]) =>
        h("text", {
          key: label, class: "axis", x: x(ms), y: height - 5,
          "text-anchor": label === "now" ? "end" : ms === first ? "start" : "middle",
        }, h("title", null, clock(ms)), label)),
      lines));
}

export function sparkline(label, values, tone = "in", width = 120, height = 32) {
  const highest = Math.max(...values, 0) || 1;
  const points = values.map((value, at) =>
    [(at / Math.max(1, values.length - 1)) * width, height - 2 - (value / highest) * (height - 4)]);
  return h("svg", { class: "sparkline", width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true", preserveAspectRatio: "none" },
    points.length > 1
      ? h("g", { class: `series ${tone}` },
        h("path", { class: "area", d: `${path(points)}L${width} ${height}L0 ${height}Z` }),
        h("path", { class: "line", d: path(points) }))
      : h("g", null, h("line", { class: "flat", x1: 0, x2: width, y1: height - 2, y2: height - 2 })));
}
