// All topics, with a filter by name; partitions are under their topic.

import { askCreate } from "./changes.js";
import { get } from "./api.js";
import { sparkline } from "./charts.js";
import { h } from "./dom.js";
import { actionButton, badge, command, empty, table, topicLink } from "./parts.js";
import { bytes, count, messageRate, plural } from "./words.js";

const PAGE = 50;
const SLOTS = 60;
const WAIT_MS = 250;

// Which partitioned topics are unfolded; also while another page is shown.
const unfolded = new Set();

export function topicState(topic) {
  if (topic.partitions?.length) return badge(plural(topic.partitions.length, "partition"));
  if (topic.damage?.length) return badge("damaged", "bad");
  if (topic.is_here === false && topic.owner) return badge(`on ${topic.owner.node}`);
  if (topic.errors?.length) return badge("errors", "bad");
  if (topic.is_reliable === false) return badge("not kept", "plain", "Messages go to connected consumers and are not stored");
  if (!topic.state) return badge("not open here");
  return badge(topic.state, topic.state === "open" ? "ok" : "attention");
}

const held = (topic) => (topic.watermarks ? topic.watermarks.next - (topic.earliest ?? 0) : null);

function worstLag(topic) {
  const lags = (topic.subscriptions ?? []).map((one) => one.lag ?? 0);
  return lags.length ? Math.max(...lags) : null;
}

const isBlocked = (topic) =>
  (topic.subscriptions ?? []).some((one) => one.blocked !== null && one.blocked !== undefined);

// The sum of what each partition has; null if none of them says.
function sum(topics, of) {
  const values = topics.map(of).filter((value) => value !== null && value !== undefined);
  return values.length ? values.reduce((total, one) => total + one, 0) : null;
}

function added(lists) {
  const longest = Math.max(0, ...lists.map((one) => one.length));
  return Array.from({ length: longest }, (_, at) =>
    lists.reduce((total, one) => total + (one[one.length - longest + at] ?? 0), 0));
}

// The figures of a row: those of a topic, or of all partitions together.
function figures(topic, recent) {
  const parts = topic.partitions?.length ? topic.topics ?? [] : [topic];
  const lags = parts.map(worstLag).filter((one) => one !== null);
  return {
    came: sum(parts, (one) => one.rates?.messages_in),
    gone: sum(parts, (one) => one.rates?.messages_out),
    held: sum(parts, held),
    objects: sum(parts, (one) => (one.is_reliable === false ? null : one.objects_total)),
    objectsBytes: sum(parts, (one) => one.objects_bytes),
    filesBytes: sum(parts, (one) => (one.is_reliable === false ? null : one.files_bytes)),
    subscriptions: parts.length ? Math.max(...parts.map((one) => one.subscriptions_total ?? one.subscriptions?.length ?? 0)) : null,
    lag: lags.length ? lags.reduce((total, one) => total + one, 0) : null,
    isBlocked: parts.some(isBlocked),
    recent: added(parts.map((one) => recent[one.topic] ?? [])),
  };
}

function nameCell(row, ctx) {
  const { topic } = row;
  if (row.isPart) return h("span", { class: "part-name" }, topicLink(topic.topic));
  if (!topic.partitions?.length) return topicLink(topic.topic);
  const isOpen = unfolded.has(topic.topic);
  const toggle = () => {
    if (!unfolded.delete(topic.topic)) unfolded.add(topic.topic);
    ctx.update();
  };
  return h("span", { class: "folder" },
    topicLink(topic.topic),
    h("button", {
      type: "button", class: "toggle fold", "aria-expanded": String(isOpen),
      "aria-label": `Partitions of ${topic.topic}`, onclick: toggle,
    }, h("span", { class: "chevron", "aria-hidden": "true" }, "›")));
}

