// What an operator can do from these pages, each behind a question.

import { post, topicPath } from "./api.js";
import { ask } from "./dialog.js";
import { h } from "./dom.js";
import { count, plural } from "./words.js";

const JOBS = {
  compact: ["Compact", "merges small objects of the bucket into larger ones, and drops nothing that the topic's policy keeps"],
  scrub: ["Scrub", "reads every object and checks it against its checksum"],
  export: ["Export", "brings the tables of the export up to date"],
  tier: ["Tier", "uploads what is synced and not in the bucket yet"],
};

export const jobNames = Object.keys(JOBS);
export const jobTitle = (job) => JOBS[job][0];

export function told(ctx) {
  return (answer) => {
    ctx.toast(answer?.done ?? "Done.");
    ctx.reload();
  };
}

export function askSeek(ctx, topic, subscription) {
  const radio = (value, words, more = null) =>
    h("div", { class: "option" },
      h("label", null, h("input", { type: "radio", name: "to", value, checked: value === "earliest" }), words), more);
  const choose = (value) => (event) => {
    event.target.closest("form").elements.to.value = value;
  };
  ask({
    title: `Move the cursor of ${subscription.name}`,
    words: [
      `The subscription ${subscription.name} of ${topic.topic} is at offset ${count(subscription.cursor)}. `
      + "Moving it back delivers messages again; moving it forward skips messages for good.",
    ],
    fields: h("fieldset", { class: "options" },
      h("legend", null, "Continue at"),
      radio("earliest", `the earliest message (offset ${count(topic.earliest)})`),
      radio("latest", `the end (offset ${count(topic.watermarks.next)})`),
      radio("offset", "an offset",
        h("input", {
          type: "number", name: "offset", min: 0, step: 1, inputmode: "numeric", "aria-label": "Offset",
          placeholder: String(subscription.cursor), oninput: choose("offset"),
        })),
      radio("time", "a publish time",
        h("input", { type: "datetime-local", name: "time", step: 1, "aria-label": "Publish time, in your time zone", oninput: choose("time") }))),
    confirm: "Move the cursor",
    isDangerous: true,
    run: (form) => post(
      `${topicPath(topic.topic)}/subscriptions/${encodeURIComponent(subscription.name)}/seek`, { to: target(form) }),
    done: told(ctx),
  });
}

function target(form) {
  const to = form.to.value;
  if (to === "offset") {
    if (!/^\d+$/.test(form.offset.value)) throw new Error("An offset must be a whole number, 0 or more.");
    return Number(form.offset.value);
  }
  if (to === "time") {
    const at = new Date(form.time.value);
    if (Number.isNaN(at.getTime())) throw new Error("Enter a date and a time.");
    return `t:${at.toISOString()}`;
  }
  return to;
}

export function askUnload(ctx, topic) {
  ask({
    title: `Unload ${topic.topic}`,
    words: [
      "The broker syncs and closes the topic and gives up ownership; another broker opens it, or this one if there is no other.",
      "Producers and consumers reconnect automatically after a moment. No message is lost.",
    ],
    confirm: "Unload the topic",
    isDangerous: true,
    run: () => post(`${topicPath(topic.topic)}/unload`, {}),
    done: told(ctx),
  });
}

export function askJob(ctx, job, topic = null) {
  const [title, what] = JOBS[job];
  ask({
    title: topic ? `${title} ${topic} now` : `${title} now`,
    words: [
      `This asks the running pipeline to do it as soon as possible, also if its schedule is off. The job ${what}.`,
      topic ? `It processes only ${topic}.` : "It processes all topics.",
    ],
    confirm: `${title} now`,
    run: () => post("api/pipeline/requests", { job, topics: topic ? [topic] : null }),
    done: told(ctx),
  });
}

export function askMove(ctx, topic, brokers) {
  const others = brokers.filter((one) => one.node !== topic.owner?.node && one.state === "active");
  ask({
    title: `Move ${topic.topic}`,
    words: [
      "The broker uploads the rest of the topic's messages and hands it over to another broker.",
      "Producers and consumers follow automatically. No message is lost.",
    ],
    fields: h("label", { class: "field" }, "To broker ",
      h("select", { name: "to", "aria-label": "To broker" },
        others.map((one) => h("option", { key: one.node, value: one.node }, `${one.node} (${one.broker_url})`)))),
    confirm: "Move the topic",
    isDangerous: true,
    run: (form) => post(`${topicPath(topic.topic)}/move`, { to: form.to.value }),
    done: told(ctx),
  });
}

export function askTakeOver(ctx, waiting) {
  ask({
    title: `Take over ${waiting.topic}`,
    words: [
      `This gives up every message from offset ${count(waiting.offset)} on that only the disk of node ${waiting.node} has, acknowledged ones among them. It cannot be undone.`,
      "Do this only if that disk is lost. If the broker can be started again, start it instead.",
    ],
    confirm: "Give up these messages",
    isDangerous: true,
    run: () => post(`${topicPath(waiting.topic)}/take-over`, { confirm: true }),
    done: told(ctx),
  });
}

const brokerPath = (broker) => `api/brokers/${encodeURIComponent(broker.node)}`;

export function askDrain(ctx, broker) {
  ask({
    title: `Drain ${broker.node}`,
    words: [
      `The broker at ${broker.broker_url} hands ${plural(broker.topics, "topic")} over to the other brokers and takes no new ones.`,
      "Producers and consumers follow automatically. The broker keeps running until it is stopped or activated again.",
    ],
    confirm: "Drain the broker",
    isDangerous: true,
    run: () => post(`${brokerPath(broker)}/drain`, {}),
    done: told(ctx),
  });
}

export function askActivate(ctx, broker) {
  ask({
    title: `Activate ${broker.node}`,
    words: ["The broker takes topics again. Topics that it handed over stay where they are."],
    confirm: "Activate the broker",
    run: () => post(`${brokerPath(broker)}/activate`, {}),
    done: told(ctx),
  });
}

export function askRebalance(ctx) {
  ask({
    title: "Rebalance",
    words: [
      "The leader moves a few topics from brokers with much load to those with little. Nothing moves if the load is even.",
      "Producers and consumers follow automatically. No message is lost.",
    ],
    confirm: "Move topics",
    isDangerous: true,
    run: () => post("api/cluster/rebalance", { dry_run: false }),
    done: told(ctx),
  });
}
