// A topic's tiers, to scale: which offsets the bucket, the local files and the cache hold, where the
// watermarks stand, and how far each subscription has come.
//
// One offset has the same width in every lane. Something too small to be seen gets two pixels, so
// that it is not missed; its numbers are in its title and in the tables below.

import { h } from "./dom.js";
import { bytes, count, list, plural } from "./words.js";

const LABEL = 66;
const RIGHT = 12;
const LANE = 30;
const GAP = 8;
const SEGMENTS_MAX = 300;
const MARK_NAMES = ["trimmed", "tiered", "synced", "written", "next"];

export const SCALES = [["all", "Whole topic"], ["0.1", "Newest 10 %"], ["0.01", "Newest 1 %"]];

// What is where, half-open: [start, end).
export function segments(topic) {
  const objects = (topic.objects ?? []).map((one) => ({
    kind: "object", name: one.object_id, start: one.start_offset, end: one.end_offset + 1,
    bytes: one.size, format: one.format,
  }));
  const files = (topic.files ?? []).map((one) => ({
    kind: "file", name: one.name, start: one.first_offset, end: one.next_offset,
    bytes: one.bytes, isActive: one.is_active,
  }));
  const cache = topic.cache && topic.cache.next > topic.cache.start
    ? [{ kind: "cache", name: "cache", start: topic.cache.start, end: topic.cache.next, bytes: topic.cache.bytes }]
    : [];
  return { objects, files, cache };
}

export function bounds(topic, scale = "all") {
  const { objects, files, cache } = segments(topic);
  const end = Math.max(topic.watermarks.next, ...[...objects, ...files, ...cache].map((one) => one.end), 0);
  const low = Math.min(topic.earliest ?? 0, ...[...objects, ...files, ...cache].map((one) => one.start));
  const start = Math.min(low, end);
  if (scale === "all") return [start, Math.max(end, start + 1)];
  const part = Math.max(1, Math.ceil((end - start) * Number(scale)));
  return [Math.max(start, end - part), Math.max(end, start + 1)];
}

export function describe(topic) {
  const { objects, files, cache } = segments(topic);
  const sum = (all) => all.reduce((total, one) => total + (one.bytes ?? 0), 0);
  const range = (all) => `offsets ${count(all[0].start)} to ${count(all.at(-1).end)}`;
  const words = [];
  words.push(objects.length
    ? `The bucket has ${range(objects)} in ${plural(objects.length, "object")} (${bytes(sum(objects))}).`
    : "Nothing is in the bucket yet.");
  words.push(files.length
    ? `Local files have ${range(files)} in ${plural(files.length, "file")} (${bytes(sum(files))}).`
    : "There are no local files.");
  words.push(cache.length
    ? `The cache has ${plural(topic.cache.messages, "message")} from offset ${count(cache[0].start)} on (${bytes(topic.cache.bytes)}).`
    : "The cache is empty.");
  const cursors = (topic.subscriptions ?? []).filter((one) => one.cursor !== null && one.cursor !== undefined);
  if (cursors.length) {
    words.push(`Cursors: ${list(cursors.map((one) => `${one.name} at ${count(one.cursor)}`))}.`);
  }
  return words.join(" ");
}

// Labels of marks that stand close together become one.
function grouped(marks, x) {
  const groups = [];
  for (const mark of marks) {
    const last = groups.at(-1);
    if (last && x(mark.at) - x(last.at) < 3) {
      last.names.push(mark.name);
      last.isRough ||= mark.at !== last.at;
      last.at = mark.at;
    } else groups.push({ at: mark.at, names: [mark.name], isRough: false });
  }
  return groups;
}

// Places labels in as few rows as do not overlap.
function placed(labels, width) {
  const ends = [];
  return labels.map((label) => {
    const wide = label.text.length * 7.3 + 14;
    const left = Math.min(Math.max(label.x - wide / 2, 2), Math.max(2, width - wide - 2));
    let row = ends.findIndex((end) => end <= left);
    if (row < 0) row = ends.push(0) - 1;
    ends[row] = left + wide;
    return { ...label, left, wide, row };
  });
}

