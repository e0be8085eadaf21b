// One topic: where its messages are, who reads them, what can be done.

import { askJob, askMove, askSeek, askUnload } from "./actions.js";
import { askDelete, askFailurePolicy, askPolicies, askPublish, askUnsubscribe } from "./changes.js";
import { get, topicPath } from "./api.js";
import { lineChart } from "./charts.js";
import { h } from "./dom.js";
import { actionButton, badge, choice, empty, facts, panel, subscriptionLink, subscriptionWords, table, topicLink, windowChoice } from "./parts.js";
import { chartWindow } from "./settings.js";
import { bounds, describe, SCALES, tierMap } from "./tiermap.js";
import { topicState, topicTable } from "./topics.js";
import { byteRate, bytes, clock, count, day, messageRate, moment, plural, short } from "./words.js";

const ROWS = 10;
const ROWS_NARROW = 3;

const MARKS = [
  ["trimmed", "The first offset still in local files. Older messages come from the bucket."],
  ["tiered", "Everything before it is in the bucket, committed and without a hole."],
  ["synced", "Everything before it survives a power cut: fdatasync has returned."],
  ["written", "Everything before it survives a crash of the broker: write has returned."],
  ["next", "The offset that the next message gets."],
];

export function schemaWords(schema) {
  const version = schema.version ? ` v${schema.version}` : "";
  return `schema ${schema.subject ?? `number ${schema.id}`}${version}${schema.type ? ` (${schema.type})` : ""}`;
}

export function topicHead(route, topic, current, ctx) {
  const base = `#/topics${route.topic}`;
  const tab = (href, words, name) => h("a", { href, "aria-current": name === current ? "page" : null }, words);
  return h("div", { key: "head", class: "topic-head" },
    h("nav", { class: "crumbs", "aria-label": "Breadcrumb" }, h("a", { href: "#/topics" }, "Topics"), h("span", { "aria-hidden": "true" }, " / "), route.parts[1]),
    h("h1", { tabindex: -1 }, { messages: h("span", { class: "hidden-text" }, "Messages of "), "dead-letters": h("span", { class: "hidden-text" }, "Dead letters of ") }[current] ?? null, route.topic),
    topic
      ? h("p", { class: "badges" }, topicState(topic),
        topic.ack ? badge(`ack ${topic.ack}`) : null,
        topic.codec ? badge(topic.codec) : null,
        topic.schema ? badge(schemaWords(topic.schema)) : null,
        topic.policies?.compaction ? badge("compacted") : null)
      : null,
    h("nav", { class: "tabs", "aria-label": `Parts of ${route.topic}` },
      tab(base, "Topic", "topic"), tab(`${base}/messages`, "Messages", "messages"),
      current === "dead-letters" || topic?.dead_letters_of?.length ? tab(`${base}/dead-letters`, "Dead letters", "dead-letters") : null));
}

export const page = {
  title: (route) => route.topic,

  load: (route, state, signal) => get(topicPath(route.topic), { window: chartWindow() }, signal),

  view(topic, ctx) {
    const head = topicHead(ctx.route, topic, "topic", ctx);
    if (topic.partitions?.length) return [head, partitions(topic, ctx), actions(topic, ctx)];
    return [
      head,
      trouble(topic),
      topic.watermarks && topic.is_reliable !== false ? tiers(topic, ctx) : notKept(topic),
      subscriptions(topic, ctx),
      h("div", { key: "columns", class: "columns" },
        rates(topic, ctx),
        topic.watermarks && topic.is_reliable !== false ? watermarks(topic) : null),
      h("div", { key: "rest", class: "columns" }, actions(topic, ctx), about(topic)),
      topic.objects ? objects(topic, ctx) : null,
      topic.files?.length ? files(topic, ctx) : null,
    ];
  },
};

function partitions(topic, ctx) {
  const described = topic.topics ?? [];
  const more = topic.partitions.length - described.length;
  return panel("Partitions", {
    id: "partitions", class: "panel flush",
    aside: more > 0 ? h("span", { class: "note" }, `${count(described.length)} of ${count(topic.partitions.length)} are shown`) : null,
  },
  topicTable(described, `Partitions of ${topic.topic}`, topic.recent ?? {}, ctx));
}

function trouble(topic) {
  const words = [...(topic.damage ?? []), ...(topic.errors ?? [])].map((one) =>
    typeof one === "string" ? one : inWords(one));
  if (!words.length) return null;
  return h("section", { key: "trouble", class: "panel health bad", "aria-labelledby": "trouble" },
    h("h2", { id: "trouble" }, h("span", { class: "dot bad" }), "This topic has a problem"),
    h("ul", null, words.map((one) => h("li", { key: one }, one))));
}

