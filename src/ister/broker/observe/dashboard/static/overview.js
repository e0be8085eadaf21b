// How the broker is, at a glance.

import { get } from "./api.js";
import { lineChart, sparkline } from "./charts.js";
import { h } from "./dom.js";
import { facts, meter, panel, tile } from "./parts.js";
import { noTopics, sampleRates, topicTable } from "./topics.js";
import { byteRate, bytes, count, messageRate, plural, sentence, short, span } from "./words.js";

const TOPICS = 8;
const WORDS = { ok: "Healthy", attention: "Needs attention", bad: "Unhealthy" };

function column(points, at) {
  return points.map((one) => [one[0], one[at]]);
}

export const page = {
  title: () => "Overview",

  async load(route, state, signal) {
    const [overview, listed] = await Promise.all([
      get("api/overview", {}, signal), get("api/topics", { limit: 50 }, signal),
    ]);
    sampleRates(listed.topics);
    return { overview, listed };
  },

  view({ overview, listed }, ctx) {
    const { totals, rates, disk, health } = overview;
    const points = overview.history?.points ?? [];
    const last = points.slice(-90);
    const values = (at) => last.map((one) => one[at] ?? 0);
    const half = ctx.width > 900 ? Math.floor((ctx.width - 20) / 2) : ctx.width;
    const inner = half - 42;
    const now = points.length ? points.at(-1)[0] : Date.now();
    const busiest = [...listed.topics]
      .sort((one, other) => (other.rates?.messages_in ?? 0) - (one.rates?.messages_in ?? 0) || (one.topic < other.topic ? -1 : 1))
      .slice(0, TOPICS);
    return [
      h("div", { key: "head", class: "page-head" },
        h("h1", { tabindex: -1 }, "Overview"),
        h("p", { class: "note" }, `up for ${span(overview.broker?.uptime_seconds ?? 0)}`)),
      h("section", { key: "health", class: `panel health ${health.state}`, "aria-labelledby": "health" },
        h("h2", { id: "health" }, h("span", { class: `dot ${health.state}` }), WORDS[health.state] ?? health.state),
        health.state !== "ok" && health.words.length
          ? h("ul", null, health.words.map((one) => h("li", { key: one }, sentence(one))))
          : null),
      h("section", { key: "figures", "aria-labelledby": "figures" },
        h("h2", { id: "figures", class: "hidden-text" }, "Figures"),
        h("div", { class: "tiles" },
          tile("In", messageRate(rates.messages_in), byteRate(rates.bytes_in), sparkline("In", values(1), "in")),
          tile("Out", messageRate(rates.messages_out), byteRate(rates.bytes_out), sparkline("Out", values(2), "out")),
          tile("Behind", `${short(totals.lag_messages)} msg`, `over ${plural(totals.subscriptions, "subscription")}`, sparkline("Lag", values(4), "lag")),
          tile("Not uploaded yet", bytes(totals.upload_lag_bytes), `${bytes(totals.objects_bytes)} are, in ${plural(totals.objects, "object")}`, sparkline("Upload lag", values(5), "upload")))),
      h("div", { key: "charts", class: "columns" },
        panel("Messages per second", { id: "chart-messages" },
          lineChart("Messages per second", [
            { name: "In", tone: "in", points: column(points, 1) },
            { name: "Out", tone: "out", points: column(points, 2) },
          ], { say: (value, isShort) => (isShort ? short(value) : messageRate(value)), width: inner, now })),
        panel("Upload lag", { id: "chart-upload" },
          lineChart("Upload lag", [{ name: "Not in the bucket", tone: "upload", points: column(points, 5) }],
            { say: (value) => bytes(Math.round(value)), width: inner, now, isBytes: true }))),
      panel("Topics", { id: "topics", class: "panel flush", aside: h("a", { href: "#/topics" }, `All ${count(listed.total)}`) },
        busiest.length ? topicTable(busiest, "Busiest topics") : noTopics()),
      h("div", { key: "rest", class: "columns" },
        panel("Disk", { id: "disk" }, diskView(disk, overview.broker, totals)),
        panel("Cluster", { id: "cluster" },
          facts([
            ["Brokers", h("a", { href: "#/brokers" }, plural((overview.brokers ?? []).length, "broker"))],
            ["This broker", overview.broker?.node, overview.broker?.host ? ` on ${overview.broker.host}` : ""],
            ["Pipeline", h("a", { href: "#/pipeline" }, pipelineWord(overview.pipeline)), ` ${overview.pipeline?.words ?? ""}`],
            ["Clients", `${plural(totals.producers, "producer")}, ${plural(totals.consumers, "consumer")}`],
            ["Messages held", count(totals.messages)],
          ]))),
    ];
  },
};

function pipelineWord(pipeline) {
  if (!pipeline) return "unknown";
  return pipeline.is_running ? "running" : "not running";
}

function diskView(disk, broker, totals) {
  if (!disk?.total_bytes) {
    return h("p", { class: "note" }, broker?.mode === "memory"
      ? "This log is in memory: no disk is used."
      : "No permission to see this broker's disk.");
  }
  const used = disk.total_bytes - disk.free_bytes;
  return [
    meter("Disk", used, disk.total_bytes,
      `${bytes(disk.free_bytes)} free of ${bytes(disk.total_bytes)} (${Math.round((used / disk.total_bytes) * 100)} % used)`),
    facts([
      ["Used by the log", bytes(disk.used_by_wal_bytes ?? totals.files_bytes)],
      disk.path ? ["Where", h("code", null, disk.path)] : null,
    ]),
  ];
}
