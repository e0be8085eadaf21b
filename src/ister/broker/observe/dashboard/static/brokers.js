// The cluster as this broker sees it: brokers and their load, moves under way, topics that wait for a disk.

import { askActivate, askDrain, askRebalance, askTakeOver } from "./actions.js";
import { get } from "./api.js";
import { h } from "./dom.js";
import { actionButton, badge, command, empty, facts, panel, table, topicLink } from "./parts.js";
import { byteRate, bytes, count, messageRate, moment, plural } from "./words.js";

const TONES = { active: "ok", draining: "attention", starting: "attention" };

export const page = {
  title: () => "Brokers",

  load: (route, state, signal) => get("api/cluster", {}, signal),

  view(data, ctx) {
    const { brokers } = data;
    const states = brokers.filter((one) => one.state !== "active").length;
    return [
      h("div", { key: "head", class: "page-head" },
        h("h1", { tabindex: -1 }, "Brokers"),
        h("p", { class: "note" }, `${plural(brokers.length, "broker")}${states ? `, ${count(states)} not active` : brokers.length > 1 ? ", all active" : ""}`)),
      waiting(data, ctx),
      brokers.length
        ? h("div", { key: "brokers", class: "cards" }, brokers.map((one) => card(one, data, ctx)))
        : empty("No broker is registered."),
      brokers.length > 1 ? balance(data, ctx) : alone(),
      moves(data),
    ];
  },
};

// A link to the other broker's own dashboard, if its address can be opened in a browser.
function dashboardLink(broker) {
  if (broker.is_this || !/^https?:\/\//.test(broker.http_url ?? "")) return null;
  return h("a", { href: broker.http_url, rel: "noreferrer" }, "Its dashboard");
}

function card(broker, data, ctx) {
  const isCluster = data.brokers.length > 1;
  const refusal = data.rights?.brokers ? "" : "You may not manage brokers: this needs the permission manage_broker";
  const load = broker.load;
  return h("section", { key: broker.node, class: "panel broker", "aria-label": `Broker ${broker.node}`, "data-node": broker.node },
    h("div", { class: "panel-head" },
      h("h2", null, h("code", null, broker.node)),
      h("p", { class: "badges" },
        badge(broker.state ?? "unknown", TONES[broker.state] ?? "plain"),
        broker.is_this ? badge("this broker") : null,
        broker.is_leader ? badge("leader", "plain", "Assigns topics to brokers") : null)),
    h("dl", { class: "figures" },
      figure("Topics", count(broker.topics)),
      figure("In", load ? messageRate(load.messages_in) : "–"),
      figure("Out", load ? messageRate(load.messages_out) : "–"),
      figure("Traffic", load ? byteRate(load.bytes_in + load.bytes_out) : "–"),
      isCluster ? figure("CPU", load ? `${Math.round(load.cpu * 100)} %` : "–") : null,
      figure("To be uploaded", bytes(load?.upload_lag_bytes))),
    load?.is_disk_low ? h("p", { class: "banner attention" }, "Its disk is almost full: it gets no new topics.") : null,
    facts([
      ["Clients connect to", h("code", null, broker.connect_url)],
      broker.broker_url === broker.connect_url ? null : ["gRPC", h("code", null, broker.broker_url)],
      broker.flight_url ? ["Flight", h("code", null, broker.flight_url)] : null,
      broker.zone ? ["Zone", broker.zone] : null,
      ["Version", broker.version || "–"],
    ]),
    isCluster
      ? h("div", { class: "buttons" },
        broker.state === "draining"
          ? actionButton("Activate…", () => askActivate(ctx, broker), { label: `Activate ${broker.node}`, refusal })
          : actionButton("Drain…", () => askDrain(ctx, broker), { label: `Drain ${broker.node}`, refusal }),
        dashboardLink(broker))
      : null);
}

function figure(name, value) {
  return h("div", { key: name }, h("dt", null, name), h("dd", null, value));
}

function alone() {
  return panel("A single broker", { id: "alone" },
    h("p", null, "This broker serves all topics. Brokers that share its bucket and its metadata store (etcd) form a cluster with it: topics are spread over them, and move when one of them stops."),
    h("p", { class: "note" }, "Each has a directory of its own: ", command("ister serve --config ister.yml")));
}

function waiting(data, ctx) {
  if (!data.waiting.length) return null;
  const refusal = data.rights?.topics ? "" : "You may not manage topics: this needs the permission manage_topic";
  const more = data.waiting_total - data.waiting.length;
  return h("section", { key: "waiting", class: "panel health bad", "aria-labelledby": "waiting" },
    h("h2", { id: "waiting" }, h("span", { class: "dot bad" }), `${plural(data.waiting_total, "topic")} wait${data.waiting_total === 1 ? "s" : ""} for a disk`),
    h("p", null, "The newest messages of these topics may be only on the disk of a broker that is down. What the bucket has can be read; messages cannot be sent. Start the broker again and they continue."),
    table("Topics that wait for a disk", [
      { title: "Topic", kind: "name", of: (one) => topicLink(one.topic) },
      { title: "Disk of node", of: (one) => h("code", null, one.node) },
      { title: "Since", of: (one) => (one.since ? moment(one.since * 1000) : "unknown") },
      { title: "A take-over gives up", of: (one) => `offset ${count(one.offset)} and later` },
      { title: "Actions", isHidden: true, kind: "action", of: (one) => actionButton("Take over…", () => askTakeOver(ctx, one), { label: `Take over ${one.topic}`, refusal }) },
    ], data.waiting, { keyOf: (one) => one.topic }),
    more > 0 ? h("p", { class: "note" }, `${plural(more, "more topic")} may wait, too.`) : null);
}

function moves(data) {
  if (!data.moves.length) return null;
  return panel("Moves", { id: "moves", class: "panel flush", aside: h("span", { class: "note" }, `${plural(data.moves.length, "topic")} under way`) },
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
  const most = Math.max(1e-9, ...found.brokers.map((one) => one.load));
  const isEven = found.variation <= found.threshold;
  const refusal = data.rights?.brokers ? "" : "You may not manage brokers: this needs the permission manage_broker";
  return panel("Balance", {
    id: "balance",
    aside: actionButton("Rebalance…", () => askRebalance(ctx), { label: "Rebalance", refusal }),
  },
  h("p", null, isEven ? badge("even", "ok") : badge("uneven", "attention"),
    ` The loads differ by ${found.variation.toFixed(2)} (variation); a rebalance moves topics above ${found.threshold.toFixed(2)}. Load is `,
    found.strategy === "fair" ? "the number of topics." : "traffic, CPU, uploads and topics."),
  h("div", { class: "bars" }, found.brokers.map((one) => h("div", { key: one.node, class: "bar-line" },
    h("code", null, one.node),
    h("svg", { viewBox: "0 0 100 8", preserveAspectRatio: "none", "aria-hidden": "true" },
      h("rect", { class: "meter-track", width: 100, height: 8 }),
      h("rect", { class: "meter-fill", width: ((one.load / most) * 100).toFixed(2), height: 8 })),
    h("span", { class: "figure" }, `${one.load.toFixed(1)}, ${plural(one.topics, "topic")}`)))));
}