// Damage is {file, position, offset, reason}, an error is {code, error, hint}.
function inWords(one) {
  if (one.reason) return `${one.file}, position ${count(one.position)}: ${one.reason}`;
  return [one.error ?? one.message ?? JSON.stringify(one), one.hint].filter(Boolean).join(": ");
}

function notKept(topic) {
  return panel("Tiers", { id: "tiers" },
    h("p", null, topic.is_reliable === false
      ? "This topic is not reliable: messages go to connected consumers and are not stored."
      : "No broker has this topic open, so there are no figures."));
}

function tiers(topic, ctx) {
  const scale = ctx.state.scale ?? "all";
  const [start] = bounds(topic, scale);
  const left = (topic.subscriptions ?? []).filter((one) => (one.cursor ?? start) < start).length;
  const isEmpty = topic.watermarks.next === 0;
  return panel("Tiers, to scale", {
    id: "tiers",
    aside: choice("Which part of the topic", "scale", SCALES, scale, (value) => {
      ctx.state.scale = value;
      ctx.update();
    }),
  },
  isEmpty
    ? empty("No messages yet.", h("p", null, h("code", { class: "command" }, `ister produce ${topic.topic}`)))
    : tierMap(topic, { width: ctx.width - 42, scale }),
  h("p", { class: "note" }, describe(topic), left ? ` ${plural(left, "cursor")} further back.` : ""));
}

function blockedWords(one) {
  const letters = one.failure_policy?.dead_letter_topic;
  const where = letters ? h("div", { class: "note" }, "dead letters: ", h("a", { href: `#/topics${letters}/dead-letters` }, letters)) : null;
  return [stateWords(one), where];
}

function stateWords(one) {
  if (one.blocked !== null && one.blocked !== undefined) {
    return [badge("blocked", "bad"), ` ${one.blocked_reason ?? `at offset ${count(one.blocked)}`} `, h("a", { href: "#/health/subscriptions" }, "What to do")];
  }
  if (one.blocked_reason) return [badge("waiting", "attention"), ` ${one.blocked_reason}`];
  if (!one.consumers?.length) return badge("no consumer", one.lag ? "attention" : "plain");
  return badge(one.lag ? "working" : "up to date", "ok");
}

function subscriptions(topic, ctx) {
  const rows = topic.subscriptions ?? [];
  const wanted = ctx.route.params.subscription ?? null;
  const isMovable = topic.is_reliable !== false && mayManage(topic);
  const total = topic.subscriptions_total ?? rows.length;
  return panel("Subscriptions", {
    id: "subscriptions", class: "panel flush",
    aside: total > rows.length ? h("span", { class: "note" }, `${count(rows.length)} of ${count(total)} are shown`) : null,
  },
    table(`Subscriptions of ${topic.topic}`, [
      { title: "Name", kind: "name", of: (one) => one.name },
      { title: "Type", kind: "time", of: (one) => subscriptionWords(one.type) },
      { title: "Cursor", kind: "number", of: (one) => count(one.cursor) },
      { title: "Lag", kind: "number", of: (one) => count(one.lag) },
      { title: "In flight", kind: "number", of: (one) => [count(one.in_flight), one.max_unacked_messages ? h("span", { class: "note under" }, ` of ${count(one.max_unacked_messages)} each`) : null] },
      { title: "Pending redelivery", kind: "number", of: (one) => count(one.waiting) },
      { title: "State", kind: "words state-words", of: blockedWords },
      { title: "Consumers", kind: "words", of: (one) => consumers(one) },
      isMovable ? {
        title: "Actions", isHidden: true, kind: "action",
        of: (one) => h("div", { class: "buttons" },
          actionButton("Seek…", () => askSeek(ctx, topic, one), { label: `Seek ${one.name}`, class: "quiet" }),
          actionButton("Policy…", () => askFailurePolicy(ctx, topic, one), { label: `Failure policy of ${one.name}`, class: "quiet" }),
          actionButton("Delete…", () => askUnsubscribe(ctx, topic, one), { label: `Delete subscription ${one.name}`, class: "quiet" })),
      } : null,
    ].filter(Boolean), rows, {
      keyOf: (one) => one.name,
      rowClass: (one) => (one.name === wanted ? "wanted" : null),
      rowId: (one) => (one.name === wanted ? "wanted" : null),
      empty: empty("No subscriptions yet.", h("p", null, h("code", { class: "command" }, `ister consume ${topic.topic} --subscription mine`))),
    }));
}