export function topicTable(topics, caption, recent, ctx) {
  const rows = topics.flatMap((topic) => [
    { topic, of: figures(topic, recent) },
    ...(unfolded.has(topic.topic) ? topic.topics ?? [] : []).map((one) => ({ topic: one, isPart: true, of: figures(one, recent) })),
  ]);
  return table(caption, [
    { title: "Topic", kind: "name", of: (one) => nameCell(one, ctx) },
    { title: "State", of: (one) => topicState(one.topic) },
    {
      title: "Messages in", kind: "number",
      of: ({ of }) => h("span", { class: "with-spark" },
        sparkline(of.recent, { width: 72, height: 20, slots: SLOTS, title: "The last two minutes" }),
        h("span", { class: "rate" }, messageRate(of.came))),
    },
    { title: "Out", kind: "number", of: ({ of }) => messageRate(of.gone) },
    { title: "Messages", kind: "number", of: ({ of }) => count(of.held) },
    {
      title: "In the bucket", kind: "number",
      of: ({ of }) => (of.objects === null ? "–" : [bytes(of.objectsBytes), h("span", { class: "note" }, ` in ${count(of.objects)}`)]),
    },
    { title: "On disk", kind: "number", of: ({ of }) => bytes(of.filesBytes) },
    { title: "Subscriptions", kind: "number", of: ({ of }) => count(of.subscriptions) },
    { title: "Largest lag", kind: "number", of: ({ of }) => [count(of.lag), of.isBlocked ? [" ", badge("blocked", "bad")] : null] },
  ], rows, { keyOf: (one) => `${one.isPart ? "part " : ""}${one.topic.topic}`, rowClass: (one) => (one.isPart ? "part" : null) });
}

export function noTopics() {
  return empty("No topics yet. Publish a message to create one:",
    h("p", null, command("ister produce /default/orders")));
}

export const page = {
  title: () => "Topics",

  load(route, state, signal) {
    const { search = "", after = "" } = route.params;
    return get("api/topics", { search, after, limit: PAGE, fold: "yes" }, signal);
  },

  view(data, ctx) {
    const { search = "", after = "" } = ctx.route.params;
    const go = (more) => {
      const query = new URLSearchParams(Object.entries(more).filter(([, value]) => value)).toString();
      return query ? `#/topics?${query}` : "#/topics";
    };
    const typed = (event) => {
      clearTimeout(ctx.state.typing);
      const value = event.target.value.trim();
      ctx.state.typing = setTimeout(() => ctx.navigate(go({ search: value }), { replace: true }), WAIT_MS);
    };
    let content;
    if (data.topics.length) content = topicTable(data.topics, "Topics and their state", data.recent ?? {}, ctx);
    else if (search) content = empty(`No topic has “${search}” in its name.`);
    else content = noTopics();
    const refusal = ctx.about?.rights?.create === false ? "You may not create topics: this needs the permission manage_topic" : "";
    return [
      h("div", { key: "head", class: "page-head" },
        h("h1", { tabindex: -1 }, "Topics"),
        h("p", { class: "note", role: "status" }, search ? `${plural(data.total, "topic")} found` : plural(data.total, "topic")),
        h("div", { class: "page-tools" },
          h("form", { class: "search", role: "search", onsubmit: (event) => event.preventDefault() },
            h("label", { for: "search", class: "hidden-text" }, "Filter topics by name"),
            h("input", { id: "search", type: "search", "data-filter": true, value: search, placeholder: "Filter by name", autocomplete: "off", oninput: typed })),
          actionButton("Create…", () => askCreate(ctx), { label: "Create a topic", refusal }))),
      h("section", { key: "topics", class: "panel flush" }, content),
      after || data.next
        ? h("nav", { key: "pages", class: "pager", "aria-label": "Pages of topics" },
          after ? h("a", { href: go({ search }) }, "First page") : null,
          data.next ? h("a", { href: go({ search, after: data.next }) }, "Next page") : null)
        : null,
    ];
  },
};
