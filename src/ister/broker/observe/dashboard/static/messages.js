// The messages of a topic, from an offset or a time on.
//
// The list stays until the user requests another: messages do not move while they are read.
// Only the line that says how many are new changes.

import { get, topicPath } from "./api.js";
import { h } from "./dom.js";
import { badge, choice, empty, facts, table } from "./parts.js";
import { bestMode, MODES, show } from "./payload.js";
import { schemaWords, topicHead } from "./topic.js";
import { bytes, count, moment, plural } from "./words.js";

const LIMITS = [25, 50, 100, 500];
const BRIEF = 160;

function asked(route) {
  const { start = "", end = "", limit = "50" } = route.params;
  return { start, end, limit: LIMITS.includes(Number(limit)) ? Number(limit) : 50 };
}

// An offset that is not there is said above the form, where another one can be given.
function refused(error) {
  if (error.status !== 400) throw error;
  return { messages: [], next: null, end: null, error: { error: error.message, hint: error.hint } };
}

function isReadable(topic) {
  return !topic.partitions?.length && topic.is_reliable !== false && topic.rights?.consume !== false;
}

export const page = {
  title: (route) => `Messages of ${route.topic}`,

  async load(route, state, signal) {
    const topic = await get(topicPath(route.topic), {}, signal);
    const question = JSON.stringify(asked(route));
    if (isReadable(topic) && state.question !== question) {
      const { start, end, limit } = asked(route);
      // `latest` is the newest ones, those before `end` where that is given.
      const found = await get(`${topicPath(route.topic)}/messages`, { start: start || "latest", end, limit }, signal).catch(refused);
      Object.assign(state, { question, found, opened: new Set() });
    }
    return topic;
  },

  view(topic, ctx) {
    const head = topicHead(ctx.route, topic, "messages");
    if (topic.partitions?.length) {
      return [head, empty("A partitioned topic holds no messages itself; its partitions do.",
        h("ul", null, topic.partitions.map((one) => h("li", { key: one }, h("a", { href: `#/topics${one}/messages` }, one)))))];
    }
    if (topic.is_reliable === false) return [head, empty("This topic is not reliable: messages are not stored.")];
    if (topic.rights?.consume === false) {
      return [head, empty("You may see this topic, but not its messages.", h("p", null, "Reading them needs the right to consume."))];
    }
    const { found } = ctx.state;
    if (!found) return [head, empty("No broker has this topic open.")];
    const mode = ctx.state.mode ?? "auto";
    return [
      head,
      questions(topic, ctx, mode),
      range(topic, ctx, found),
      found.error
        ? h("p", { key: "error", class: "banner bad" }, `Not everything could be read: ${found.error.error}${found.error.hint ? `; ${found.error.hint}` : ""}.`)
        : null,
      h("section", { key: "messages", class: "panel flush", "aria-label": "Messages" }, listed(ctx, found, mode)),
      pager(topic, ctx, found),
    ];
  },
};

function go(ctx, params) {
  const query = new URLSearchParams(Object.entries(params).filter(([, value]) => value !== "" && value !== null)).toString();
  const hash = `${ctx.route.hash}${query ? `?${query}` : ""}`;
  if (hash === (location.hash || "#/")) {
    ctx.state.question = null;
    ctx.reload();
  } else ctx.navigate(hash);
}

function questions(topic, ctx, mode) {
  const { start, limit } = asked(ctx.route);
  const isTime = start.startsWith("t:");
  const submit = (event) => {
    event.preventDefault();
    const form = event.target.elements;
    const by = form.by.value;
    let from = "";
    if (by === "offset") from = form.offset.value.trim();
    if (by === "time" && form.time.value) from = `t:${new Date(form.time.value).toISOString()}`;
    if (by === "earliest") from = "earliest";
    go(ctx, { start: from, limit: form.limit.value });
  };
  const choose = (value) => (event) => { event.target.closest("form").elements.by.value = value; };
  const local = isTime ? localTime(start.slice(2)) : "";
  const offset = /^\d+$/.test(start) ? start : "";
  const by = isTime ? "time" : offset ? "offset" : start === "earliest" ? "earliest" : "newest";
  return h("section", { key: "ask", class: "panel ask", "aria-labelledby": "ask" },
    h("h2", { id: "ask", class: "hidden-text" }, "Which messages"),
    h("form", { key: `form ${start} ${limit}`, onsubmit: submit },
      h("div", { class: "field" }, h("label", { for: "by" }, "From"),
        h("select", { id: "by", name: "by" },
          [["newest", "the newest"], ["earliest", "the earliest"], ["offset", "an offset"], ["time", "a time"]]
            .map(([value, words]) => h("option", { key: value, value, selected: value === by }, words)))),
      h("div", { class: "field" }, h("label", { for: "offset" }, "Offset"),
        h("input", { id: "offset", name: "offset", type: "number", min: 0, step: 1, value: offset, inputmode: "numeric", placeholder: String(topic.earliest ?? 0), oninput: choose("offset") })),
      h("div", { class: "field" }, h("label", { for: "time" }, "Publish time"),
        h("input", { id: "time", name: "time", type: "datetime-local", step: 1, value: local, oninput: choose("time") })),
      h("div", { class: "field" }, h("label", { for: "limit" }, "At most"),
        h("select", { id: "limit", name: "limit" }, LIMITS.map((one) => h("option", { key: one, value: one, selected: one === limit }, String(one))))),
      h("button", { type: "submit", class: "primary" }, "Show")),
    choice("Show payloads as", "mode", MODES, mode, (value) => {
      ctx.state.mode = value;
      ctx.update();
    }));
}