function consumers(one) {
  const names = one.consumers ?? [];
  if (!names.length) return "none";
  const shown = names.slice(0, 4);
  const total = one.consumers_total ?? names.length;
  return [
    shown.map((name, at) => [at ? ", " : "", name, name === one.active ? h("span", { class: "note" }, " (active)") : null]),
    total > shown.length ? ` and ${total - shown.length} more` : "",
  ];
}

function rates(topic, ctx) {
  const { points = [], window = "5m", every_seconds: every = 2 } = topic.history ?? {};
  const width = (ctx.width > 900 ? Math.floor((ctx.width - 20) / 2) : ctx.width) - 42;
  const series = (name, tone, at) => ({ name, tone, points: points.map((one) => [one[0], one[at]]) });
  return panel("Messages per second", { id: "rates", aside: windowChoice(ctx) },
    window === chartWindow() ? null : h("p", { class: "note" }, "Another broker has this topic; only its last five minutes are known here."),
    lineChart("Messages per second", [series("In", "in", 1), series("Out", "out", 2)], {
      say: (value, isShort) => (isShort ? short(value) : messageRate(value)),
      width, now: points.length ? points.at(-1)[0] : Date.now(), window, every,
    }),
    h("p", { class: "note" },
      `${byteRate(topic.rates?.bytes_in)} in; ${plural(topic.producers ?? 0, "producer")} connected.`));
}

function watermarks(topic) {
  return panel("Watermarks", { id: "watermarks" },
    h("dl", { class: "marks" },
      h("div", { key: "earliest" }, h("dt", null, "earliest"), h("dd", { class: "figure" }, count(topic.earliest)),
        h("dd", { class: "note" }, "The first offset that can be read, from files or from the bucket.")),
      MARKS.map(([name, words]) => h("div", { key: name },
        h("dt", null, name), h("dd", { class: "figure" }, count(topic.watermarks[name])),
        h("dd", { class: "note" }, words)))),
    topic.upload_lag
      ? h("p", { class: "note" }, topic.upload_lag.messages
        ? `${plural(topic.upload_lag.messages, "message")} (${bytes(topic.upload_lag.bytes)}) are not in the bucket yet.`
        : "All synced messages are in the bucket.")
      : null);
}

function times(one) {
  if (one.publish_time_min === null || one.publish_time_min === undefined) return "–";
  const [first, last] = [one.publish_time_min, one.publish_time_max];
  return day(first) === day(last) ? `${moment(first)} – ${clock(last)}` : `${moment(first)} – ${moment(last)}`;
}

// The first rows of a long table, and the button that shows the others: [rows, button].
function newest(ctx, name, all, total) {
  const few = ctx.width < 640 ? ROWS_NARROW : ROWS;
  if (all.length <= few) return [all, null];
  const isAll = ctx.state[`all ${name}`] ?? false;
  const words = isAll
    ? `Show the newest ${few} only`
    : `Show ${total > all.length ? "the newest" : "all"} ${count(all.length)} ${name}`;
  const toggle = () => {
    ctx.state[`all ${name}`] = !isAll;
    ctx.update();
  };
  return [isAll ? all : all.slice(0, few),
    h("p", { class: "more" }, h("button", { type: "button", "aria-expanded": String(isAll), onclick: toggle }, words))];
}

function objects(topic, ctx) {
  const all = [...topic.objects].reverse();
  const [shown, button] = newest(ctx, "objects", all, topic.objects_total);
  return panel("Objects in the bucket", {
    id: "objects", class: "panel flush",
    aside: h("span", { class: "note" }, `${plural(topic.objects_total ?? all.length, "object")}, ${bytes(topic.objects_bytes ?? all.reduce((sum, one) => sum + (one.size ?? 0), 0))}`),
  },
  table(`Objects of ${topic.topic} in the bucket, newest first`, [
    { title: "Object", kind: "name", of: (one) => h("code", null, one.object_id) },
    { title: "First offset", kind: "number", of: (one) => count(one.start_offset) },
    { title: "Last offset", kind: "number", of: (one) => count(one.end_offset) },
    { title: "Messages", kind: "number", of: (one) => count(one.messages || one.end_offset - one.start_offset + 1) },
    { title: "Size", kind: "number", of: (one) => bytes(one.size) },
    { title: "Format", of: (one) => (one.kept ? `${one.format}, ${one.kept}` : one.format) },
    { title: "Published", kind: "words", of: times },
  ], shown, {
    keyOf: (one) => one.object_id,
    empty: empty("Nothing is in the bucket yet. Objects appear when the uploader or the pipeline has run."),
  }),
  button);
}

