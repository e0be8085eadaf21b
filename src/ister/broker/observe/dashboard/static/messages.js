// The messages of a topic, newest first: from an offset or a time on, by key, attribute and content.
//
// The list stays until the user requests another, so that messages do not move while they are read.
// The line above says how many are new; a live tail adds them at the top.

import { get, download, topicPath } from "./api.js";
import { askPublish } from "./changes.js";
import { h } from "./dom.js";
import { actionButton, badge, choice, empty, facts, table } from "./parts.js";
import { bestMode, MODES, show } from "./payload.js";
import { schemaWords, topicHead } from "./topic.js";
import { bytes, count, moment, plural } from "./words.js";

const LIMITS = [25, 50, 100, 500];
const BRIEF = 160;
const TAIL_MAX = 500;
const FILTERS = ["key", "attribute", "contains", "where"];

function asked(route) {
  const { start = "", end = "", limit = "50" } = route.params;
  return { start, end, limit: LIMITS.includes(Number(limit)) ? Number(limit) : 50 };
}

function filters(route) {
  return Object.fromEntries(FILTERS.map((name) => [name, route.params[name] ?? ""]).filter(([, value]) => value));
}

// An offset that is not there is said above the form, where another one can be given.
function refused(error) {
  if (error.status !== 400) throw error;
  return { messages: [], next: null, end: null, error: { error: error.message, hint: error.hint } };
}

function isReadable(topic) {
  return !topic.partitions?.length && topic.is_reliable !== false && topic.rights?.consume !== false;
}

// What came since: at the top of the list, and the oldest leave it.
async function addNew(route, state, signal) {
  const { found } = state;
  if (found.error || found.next === null || found.next === undefined) return;
  const more = await get(`${topicPath(route.topic)}/messages`, { start: found.next, limit: TAIL_MAX, ...filters(route) }, signal);
  const messages = [...found.messages, ...more.messages].slice(-TAIL_MAX);
  state.found = { ...found, messages, next: more.next, end: more.end };
}