function localTime(iso) {
  const at = new Date(/^\d+$/.test(iso) ? Number(iso) : iso);
  return Number.isNaN(at.getTime()) ? "" : moment(at.getTime()).replace(" ", "T");
}

function range(topic, ctx, found) {
  const fresh = topic.watermarks.next - (found.end ?? topic.watermarks.next);
  return h("p", { key: "range", class: "range", role: "status" },
    `Offsets ${count(topic.earliest)} to ${count(topic.watermarks.next)} can be read.`,
    fresh > 0
      ? [` ${plural(fresh, "message")} came since you looked. `,
        h("button", { type: "button", onclick: () => go(ctx, { limit: ctx.route.params.limit ?? "" }) }, "Show the newest")]
      : null);
}

const TIERS = { cache: "cache", files: "file", bucket: "bucket" };

function listed(ctx, found, mode) {
  const { opened } = ctx.state;
  const toggle = (offset) => () => {
    if (!opened.delete(offset)) opened.add(offset);
    ctx.update();
  };
  return table("Messages", [
    {
      title: "Offset", kind: "name number",
      of: (one) => h("button", {
        type: "button", class: "toggle", "aria-expanded": opened.has(one.offset) ? "true" : "false",
        "aria-label": `Message ${one.offset}`, onclick: toggle(one.offset),
      }, h("span", { class: "chevron", "aria-hidden": "true" }, "›"), count(one.offset)),
    },
    { title: "Published", kind: "time", of: (one) => moment(one.publish_time, true) },
    { title: "Key", of: (one) => one.routing_key ?? "–" },
    { title: "Size", kind: "number", of: (one) => bytes(one.size) },
    { title: "Read from", of: (one) => badge(TIERS[one.tier] ?? one.tier ?? "–", `tier-${one.tier}`) },
    { title: "Payload", kind: "payload", of: (one) => brief(one, mode) },
  ], found.messages, {
    keyOf: (one) => one.offset,
    extra: (one) => (opened.has(one.offset) ? details(one, mode) : null),
    empty: empty("No messages here. Choose another offset or time."),
  });
}

function brief(message, mode) {
  if (message.size === 0) return h("span", { class: "note" }, "empty");
  const { text, problem } = show(message, mode, { isBrief: true });
  if (problem) return h("span", { class: "note" }, problem);
  return h("code", { class: "brief" }, text.length > BRIEF ? `${text.slice(0, BRIEF)}…` : text);
}

function details(message, mode) {
  const { text, problem, used } = show(message, mode);
  const attributes = Object.entries(message.attributes ?? {});
  const how = { decoded: "decoded by its schema", json: "as JSON", text: "as text", hex: "as bytes" }[used];
  return h("div", { class: "message" },
    facts([
      ["Producer", message.producer_name || "–"],
      ["Routing key", message.routing_key ?? "–"],
      ["Schema", message.schema ? schemaWords(message.schema) : "none"],
      ["Size", `${count(message.size)} bytes`],
    ]),
    attributes.length
      ? [h("h3", null, "Attributes"), facts(attributes.map(([name, value]) => [name, h("code", null, String(value))]))]
      : null,
    h("h3", null, `Payload, ${how}`),
    problem
      ? h("p", { class: "banner attention" }, problem, mode === "auto" ? "" : ` “Best” shows it ${bestMode(message) === "hex" ? "as bytes" : `as ${bestMode(message)}`}.`)
      : h("pre", { class: used, tabindex: 0, "aria-label": `Payload of message ${message.offset}` }, text),
    message.is_cut ? h("p", { class: "note" }, "Only the first 64 KiB are shown.") : null);
}

function pager(topic, ctx, found) {
  const all = found.messages;
  const { limit } = asked(ctx.route);
  const first = all.length ? all[0].offset : null;
  const older = first !== null && first > (topic.earliest ?? 0);
  const newer = found.next !== null && found.next !== undefined && found.next < topic.watermarks.next;
  return h("div", { key: "pager", class: "pager" },
    older ? h("button", { type: "button", onclick: () => go(ctx, { start: "latest", end: first, limit }) }, "Older") : null,
    newer ? h("button", { type: "button", onclick: () => go(ctx, { start: found.next, limit }) }, "Newer") : null);
}
