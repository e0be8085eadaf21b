// The pipeline: whether one runs, what it uploads, and what each job did last.

import { askJob, jobNames, jobTitle } from "./actions.js";
import { get } from "./api.js";
import { h } from "./dom.js";
import { actionButton, badge, command, empty, facts, panel, table, topicLink } from "./parts.js";
import { bytes, count, moment, plural, sentence, span } from "./words.js";

const JOBS = ["tier", "resort", "compact", "export", "gc", "scrub", "replay", "stats"];

const seconds = (value) => (typeof value === "number" ? value * 1000 : null);

function requestTime(value) {
  if (typeof value === "number") return moment(value > 1e11 ? value : value * 1000);
  return value ? String(value) : "–";
}

export const page = {
  title: () => "Pipeline",

  load: (route, state, signal) => get("api/pipeline", {}, signal),

  view(data, ctx) {
    return [
      h("div", { key: "head", class: "page-head" }, h("h1", { tabindex: -1 }, "Pipeline")),
      running(data, ctx),
      uploads(data),
      jobs(data, ctx),
      requests(data),
      reports(data),
    ];
  },
};

function running(data, ctx) {
  const { lease, status, engine } = data;
  const hasBucket = (ctx.about?.broker?.mode ?? "wal_cloud") === "wal_cloud";
  const now = Date.now();
  let state = "ok";
  let title = "A pipeline is running";
  const words = [];
  if (data.is_running) {
    if (lease?.job && lease.job !== "run") title = `The job ${lease.job} is running`;
    if (lease) {
      words.push(`On ${lease.host ?? "an unknown host"}, process ${lease.process ?? "unknown"}, since ${moment(seconds(lease.since))} (${span(now / 1000 - lease.since)}).`);
    }
    const age = status?.updated_at ? now / 1000 - status.updated_at : null;
    if (age !== null && age > 60) {
      state = "attention";
      words.push(`It has not reported for ${span(age)}.`);
    }
  } else {
    title = "No pipeline is running";
    state = engine === "spark" && hasBucket ? "bad" : "plain";
    words.push(sentence((data.words ?? "").replace(/^No pipeline is running(: |, and )/, "")));
    if (hasBucket) words.push("Objects are not merged, checked or exported until one runs.");
    if (status?.updated_at) words.push(`The last one ran on ${status.host} until ${moment(seconds(status.updated_at))}.`);
  }
  return h("section", { key: "running", class: `panel health ${state}`, "aria-labelledby": "running" },
    h("h2", { id: "running" }, h("span", { class: `dot ${state}` }), title),
    h("ul", null, words.map((one) => h("li", { key: one }, one))),
    data.is_running || !hasBucket ? null : h("p", null, "Start one: ", command("ister pipeline run"), ", or a broker together with one: ", command("ister up")));
}

function uploads(data) {
  const tier = data.is_running ? data.status?.tier : null;
  if (!tier) return null;
  const memory = Object.entries(data.status.memory ?? {})
    .filter(([name, value]) => name.endsWith("_rss_bytes") && typeof value === "number")
    .map(([name, value]) => `${name.replace("_rss_bytes", "").replace("jvm", "JVM")} ${bytes(value)}`);
  return panel("Uploads", { id: "uploads" },
    tier.is_on === false ? h("p", null, "The pipeline does not upload: see storage.uploader.engine.") : null,
    facts([
      ["Topics", count(tier.topics)],
      ["Behind", tier.lag_messages === null || tier.lag_messages === undefined ? "unknown" : plural(tier.lag_messages, "message")],
      ["Uploaded", `${plural(tier.tiered_messages_total ?? 0, "message")}, ${bytes(tier.tiered_bytes_total ?? 0)}`, ` in ${plural(tier.tiered_objects_total ?? 0, "object")}`],
      ["Last cycle", tier.last_cycle_at ? moment(seconds(tier.last_cycle_at)) : "none yet", tier.last_cycle_seconds ? ` took ${span(tier.last_cycle_seconds)}` : ""],
      memory.length ? ["Memory", memory.join(", ")] : null,
    ]),
    tier.last_error ? h("p", { class: "banner bad" }, `The last cycle failed: ${tier.last_error}`) : null,
    tier.failing_topics?.length
      ? h("p", { class: "banner bad" }, `Failing: ${tier.failing_topics.join(", ")}${tier.failing_topics_total > tier.failing_topics.length ? ` and ${tier.failing_topics_total - tier.failing_topics.length} more` : ""}.`)
      : null);
}

function result(name, data) {
  const report = data.reports?.[name];
  const plan = data.is_running ? data.status?.jobs?.[name] : null;
  if (plan?.last_error) return [badge("failed", "bad"), ` ${plan.last_error}`];
  if (!report) return h("span", { class: "note" }, "never ran");
  const errors = report.errors ?? [];
  if (errors.length) return [badge(plural(errors.length, "error"), "bad"), ` ${errors[0].message ?? errors[0].error ?? ""}`];
  return [badge(report.dry_run ? "tried" : "ok", "ok"), ` ${plural((report.topics ?? []).length, "topic")}`];
}

