// Dead letters: messages that failed too often, pending until they are requeued or dropped.

import { get, topicPath } from "./api.js";
import { askDrop, askRequeue } from "./changes.js";
import { h } from "./dom.js";
import { actionButton, empty, panel, subscriptionLink, table } from "./parts.js";
import { show } from "./payload.js";
import { topicHead } from "./topic.js";
import { count, moment, plural } from "./words.js";

const LIMIT = 50;
const BRIEF = 120;
// Counting reads messages, so it is not repeated each time the page is brought up to date.
const EVERY_MS = 10_000;

const source = (one) => (one.source_subscription
  ? `${one.source_subscription} of ${one.source_topic}`
  : "messages that are not dead letters");

export const page = {
  title: (route) => `Dead letters of ${route.topic}`,

  async load(route, state, signal) {
    const topic = await get(topicPath(route.topic), {}, signal);
    const isOld = !state.letters || Date.now() - state.loadedAt > EVERY_MS;
    if (isOld && topic.rights?.consume !== false && !topic.partitions?.length) {
      const path = `${topicPath(route.topic)}/dead-letters`;
      const [counted, shown] = await Promise.all([get(`${path}/count`, {}, signal), get(path, { limit: LIMIT }, signal)]);
      Object.assign(state, { letters: { counted, shown }, loadedAt: Date.now() });
    }
    return topic;
  },

  view(topic, ctx) {
    const head = topicHead(ctx.route, topic, "dead-letters", ctx);
    if (topic.partitions?.length) return [head, empty("A partitioned topic holds no messages itself; its partitions do.")];
    if (topic.rights?.consume === false) return [head, empty("You may see this topic, but not its messages.", h("p", null, "Reading them needs the permission consume."))];
    const { letters } = ctx.state;
    if (!letters) return [head, empty("Loading…")];
    const { counted, shown } = letters;
    const refusal = topic.rights?.manage === false ? "You may not change this topic: this needs the permission manage_topic" : "";
    if (!counted.pending) return [head, empty("No pending dead letters.")];
    return [head, groups(topic, ctx, counted, refusal), list(topic, ctx, shown, counted, refusal)];
  },
};

function buttons(ctx, topic, selection, what, refusal) {
  return h("div", { class: "buttons" },
    actionButton("Requeue…", () => askRequeue(ctx, topic.topic, selection, what), { label: `Requeue ${what}`, refusal, class: "quiet" }),
    actionButton("Drop…", () => askDrop(ctx, topic.topic, selection, what), { label: `Drop ${what}`, refusal, class: "quiet" }));
}

function groups(topic, ctx, counted, refusal) {
  return panel("Where they come from", {
    id: "groups", class: "panel flush",
    aside: h("span", { class: "note" }, `${plural(counted.pending, "message")} pending${counted.is_partial ? ", not all counted" : ""}`),
  },
  table("Pending dead letters by subscription", [
    {
      title: "Subscription", kind: "name",
      of: (one) => (one.source_topic ? [subscriptionLink(one.source_topic, one.source_subscription), h("span", { class: "note" }, ` of ${one.source_topic}`)] : "Not dead letters"),
    },
    { title: "Pending", kind: "number", of: (one) => count(one.count) },
    { title: "Oldest", kind: "time", of: (one) => moment(one.oldest) },
    { title: "Newest", kind: "time", of: (one) => moment(one.newest) },
    { title: "Reasons", kind: "words", of: (one) => Object.entries(one.reasons).map(([reason, times]) => h("div", { key: reason }, `${reason || "no reason given"} (${count(times)})`)) },
    {
      title: "Actions", isHidden: true, kind: "action",
      of: (one) => (one.source_topic
        ? buttons(ctx, topic, { source: one.source_topic, subscription: one.source_subscription }, `${plural(one.count, "message")} of ${source(one)}`, refusal)
        : null),
    },
  ], counted.groups, { keyOf: source }),
  refusal ? h("p", { class: "note inset" }, `${refusal}.`) : null);
}

function list(topic, ctx, shown, counted, refusal) {
  return panel("Oldest messages", {
    id: "letters", class: "panel flush",
    aside: h("span", { class: "note" }, `${count(shown.messages.length)} of ${count(counted.pending)}`),
  },
  table("Pending dead letters, oldest first", [
    { title: "Offset", kind: "name number", of: (one) => count(one.offset) },
    { title: "Published", kind: "time", of: (one) => moment(one.publish_time, true) },
    { title: "Failed in", kind: "words", of: (one) => (one.dead_letter ? [subscriptionLink(one.dead_letter.topic, one.dead_letter.subscription), h("span", { class: "note" }, ` at offset ${count(one.dead_letter.offset)}, attempt ${count(one.dead_letter.attempt)}${one.dead_letter.is_verified === false ? "; unverified, its origin may be forged" : ""}`)] : "–") },
    { title: "Reason", kind: "words", of: (one) => one.dead_letter?.reason || "–" },
    { title: "Payload", kind: "payload", of: (one) => h("code", { class: "brief" }, brief(one)) },
    {
      title: "Actions", isHidden: true, kind: "action",
      of: (one) => buttons(ctx, topic, { offsets: [[one.offset, one.offset + 1]] }, `message ${one.offset}`, refusal),
    },
  ], shown.messages, { keyOf: (one) => one.offset }));
}

function brief(message) {
  const { text = "" } = show(message, "auto", { isBrief: true });
  return text.length > BRIEF ? `${text.slice(0, BRIEF)}…` : text;
}