export function tierMap(topic, { width, scale = "all" }) {
  const [start, end] = bounds(topic, scale);
  const inside = Math.max(60, width - LABEL - RIGHT);
  const x = (offset) => LABEL + ((Math.min(Math.max(offset, start), end) - start) / (end - start)) * inside;
  const { objects, files, cache } = segments(topic);
  const marks = grouped(
    MARK_NAMES.map((name) => ({ name, at: topic.watermarks[name] })).filter((one) => one.at >= start), x);
  const tops = placed(marks.map((one) => ({
    x: x(one.at), at: one.at, text: `${one.names.join(" · ")} ${one.isRough ? "≈ " : ""}${count(one.at)}`, names: one.names,
  })), width);
  const rows = 1 + Math.max(0, ...tops.map((one) => one.row));
  const head = rows * 22 + 8;
  const lanes = [["bucket", objects], ["files", files], ["cache", cache]];
  const lanesEnd = head + lanes.length * (LANE + GAP);
  const cursors = (topic.subscriptions ?? [])
    .filter((one) => one.cursor !== null && one.cursor !== undefined && one.cursor >= start)
    .sort((one, other) => one.cursor - other.cursor);
  const feet = placed(cursors.map((one) => ({
    x: x(one.cursor), text: `${one.name} ${count(one.cursor)}`, name: one.name, at: one.cursor,
    isBlocked: one.blocked !== null && one.blocked !== undefined,
  })), width);
  const feetRows = feet.length ? 1 + Math.max(...feet.map((one) => one.row)) : 0;
  const feetTop = lanesEnd + 12;
  const axisTop = feetTop + feetRows * 22 + (feetRows ? 6 : 0);
  const height = axisTop + 22;

  return h("svg", {
    class: "tier-map", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `Tier map, offsets ${count(start)} to ${count(end)}. ${describe(topic)}`,
    "data-start": start, "data-end": end,
  },
  lanes.map(([name, parts], at) => lane(name, parts, head + at * (LANE + GAP), { x, start, end, inside })),
  // All lines first: labels cover them.
  tops.map((one) => h("line", { key: `stem ${one.names.join()}`, class: "mark-stem", x1: one.x, x2: one.x, y1: 20 + one.row * 22, y2: lanesEnd })),
  feet.map((one) => h("line", { key: `stem of ${one.name}`, class: `cursor-stem${one.isBlocked ? " blocked" : ""}`, x1: one.x, x2: one.x, y1: lanesEnd + 4, y2: feetTop + one.row * 22 + 2 })),
  tops.map((one) => h("g", { key: `mark ${one.names.join()}`, class: "mark", "data-names": one.names.join(" "), "data-at": one.at },
    h("rect", { x: one.left, y: 2 + one.row * 22, width: one.wide, height: 18, rx: 9 }),
    h("text", { x: one.left + one.wide / 2, y: 15 + one.row * 22, "text-anchor": "middle" }, one.text))),
  feet.map((one) => h("g", { key: `cursor ${one.name}`, class: one.isBlocked ? "cursor blocked" : "cursor", "data-name": one.name, "data-at": one.at },
    h("path", { d: `M${one.x} ${lanesEnd - 4}l5 9h-10Z` }),
    h("rect", { x: one.left, y: feetTop + one.row * 22, width: one.wide, height: 18, rx: 4 }),
    h("text", { x: one.left + one.wide / 2, y: feetTop + 13 + one.row * 22, "text-anchor": "middle" }, one.text))),
  h("text", { key: "first", class: "axis", x: LABEL, y: height - 4 }, count(start)),
  h("text", { key: "axis", class: "axis", x: LABEL + inside / 2, y: height - 4, "text-anchor": "middle" }, "offset"),
  h("text", { key: "last", class: "axis", x: LABEL + inside, y: height - 4, "text-anchor": "end" }, count(end)));
}

// Neighbours too narrow to be told apart become one, where there are very many.
function merged(parts, x) {
  if (parts.length <= SEGMENTS_MAX) return parts;
  const made = [];
  for (const one of parts) {
    const last = made.at(-1);
    if (last && last.end === one.start && x(one.end) - x(last.start) < 3) {
      const together = (last.together ?? 1) + 1;
      made[made.length - 1] = {
        ...last, end: one.end, bytes: (last.bytes ?? 0) + (one.bytes ?? 0), together,
        name: `${together} together`, isActive: last.isActive || one.isActive,
      };
    } else made.push(one);
  }
  return made;
}

function lane(name, parts, y, { x, start, end, inside }) {
  const visible = merged(parts.filter((one) => one.end > start && one.start < end), x);
  return h("g", { key: name, class: `lane ${name}` },
    h("text", { class: "lane-name", x: 0, y: y + LANE / 2 + 4 }, name),
    h("rect", { class: "lane-track", x: LABEL, y, width: inside, height: LANE, rx: 4 }),
    visible.map((one) => {
      const left = x(one.start);
      const wide = x(one.end) - left;
      const shown = Math.max(2, wide > 6 ? wide - 1 : wide);
      return h("g", { key: one.name + one.start },
        h("rect", {
          class: `segment ${one.kind}${one.isActive ? " active" : ""}`,
          x: Math.min(left, LABEL + inside - shown).toFixed(2), y, width: shown.toFixed(2), height: LANE, rx: wide > 8 ? 3 : 0,
          "data-kind": one.kind, "data-name": one.name, "data-start": one.start, "data-end": one.end,
        }, h("title", null,
          `${one.name}: offsets ${count(one.start)} to ${count(one.end)}, ${bytes(one.bytes)}`
          + `${one.isActive ? ", written to now" : ""}${one.format ? `, ${one.format}` : ""}`)),
        wide > 74 ? h("text", { class: "segment-text", x: left + wide / 2, y: y + LANE / 2 + 4, "text-anchor": "middle" },
          bytes(one.bytes)) : null);
    }));
}
