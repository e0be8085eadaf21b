// How the broker is, at a glance.

import { get } from "./api.js";
import { lineChart, sparkline } from "./charts.js";
import { h } from "./dom.js";
import { healthPanel } from "./health.js";
import { facts, meter, panel, tile, windowChoice } from "./parts.js";
import { chartWindow } from "./settings.js";
import { noTopics, topicTable } from "./topics.js";
import { byteRate, bytes, count, messageRate, plural, short, span } from "./words.js";

const TOPICS = 8;

function column(points, at) {
  return points.map((one) => [one[0], one[at]]);
}

const came = (topic) => topic.rates?.messages_in
  ?? (topic.topics ?? []).reduce((sum, one) => sum + (one.rates?.messages_in ?? 0), 0);

export const page = {
  title: () => "Overview",

  async load(route, state, signal) {
    const [overview, listed] = await Promise.all([
      get("api/overview", { window: chartWindow() }, signal), get("api/topics", { limit: 50, fold: "yes" }, signal),
    ]);
    return { overview, listed };
  },

  view({ overview, listed }, ctx) {
    const { totals, rates, disk, health } = overview;
    const { points = [], window = "5m", every_seconds: every = 2 } = overview.history ?? {};
    const values = (at) => points.slice(-60).map((one) => one[at] ?? 0);
    const half = ctx.width > 900 ? Math.floor((ctx.width - 20) / 2) : ctx.width;
    const chart = { width: half - 42, now: points.length ? points.at(-1)[0] : Date.now(), window, every };
    const busiest = [...listed.topics]
      .sort((one, other) => came(other) - came(one) || (one.topic < other.topic ? -1 : 1))
      .slice(0, TOPICS);
    return [
      h("div", { key: "head", class: "page-head" },
        h("h1", { tabindex: -1 }, "Overview"),
        h("p", { class: "note" }, `up for ${span(overview.broker?.uptime_seconds ?? 0)}`),
        h("div", { class: "page-tools" }, windowChoice(ctx))),
      healthPanel(health, ctx),
      h("section", { key: "figures", "aria-labelledby": "figures" },
        h("h2", { id: "figures", class: "hidden-text" }, "Figures"),
        h("div", { class: "tiles" },
          tile("In", messageRate(rates.messages_in), byteRate(rates.bytes_in), sparkline(values(1), { tone: "in" })),
          tile("Out", messageRate(rates.messages_out), byteRate(rates.bytes_out), sparkline(values(2), { tone: "out" })),
          tile("Behind", `${short(totals.lag_messages)} msg`, `over ${plural(totals.subscriptions, "subscription")}`, sparkline(values(4), { tone: "lag" })),
          tile("Not uploaded yet", bytes(totals.upload_lag_bytes), `${bytes(totals.objects_bytes)} uploaded (${plural(totals.objects, "object")})`, sparkline(values(5), { tone: "upload" })))),
      h("div", { key: "charts", class: "columns" },
        panel("Messages per second", { id: "chart-messages" },
          lineChart("Messages per second", [
            { name: "In", tone: "in", points: column(points, 1) },
            { name: "Out", tone: "out", points: column(points, 2) },
          ], { say: (value, isShort) => (isShort ? short(value) : messageRate(value)), ...chart })),
        panel("Upload lag", { id: "chart-upload" },
          lineChart("Upload lag", [{ name: "Not in the bucket", tone: "upload", points: column(points, 5) }],
            { say: (value) => bytes(Math.round(value)), ...chart, isBytes: true }))),
      panel("Topics", { id: "topics", class: "panel flush", aside: h("a", { href: "#/topics" }, `All ${count(listed.total)}`) },
        busiest.length ? topicTable(busiest, "Busiest topics", listed.recent ?? {}, ctx) : noTopics()),
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
