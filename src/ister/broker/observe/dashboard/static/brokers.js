// The cluster as this broker sees it: brokers, moves under way, topics that wait for a disk.

import { askActivate, askDrain, askRebalance, askTakeOver } from "./actions.js";
import { get } from "./api.js";
import { h } from "./dom.js";
import { badge, empty, facts, panel, table, topicLink } from "./parts.js";
import { byteRate, bytes, count, messageRate, moment, plural } from "./words.js";

const TONES = { active: "ok", draining: "attention", starting: "attention" };

export const page = {
  title: () => "Brokers",

  load: (route, state, signal) => get("api/cluster", {}, signal),

  view(data, ctx) {
    const { brokers } = data;
    return [
      h("div", { key: "head", class: "page-head" },
        h("h1", { tabindex: -1 }, "Brokers"), h("p", { class: "note" }, plural(brokers.length, "broker"))),
      waiting(data, ctx),
      h("section", { key: "brokers", class: "panel flush" },
        table("Brokers, their load and their addresses", columns(data, ctx), brokers,
          { keyOf: (one) => one.node, empty: empty("No broker is registered.") })),
      moves(data),
      brokers.length > 1 ? balance(data, ctx) : null,
    ];
  },
};

function columns(data, ctx) {
  const isCluster = data.brokers.length > 1;
  const mayManage = isCluster && (data.rights?.brokers ?? false);
  return [
    {
      title: "Node", kind: "name",
      of: (one) => [one.node, one.is_this ? [" ", badge("this one", "ok")] : null, one.is_leader ? [" ", badge("leader")] : null],
    },
    { title: "State", of: (one) => badge(one.state ?? "unknown", TONES[one.state] ?? "plain") },
    { title: "Topics", kind: "number", of: (one) => count(one.topics) },
    isCluster ? {
      title: "Load",
      of: (one) => (one.load
        ? `${messageRate(one.load.messages_in)} in, ${messageRate(one.load.messages_out)} out, ${byteRate(one.load.bytes_in + one.load.bytes_out)}`
        : "–"),
    } : null,
    isCluster ? { title: "CPU", kind: "number", of: (one) => (one.load ? `${Math.round(one.load.cpu * 100)} %` : "–") } : null,
    isCluster ? { title: "To be uploaded", kind: "number", of: (one) => bytes(one.load?.upload_lag_bytes) } : null,
    data.brokers.some((one) => one.zone) ? { title: "Zone", of: (one) => one.zone || "–" } : null,
    { title: "Version", of: (one) => one.version || "–" },
    { title: "gRPC", of: (one) => h("code", null, one.broker_url) },
    { title: "Clients connect to", of: (one) => h("code", null, one.connect_url) },
    { title: "Flight", of: (one) => (one.flight_url ? h("code", null, one.flight_url) : "–") },
    mayManage ? {
      title: "Actions", isHidden: true,
      of: (one) => (one.state === "draining"
        ? button("Activate…", `Activate ${one.node}`, () => askActivate(ctx, one))
        : button("Drain…", `Drain ${one.node}`, () => askDrain(ctx, one))),
    } : null,
  ].filter(Boolean);
}

function button(words, label, run) {
  return h("button", { type: "button", "aria-label": label, onclick: run }, words);
}

function waiting(data, ctx) {
  if (!data.waiting.length) return null;
  const mayManage = data.rights?.topics ?? false;
  const more = data.waiting_total - data.waiting.length;
  return h("section", { key: "waiting", class: "panel health bad", "aria-labelledby": "waiting" },
    h("h2", { id: "waiting" }, h("span", { class: "dot bad" }), `${plural(data.waiting_total, "topic")} wait${data.waiting_total === 1 ? "s" : ""} for a disk`),
    h("p", null, "The newest messages of these topics may be only on the disk of a broker that is down. What the bucket has can be read; messages cannot be sent. Start the broker again and they continue."),
    table("Topics that wait for a disk", [
      { title: "Topic", kind: "name", of: (one) => topicLink(one.topic) },
      { title: "Disk of node", of: (one) => h("code", null, one.node) },
      { title: "Since", of: (one) => (one.since ? moment(one.since * 1000) : "unknown") },
      { title: "A take-over gives up", of: (one) => `offset ${count(one.offset)} and later` },
      mayManage ? { title: "Actions", isHidden: true, of: (one) => button("Take over…", `Take over ${one.topic}`, () => askTakeOver(ctx, one)) } : null,
    ].filter(Boolean), data.waiting, { keyOf: (one) => one.topic }),
    more > 0 ? h("p", { class: "note" }, `${plural(more, "more topic")} may wait, too.`) : null);
}

function moves(data) {
  if (!data.moves.length) return null;
  return panel("Moves", { id: "moves", class: "panel flush" },
    table("Topics that are on their way to another broker", [
      { title: "Topic", kind: "name", of: (one) => topicLink(one.topic) },
      { title: "From", of: (one) => h("code", null, one.from) },
      { title: "To", of: (one) => h("code", null, one.to) },
      { title: "Reason", of: (one) => one.reason ?? "–" },
      { title: "Since", of: (one) => (one.since ? moment(one.since * 1000) : "–") },
    ], data.moves, { keyOf: (one) => one.topic }));
}

function balance(data, ctx) {
  const found = data.balance;
  return panel("Balance", {
    id: "balance",
    aside: data.rights?.brokers ? button("Rebalance…", "Rebalance", () => askRebalance(ctx)) : null,
  },
  facts([
    ["Variation", found.variation.toFixed(2), ` a rebalance moves topics above ${found.threshold.toFixed(2)}`],
    ["Strategy", found.strategy, found.strategy === "fair" ? " load is the number of topics" : " load is traffic, CPU, uploads and topics"],
    ["Mean load", found.mean.toFixed(1)],
    ["Loads", found.brokers.map((one) => `${one.node.slice(0, 6)}: ${one.load.toFixed(1)}`).join(", ")],
  ]));
}