export const page = {
  title: (route) => `Messages of ${route.topic}`,

  async load(route, state, signal) {
    const topic = await get(topicPath(route.topic), {}, signal);
    if (!isReadable(topic)) return topic;
    const { start, end, limit } = asked(route);
    const question = JSON.stringify([start, end, limit, filters(route)]);
    if (state.question !== question) {
      // `latest` is the newest ones, those before `end` where that is given.
      const found = await get(`${topicPath(route.topic)}/messages`, { start: start || "latest", end, limit, ...filters(route) }, signal).catch(refused);
      if (state.question !== undefined && (start || end)) state.isTail = false;
      Object.assign(state, { question, found, opened: new Set() });
    } else if (state.isTail) await addNew(route, state, signal);
    return topic;
  },

  view(topic, ctx) {
    const head = topicHead(ctx.route, topic, "messages", ctx);
    if (topic.partitions?.length) {
      return [head, empty("A partitioned topic holds no messages itself; its partitions do.",
        h("ul", null, topic.partitions.map((one) => h("li", { key: one }, h("a", { href: `#/topics${one}/messages` }, one)))))];
    }
    if (topic.is_reliable === false) return [head, empty("This topic is not reliable: messages are not stored.")];
    if (topic.rights?.consume === false) {
      return [head, empty("You may see this topic, but not its messages.", h("p", null, "Reading them needs the permission consume."))];
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
  const wanted = filters(ctx.route);
  const isTime = start.startsWith("t:");
  const submit = (event) => {
    event.preventDefault();
    const form = event.target.elements;
    const by = form.by.value;
    let from = "";
    if (by === "offset") from = form.offset.value.trim();
    if (by === "time" && form.time.value) from = `t:${new Date(form.time.value).toISOString()}`;
    if (by === "earliest") from = "earliest";
    go(ctx, { start: from, limit: form.limit.value, ...Object.fromEntries(FILTERS.map((name) => [name, form[name].value.trim()])) });
  };
  const choose = (value) => (event) => { event.target.closest("form").elements.by.value = value; };
  const local = isTime ? localTime(start.slice(2)) : "";
  const offset = /^\d+$/.test(start) ? start : "";
  const by = isTime ? "time" : offset ? "offset" : start === "earliest" ? "earliest" : "newest";
  const text = (name, label, placeholder, more = {}) => h("div", { class: "field" }, h("label", { for: name }, label),
    h("input", { id: name, name, type: "search", value: wanted[name] ?? "", placeholder, autocomplete: "off", spellcheck: "false", ...more }));
  const others = [
    text("key", "Key", "customer-*"), text("attribute", "Attribute", "source=web"), text("where", "JSON condition", "total > 100")];
  const isNarrow = ctx.width < 640;
  return h("section", { key: "ask", class: "panel ask", "aria-labelledby": "ask" },
    h("h2", { id: "ask", class: "hidden-text" }, "Which messages"),
    h("form", { key: `form ${start} ${limit} ${isNarrow} ${JSON.stringify(wanted)}`, onsubmit: submit },
      h("div", { class: "fields" },
        text("contains", "Contains", "text in the payload", { "data-filter": true }), isNarrow ? null : others),
      isNarrow
        ? h("details", { class: "more-filters", open: Object.keys(wanted).some((name) => name !== "contains") },
          h("summary", null, "More filters"), h("div", { class: "fields" }, others))
        : null,
      h("div", { class: "fields" },
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
        h("button", { type: "submit", class: "primary" }, "Show"),
        Object.keys(wanted).length ? h("button", { key: "clear", type: "button", class: "quiet", onclick: () => go(ctx, { start, limit }) }, "Clear filters") : null)),
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
  const isTail = ctx.state.isTail ?? false;
  const fresh = topic.watermarks.next - (found.end ?? topic.watermarks.next);
  const isFiltered = Object.keys(filters(ctx.route)).length > 0;
  const toggle = () => {
    ctx.state.isTail = !isTail;
    const { limit } = ctx.route.params;
    // A tail begins at the end.
    if (!isTail) go(ctx, { limit: limit ?? "", ...filters(ctx.route) });
    else ctx.update();
  };
  return h("div", { key: "range", class: "range" },
    h("p", { role: "status" },
      `Offsets ${count(topic.earliest)} to ${count(topic.watermarks.next)} can be read.`,
      isFiltered && !found.error ? ` ${plural(found.messages.length, "match", "matches")}${found.scanned ? ` in ${plural(found.scanned, "message")}` : ""}.` : null,
      fresh > 0 && !isTail
        ? [` ${plural(fresh, "message")} arrived since. `,
          h("button", { type: "button", onclick: () => go(ctx, { limit: ctx.route.params.limit ?? "", ...filters(ctx.route) }) }, "Show the newest")]
        : null),
    h("div", { class: "buttons" },
      h("button", { type: "button", class: "switch", "aria-pressed": String(isTail), onclick: toggle },
        h("span", { class: `dot ${isTail ? "ok" : "plain"}` }), "Live tail"),
      h("button", { type: "button", onclick: () => save(ctx) }, "Download"),
      actionButton("Publish…", () => askPublish(ctx, topic), {
        label: "Publish a message",
        refusal: topic.rights?.produce === false ? "You may not publish: this needs the permission produce" : "",
      })));
}

async function save(ctx) {
  const { start, end } = asked(ctx.route);
  try {
    const { name, messages, next } = await download(`${topicPath(ctx.route.topic)}/messages/download`,
      { start: start || "latest", end, ...filters(ctx.route) });
    ctx.toast(`${plural(messages, "message")} downloaded as ${name}.${start && messages === 10_000 ? ` Continue at offset ${count(next)}.` : ""}`);
  } catch (error) {
    ctx.toast(`Not downloaded: ${error.message}`, "bad");
  }
}

const TIERS = { cache: "cache", files: "file", bucket: "bucket" };

function listed(ctx, found, mode) {
  const { opened } = ctx.state;
  const toggle = (offset) => () => {
    if (!opened.delete(offset)) opened.add(offset);
    ctx.update();
  };
  return table("Messages, newest first", [
    {
      title: "Offset", kind: "name number",
      of: (one) => h("button", {
        type: "button", class: "toggle", "aria-expanded": opened.has(one.offset) ? "true" : "false",
        "aria-label": `Message ${one.offset}`, onclick: toggle(one.offset),
      }, h("span", { class: "chevron", "aria-hidden": "true" }, "›"), count(one.offset)),
    },
    { title: "Published", kind: "time", of: (one) => moment(one.publish_time, true) },
    { title: "Key", of: (one) => one.routing_key ?? "–" },
    { title: "Size", kind: "number wide-only", of: (one) => bytes(one.size) },
    { title: "Read from", kind: "wide-only", of: (one) => badge(TIERS[one.tier] ?? one.tier ?? "–", `tier-${one.tier}`) },
    { title: "Payload", kind: "payload", of: (one) => brief(one, mode) },
  ], [...found.messages].reverse(), {
    keyOf: (one) => one.offset,
    extra: (one) => (opened.has(one.offset) ? details(one, mode, ctx) : null),
    empty: Object.keys(filters(ctx.route)).length
      ? empty("No matching messages in this range.", found.first > (found.earliest ?? 0) ? h("p", null, "“Older” searches further back.") : null)
      : empty("No messages in this range. Choose another offset or time."),
  });
}

function brief(message, mode) {
  if (message.size === 0) return h("span", { class: "note" }, "empty");
  const { text, problem } = show(message, mode, { isBrief: true });
  if (problem) return h("span", { class: "note" }, problem);
  return h("code", { class: "brief" }, text.length > BRIEF ? `${text.slice(0, BRIEF)}…` : text);
}

// Characters that mean something in a pattern of `ister.message_filter`.
const literal = (text) => text.replace(/[\\*?]/g, "\\$&");

function filterLink(ctx, name, value, words) {
  const query = new URLSearchParams({ ...filters(ctx.route), [name]: value }).toString();
  return h("a", { href: `${ctx.route.hash}?${query}`, title: "Show only these" }, words);
}

function details(message, mode, ctx) {
  const { text, problem, used } = show(message, mode);
  const attributes = Object.entries(message.attributes ?? {});
  const how = { decoded: "decoded by its schema", json: "as JSON", text: "as text", hex: "as bytes" }[used];
  return h("div", { class: "message" },
    facts([
      ["Producer", message.producer_name || "–"],
      ["Routing key", message.routing_key ? filterLink(ctx, "key", literal(message.routing_key), message.routing_key) : "–"],
      ["Schema", message.schema ? schemaWords(message.schema) : "none"],
      ["Size", `${count(message.size)} bytes`],
      ["Read from", TIERS[message.tier] ?? message.tier ?? "–"],
    ]),
    attributes.length
      ? [h("h3", null, "Attributes"), facts(attributes.map(([name, value]) => [name,
        name.includes("=") ? h("code", null, String(value)) : filterLink(ctx, "attribute", `${name}=${literal(String(value))}`, h("code", null, String(value)))]))]
      : null,
    h("h3", null, `Payload, ${how}`),
    problem
      ? h("p", { class: "banner attention" }, problem, mode === "auto" ? "" : ` “Best” shows it ${bestMode(message) === "hex" ? "as bytes" : `as ${bestMode(message)}`}.`)
      : h("pre", { class: used, tabindex: 0, "aria-label": `Payload of message ${message.offset}` }, text),
    message.is_cut ? h("p", { class: "note" }, "Only the first 64 KiB are shown.") : null);
}

function pager(topic, ctx, found) {
  const { limit } = asked(ctx.route);
  const more = { limit, ...filters(ctx.route) };
  const first = found.first ?? found.messages[0]?.offset ?? null;
  const older = first !== null && first > (topic.earliest ?? 0);
  const newer = found.next !== null && found.next !== undefined && found.next < topic.watermarks.next && !ctx.state.isTail;
  return h("div", { key: "pager", class: "pager" },
    newer ? h("button", { key: "newer", type: "button", onclick: () => go(ctx, { start: found.next, ...more }) }, "Newer") : null,
    older ? h("button", { key: "older", type: "button", onclick: () => go(ctx, { start: "latest", end: first, ...more }) }, "Older") : null);
}
