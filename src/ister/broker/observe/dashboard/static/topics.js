// All topics, with a search.

import { get } from "./api.js";
import { sparkline } from "./charts.js";
import { h } from "./dom.js";
import { badge, command, empty, table, topicLink } from "./parts.js";
import { bytes, count, messageRate, plural } from "./words.js";

const PAGE = 50;
const SAMPLES = 90;
const WAIT_MS = 250;
const rates = new Map();

function sample(topics) {
  for (const one of topics) {
    const values = rates.get(one.topic) ?? [];
    values.push(one.rates?.messages_in ?? 0);
    rates.set(one.topic, values.slice(-SAMPLES));
  }
  if (rates.size > 5000) rates.clear();
}

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

function lagCell(topic) {
  const isBlocked = (topic.subscriptions ?? []).some((one) => one.blocked !== null && one.blocked !== undefined);
  return [count(worstLag(topic)), isBlocked ? [" ", badge("blocked", "bad")] : null];
}

export function topicTable(topics, caption) {
  return table(caption, [
    { title: "Topic", kind: "name", of: (one) => topicLink(one.topic) },
    { title: "State", of: topicState },
    {
      title: "Messages in", kind: "number",
      of: (one) => h("span", { class: "with-spark" },
        sparkline(one.topic, rates.get(one.topic) ?? [], "in", 64, 20), messageRate(one.rates?.messages_in)),
    },
    { title: "Out", kind: "number", of: (one) => messageRate(one.rates?.messages_out) },
    { title: "Messages", kind: "number", of: (one) => count(held(one)) },
    {
      title: "In the bucket", kind: "number",
      of: (one) => (one.objects_total === undefined || one.is_reliable === false ? "–" : [bytes(one.objects_bytes), h("span", { class: "note" }, ` in ${count(one.objects_total)}`)]),
    },
    { title: "On disk", kind: "number", of: (one) => (one.is_reliable === false ? "–" : bytes(one.files_bytes)) },
    { title: "Subscriptions", kind: "number", of: (one) => (one.subscriptions ? count(one.subscriptions_total ?? one.subscriptions.length) : "–") },
    { title: "Most lag", kind: "number", of: lagCell },
  ], topics, { keyOf: (one) => one.topic });
}

export function noTopics() {
  return empty("No topics yet. Publish a message to create one:",
    h("p", null, command("ister produce /default/orders")));
}

export const page = {
  title: () => "Topics",

  async load(route, state, signal) {
    const { search = "", after = "" } = route.params;
    const data = await get("api/topics", { search, after, limit: PAGE }, signal);
    sample(data.topics);
    return data;
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
    if (data.topics.length) content = topicTable(data.topics, "Topics and their state");
    else if (search) content = empty(`No topic has “${search}” in its name.`);
    else content = noTopics();
    return [
      h("div", { key: "head", class: "page-head" },
        h("h1", { tabindex: -1 }, "Topics"),
        h("p", { class: "note", role: "status" }, search ? `${plural(data.total, "topic")} found` : plural(data.total, "topic")),
        h("form", { class: "search", role: "search", onsubmit: (event) => event.preventDefault() },
          h("label", { for: "search", class: "hidden-text" }, "Search topics by name"),
          h("input", { id: "search", type: "search", value: search, placeholder: "Search by name", autocomplete: "off", oninput: typed }))),
      h("section", { key: "topics", class: "panel flush" }, content),
      after || data.next
        ? h("nav", { key: "pages", class: "pager", "aria-label": "Pages of topics" },
          after ? h("a", { href: go({ search }) }, "First page") : null,
          data.next ? h("a", { href: go({ search, after: data.next }) }, "Next page") : null)
        : null,
    ];
  },
};

export { sample as sampleRates };