function next(name, data) {
  const request = data.requests?.[name];
  const plan = data.is_running ? data.status?.jobs?.[name] : null;
  if (plan?.is_running || request?.state === "running") return badge("runs now", "ok");
  if (request && request.state !== "done") return badge("asked for", "attention");
  if (!plan) return "–";
  return plan.next_at ? `in ${span(plan.next_at - Date.now() / 1000)}` : "when asked";
}

function jobs(data, ctx) {
  const refusal = ctx.about?.rights?.brokers === false ? "You may not run jobs: this needs the permission manage_broker" : "";
  return panel("Jobs", { id: "jobs", class: "panel flush" },
    table("Jobs of the pipeline and their last runs", [
      { title: "Job", kind: "name", of: (name) => name },
      { title: "Last run", kind: "time", of: (name) => (data.reports?.[name]?.started_at ? moment(seconds(data.reports[name].started_at)) : "–") },
      { title: "Took", kind: "number", of: (name) => (data.reports?.[name] ? span(data.reports[name].seconds) : "–") },
      { title: "Result", kind: "words", of: (name) => result(name, data) },
      { title: "Next", of: (name) => next(name, data) },
      {
        title: "Actions", isHidden: true, kind: "action",
        of: (name) => (jobNames.includes(name)
          ? actionButton("Run now…", () => askJob(ctx, name), { label: `${jobTitle(name)} now`, refusal })
          : null),
      },
    ], JOBS, { keyOf: (name) => name }),
    refusal ? h("p", { class: "note inset" }, `${refusal}.`) : null);
}

function requests(data) {
  const waiting = Object.entries(data.requests ?? {});
  if (!waiting.length) return null;
  return panel("Requests", { id: "requests", class: "panel flush" },
    table("Requested jobs", [
      { title: "Job", kind: "name", of: ([job]) => job },
      { title: "Requested", kind: "time", of: ([, one]) => requestTime(one.requested_at) },
      { title: "By", of: ([, one]) => one.by ?? "–" },
      { title: "Topics", kind: "words", of: ([, one]) => (one.topics?.length ? one.topics.join(", ") : "all") },
      { title: "State", of: ([, one]) => badge(one.state ?? "waiting", one.state === "done" ? "ok" : "attention") },
    ], waiting, { keyOf: ([job]) => job }));
}

const named = (name) => name.replaceAll("_", " ");

function cell(name, value) {
  if (value === null || value === undefined) return "–";
  if (typeof value === "boolean") return value ? "yes" : "no";
  if (typeof value === "number") return name.endsWith("bytes") ? bytes(value) : count(value);
  if (typeof value === "object") return Array.isArray(value) ? count(value.length) : "…";
  return String(value);
}

function reports(data) {
  const there = JOBS.filter((name) => data.reports?.[name]);
  return panel("Last reports", { id: "reports" },
    there.length
      ? there.map((name) => report(name, data.reports[name]))
      : empty("No job has run yet. ", h("p", null, command("ister pipeline run"), " runs them on their schedules.")));
}

function report(name, content) {
  const rows = content.topics ?? [];
  const columns = [...new Set(rows.flatMap((one) => Object.keys(one)))].filter((one) => one !== "topic").slice(0, 7);
  const others = Object.entries(content)
    .filter(([key, value]) => !["ok", "job", "dry_run", "started_at", "seconds", "topics", "errors"].includes(key) && typeof value !== "object");
  return h("details", { key: name, class: "report" },
    h("summary", null, h("strong", null, name), ` ${moment(seconds(content.started_at))}, took ${span(content.seconds)}, ${plural(rows.length, "topic")} `,
      content.errors?.length ? badge(plural(content.errors.length, "error"), "bad") : badge("ok", "ok")),
    others.length ? facts(others.map(([key, value]) => [named(key), cell(key, value)])) : null,
    content.errors?.length
      ? h("ul", null, content.errors.map((one, at) => h("li", { key: at }, one.topic ? `${one.topic}: ` : "", one.message ?? one.error ?? JSON.stringify(one), one.hint ? h("span", { class: "note" }, ` ${one.hint}`) : null)))
      : null,
    table(`Results of ${name} by topic`, [
      { title: "Topic", kind: "name", of: (one) => topicLink(one.topic) },
      ...columns.map((key) => ({ title: named(key), kind: rows.some((one) => typeof one[key] === "number") ? "number" : "", of: (one) => cell(key, one[key]) })),
    ], rows, { keyOf: (one) => one.topic, empty: h("p", { class: "note" }, "There was nothing to do.") }));
}
