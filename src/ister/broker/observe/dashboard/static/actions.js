// What an operator can do from these pages, each behind a question.

import { post, topicPath } from "./api.js";
import { ask } from "./dialog.js";
import { h } from "./dom.js";
import { count } from "./words.js";

const JOBS = {
  compact: ["Compact", "merges small objects of the bucket into larger ones, and drops nothing that the topic's policy keeps"],
  scrub: ["Scrub", "reads every object and checks it against its checksum"],
  export: ["Export", "brings the tables of the export up to date"],
  tier: ["Tier", "uploads what is synced and not in the bucket yet"],
};

export const jobNames = Object.keys(JOBS);
export const jobTitle = (job) => JOBS[job][0];

function told(ctx) {
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
      "The broker syncs and closes the topic and gives up ownership; the next broker that a client asks for it opens it again.",
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