function files(topic, ctx) {
  const all = [...topic.files].reverse();
  const [shown, button] = newest(ctx, "files", all, topic.files_total);
  return panel("Local files", {
    id: "files", class: "panel flush",
    aside: h("span", { class: "note" }, `${plural(topic.files_total ?? all.length, "file")}, ${bytes(topic.files_bytes ?? all.reduce((sum, one) => sum + one.bytes, 0))}`),
  },
    table(`Write-ahead log files of ${topic.topic}, newest first`, [
      { title: "File", kind: "name", of: (one) => [h("code", null, one.name), one.is_active ? [" ", badge("being written", "ok")] : null] },
      { title: "First offset", kind: "number", of: (one) => count(one.first_offset) },
      { title: "Next offset", kind: "number", of: (one) => count(one.next_offset) },
      { title: "Messages", kind: "number", of: (one) => count(one.next_offset - one.first_offset) },
      { title: "Size", kind: "number", of: (one) => bytes(one.bytes) },
    ], shown, { keyOf: (one) => one.name }),
    button);
}

const mayManage = (topic) => topic.rights?.manage !== false;

function actions(topic, ctx) {
  const refusal = mayManage(topic) ? "" : "this needs the permission manage_topic";
  const publishRefusal = topic.rights?.produce === false ? "You may not publish: this needs the permission produce" : "";
  const publish = actionButton("Publish…", () => askPublish(ctx, topic), { key: "publish", label: "Publish a message", refusal: publishRefusal });
  if (refusal) {
    return panel("Actions", { id: "actions" },
      h("p", null, publishRefusal ? "You have read-only access to this topic." : "You may publish to this topic, but not change it."),
      h("div", { class: "buttons" }, publish),
      h("p", { class: "note" }, `Moving cursors, policies, jobs and deletion: ${refusal}.`));
  }
  const button = (words, run) => actionButton(words, run, { key: words });
  const isPlain = !topic.partitions?.length;
  return panel("Actions", { id: "actions", note: "Each asks for confirmation." },
    h("div", { class: "buttons" },
      publish,
      isPlain ? button("Policies…", () => askPolicies(ctx, topic)) : null,
      isPlain ? button("Unload…", () => askUnload(ctx, topic)) : null,
      isPlain && (ctx.about?.brokers ?? []).length > 1 ? button("Move…", () => askMove(ctx, topic, ctx.about.brokers)) : null,
      !isPlain || topic.is_reliable === false ? null : [
        button("Compact now…", () => askJob(ctx, "compact", topic.topic)),
        button("Scrub now…", () => askJob(ctx, "scrub", topic.topic)),
      ],
      topic.parent ? null : actionButton("Delete…", () => askDelete(ctx, topic), { key: "delete", label: "Delete the topic", class: "danger-quiet" })));
}

function policyWords(name, value) {
  if (value === 0 && name.startsWith("max_")) return "no limit of its own";
  return typeof value === "number" ? count(value) : String(value);
}

function about(topic) {
  const policies = Object.entries(topic.policies ?? {}).filter(([, value]) => value !== null && typeof value !== "object");
  return panel("About", { id: "about" },
    facts([
      topic.owner ? ["Owner", topic.owner.node, topic.owner.broker_url ? ` ${topic.owner.broker_url}` : ""] : null,
      topic.parent ? ["Partition of", topicLink(topic.parent)] : null,
      topic.dead_letters_of?.length
        ? ["Dead letters of", topic.dead_letters_of.map((one, at) => [at ? ", " : "", subscriptionLink(one.topic, one.subscription), ` of ${one.topic}`])]
        : null,
      topic.epoch === null || topic.epoch === undefined ? null : ["Epoch", count(topic.epoch)],
      topic.incarnation ? ["Incarnation", h("code", null, String(topic.incarnation))] : null,
      ["Producers", count(topic.producers)],
    ]),
    policies.length
      ? h("details", null, h("summary", null, `Policies (${policies.length})`),
        facts(policies.map(([name, value]) => [name.replaceAll("_", " "), policyWords(name, value)])))
      : null);
}
