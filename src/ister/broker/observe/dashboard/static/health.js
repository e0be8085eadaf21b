// The checks of the broker: what is wrong, where, and what to do.

import { get } from "./api.js";
import { h } from "./dom.js";
import { command, subscriptionLink, topicLink } from "./parts.js";
import { RUNBOOK } from "./runbook.js";
import { plural, sentence, span } from "./words.js";

const ORDER = ["bad", "attention", "ok"];
export const STATE_WORDS = { ok: "Healthy", attention: "Needs attention", bad: "Unhealthy" };
const BADGES = { ok: "ok", attention: "needs attention", bad: "bad" };

export const isBad = (check) => check.state !== "ok";

function subjects(check) {
  const all = check.subjects ?? [];
  if (!all.length) return null;
  return h("p", { class: "subjects" }, "Go to: ", all.map((one, at) => [
    at ? ", " : "",
    one.subscription ? [subscriptionLink(one.topic, one.subscription), " of ", one.topic] : topicLink(one.topic),
  ]));
}

// The checks that are not ok, as a list with ways to the place and to what to do.
export function alarms(health) {
  const bad = (health.checks ?? []).filter(isBad);
  if (!bad.length) return null;
  return h("ul", { class: "alarms" }, bad.map((check) => h("li", { key: check.name },
    h("p", { class: "alarm-words" }, sentence(check.words)),
    h("div", { class: "alarm-links" },
      subjects(check),
      h("a", { href: `#/health/${check.name}` }, "What to do", h("span", { class: "hidden-text" }, ` about ${RUNBOOK[check.name]?.title ?? check.name}`))))));
}

// The state of a broker that does not answer is not known, whatever it was before.
export function healthPanel(health, ctx) {
  const { isAnswering, age } = ctx;
  const state = isAnswering ? health.state : "bad";
  const title = isAnswering ? STATE_WORDS[health.state] ?? health.state : "The broker does not answer";
  return h("section", { key: "health", class: `panel health ${state}`, "aria-labelledby": "health" },
    h("div", { class: "panel-head" },
      h("h2", { id: "health" }, h("span", { class: `dot ${state}` }), title),
      h("a", { href: "#/health" }, "All checks")),
    isAnswering
      ? alarms(health)
      : h("p", null, `Its state is not known. ${span(age)} ago it was: ${(STATE_WORDS[health.state] ?? health.state).toLowerCase()}.`));
}

export const page = {
  title: () => "Health",

  load: (route, state, signal) => get("api/overview", {}, signal),

  view(overview, ctx) {
    const { health } = overview;
    const wanted = ctx.route.parts[1] ?? null;
    const checks = [...(health.checks ?? [])]
      .sort((one, other) => ORDER.indexOf(one.state) - ORDER.indexOf(other.state));
    const bad = checks.filter(isBad).length;
    return [
      h("div", { key: "head", class: "page-head" },
        h("h1", { tabindex: -1 }, "Health"),
        h("p", { class: "note" }, ctx.isAnswering
          ? bad ? `${plural(bad, "check")} of ${checks.length} ${bad === 1 ? "needs" : "need"} attention` : `${plural(checks.length, "check")}, all ok`
          : `as of ${span(ctx.age)} ago`)),
      h("section", { key: "checks", class: "panel flush checks", "aria-label": "Checks" },
        checks.map((check) => one(check, wanted === check.name, ctx))),
      h("p", { key: "more", class: "note" },
        "Each check has an alarm in deploy/prometheus/alerts.yml; docs/operations/alarms.md explains it with commands."),
    ];
  },
};

function one(check, isWanted, ctx) {
  const book = RUNBOOK[check.name] ?? { title: check.name, alarms: [], meaning: "", steps: [] };
  const state = ctx.isAnswering ? check.state : "plain";
  return h("details", { key: `${check.name}${isWanted ? " wanted" : ""}`, class: `check ${check.state}`, id: `check-${check.name}`, open: isWanted },
    h("summary", null,
      h("span", { class: `dot ${state}` }),
      h("span", { class: "check-title" }, book.title, h("span", { class: "hidden-text" }, `: ${BADGES[check.state]}`)),
      h("span", { class: "check-words" }, sentence(check.words))),
    h("div", { class: "check-more" },
      subjects(check),
      h("p", null, book.meaning),
      h("h2", { class: "small" }, "What to do"),
      check.hint ? h("p", null, sentence(check.hint), ".") : null,
      h("ul", null, book.steps.map((step) => h("li", { key: step.command ?? step },
        step.command ? command(step.command) : step))),
      book.alarms.length ? h("p", { class: "note" }, `Alarm: ${book.alarms.join(", ")}`) : null));
}
