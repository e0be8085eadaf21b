// Changes of topics, subscriptions and messages, each with a confirmation; the broker checks permissions.

import { post, topicPath } from "./api.js";
import { ask } from "./dialog.js";
import { h } from "./dom.js";
import { told } from "./actions.js";
import { count, plural } from "./words.js";

const POLICIES = [
  ["max_publish_rate", "Messages per second in", "0 is no limit. Faster producers wait."],
  ["max_subscription_dispatch_rate", "Messages per second out", "of each subscription; 0 is no limit."],
  ["max_message_size", "Message size in bytes", "0 is the broker's limit."],
  ["max_producers_per_topic", "Producers", "0 is no limit."],
  ["max_subscriptions_per_topic", "Subscriptions", "0 is no limit."],
  ["max_consumers_per_topic", "Consumers", "0 is no limit."],
  ["max_consumers_per_subscription", "Consumers per subscription", "0 is no limit."],
];

function field(label, control, note = null) {
  return h("div", { class: "form-field" }, h("label", null, h("span", null, label), control), note ? h("p", { class: "note" }, note) : null);
}

function select(name, options, current) {
  return h("select", { name }, options.map(([value, words]) =>
    h("option", { key: value, value, selected: value === current }, words)));
}

function typed(expected, what) {
  return (form) => {
    if (form.confirm.value.trim() !== expected) throw new Error(`Enter ${expected} to confirm that ${what}.`);
    return expected;
  };
}

const confirmField = (expected) => field(
  h("span", null, "Enter ", h("code", null, expected), " to confirm"),
  h("input", { name: "confirm", type: "text", autocomplete: "off", spellcheck: "false", required: true }),
);

export function askCreate(ctx) {
  ask({
    title: "Create a topic",
    words: ["Its name is /namespace/topic. The ack level cannot be changed later."],
    fields: h("div", { class: "form-fields" },
      field("Name", h("input", { name: "topic", type: "text", required: true, autocomplete: "off", spellcheck: "false", placeholder: "/default/orders" })),
      field("Partitions", h("input", { name: "partitions", type: "number", min: 0, max: 1000, step: 1, value: "0", inputmode: "numeric" }),
        "0 creates a topic without partitions."),
      field("Acknowledged when", select("ack", [
        ["", "the broker's default"], ["memory", "memory: received"], ["written", "written: survives a crash of the broker"],
        ["synced", "synced: survives power loss"], ["tiered", "tiered: in the bucket"]], "")),
      field("Messages", select("kept", [["yes", "are stored"], ["no", "go to connected consumers only"]], "yes"))),
    confirm: "Create the topic",
    run: (form) => post("api/topics", {
      topic: form.topic.value.trim(),
      partitions: Number(form.partitions.value || 0),
      ack: form.ack.value,
      is_reliable: form.kept.value === "yes",
    }),
    done: (answer) => {
      told(ctx)(answer);
      ctx.navigate(`#/topics${answer.topic}`);
    },
  });
}

export function askDelete(ctx, topic) {
  const parts = topic.partitions?.length ?? 0;
  const check = typed(topic.topic, "it is deleted");
  ask({
    title: `Delete ${topic.topic}`,
    words: [
      `${parts ? `All ${parts} partitions, ` : ""}All messages in files and in the bucket, all subscriptions and their positions are deleted. This cannot be undone.`
        .replace(/, All/, ", all"),
      topic.subscriptions?.length ? `${plural(topic.subscriptions.length, "subscription")} would lose its topic.`.replace("subscriptions would lose its", "subscriptions would lose their") : "No subscription uses it.",
    ],
    fields: confirmField(topic.topic),
    confirm: "Delete the topic",
    isDangerous: true,
    run: (form) => post(`${topicPath(topic.topic)}/delete`, { confirm: check(form) }),
    done: (answer) => {
      told(ctx)(answer);
      ctx.navigate("#/topics");
    },
  });
}

// `name=value` in each line.
function attributesOf(text) {
  const found = {};
  for (const line of text.split("\n").map((one) => one.trim()).filter(Boolean)) {
    const at = line.indexOf("=");
    if (at < 1) throw new Error(`Attributes are lines such as source=web, not “${line.slice(0, 40)}”.`);
    found[line.slice(0, at).trim()] = line.slice(at + 1).trim();
  }
  return found;
}

export function askPublish(ctx, topic) {
  ask({
    title: `Publish to ${topic.topic}`,
    words: ["The message is delivered to every subscription, like any other. It cannot be taken back."],
    fields: h("div", { class: "form-fields" },
      field("Payload", h("textarea", { name: "payload", rows: 5, spellcheck: "false", placeholder: '{"id": 1}' })),
      field("Routing key", h("input", { name: "key", type: "text", autocomplete: "off", spellcheck: "false" }),
        topic.partitions?.length ? "Selects the partition; without a key, any partition." : null),
      field("Attributes", h("textarea", { name: "attributes", rows: 2, spellcheck: "false", placeholder: "source=web" }), "One per line.")),
    confirm: "Publish the message",
    run: (form) => post(`${topicPath(topic.topic)}/publish`, {
      payload: form.payload.value, key: form.key.value.trim(), attributes: attributesOf(form.attributes.value),
    }),
    done: told(ctx),
  });
}

export function askPolicies(ctx, topic) {
  const own = topic.own_policies ?? {};
  const inForce = topic.policies ?? {};
  ask({
    title: `Policies of ${topic.topic}`,
    words: ["They apply at once. Empty fields are inherited from the namespace or the broker."],
    fields: h("div", { class: "form-fields" }, POLICIES.map(([name, label, note]) => field(label,
      h("input", {
        name, type: "number", min: 0, step: 1, inputmode: "numeric", value: name in own ? String(own[name]) : "",
        placeholder: name in inForce && !(name in own) ? `inherited: ${inForce[name]}` : "inherited",
      }), note))),
    confirm: "Change the policies",
    run: (form) => post(`${topicPath(topic.topic)}/policies`, Object.fromEntries(POLICIES.map(([name]) => [
      name, form[name].value === "" ? null : Number(form[name].value)]))),
    done: told(ctx),
  });
}

export function askFailurePolicy(ctx, topic, subscription) {
  const policy = subscription.failure_policy ?? {};
  const number = (name) => h("input", { name, type: "number", min: 0, step: 1, inputmode: "numeric", required: true, value: String(policy[name] ?? 0) });
  ask({
    title: `Failure policy of ${subscription.name}`,
    words: ["What happens to messages that consumers reject or do not acknowledge in time. It applies at once, also to a message that blocks the subscription."],
    fields: h("div", { class: "form-fields" },
      field("A message that failed too often", select("poison", [
        ["block", "blocks the subscription"], ["dead_letter", "goes to a dead-letter topic"], ["drop", "is dropped"]], policy.poison)),
      field("Dead-letter topic", h("input", { name: "dead_letter_topic", type: "text", autocomplete: "off", spellcheck: "false", value: policy.dead_letter_topic ?? "", placeholder: `${topic.topic}-dead` }),
        "Letters in it can be requeued."),
      field("Redeliveries before that", number("max_redelivery_count")),
      field("Time to acknowledge, in ms", number("ack_timeout_ms")),
      field("First delay, in ms", number("base_redelivery_delay_ms")),
      field("Longest delay, in ms", number("max_redelivery_delay_ms")),
      field("Delays", select("backoff", [["exponential", "double each time"], ["fixed", "stay the same"]], policy.backoff))),
    confirm: "Change the policy",
    isDangerous: true,
    run: (form) => post(`${topicPath(topic.topic)}/subscriptions/${encodeURIComponent(subscription.name)}/policy`, {
      poison: form.poison.value,
      dead_letter_topic: form.dead_letter_topic.value.trim() || (form.poison.value === "dead_letter" ? `${topic.topic}-dead` : null),
      backoff: form.backoff.value,
      ...Object.fromEntries(["max_redelivery_count", "ack_timeout_ms", "base_redelivery_delay_ms", "max_redelivery_delay_ms"]
        .map((name) => [name, Number(form[name].value)])),
    }),
    done: told(ctx),
  });
}

export function askUnsubscribe(ctx, topic, subscription) {
  const check = typed(subscription.name, "it is deleted");
  ask({
    title: `Delete subscription ${subscription.name}`,
    words: [
      `Its position (offset ${count(subscription.cursor)}) and policy are deleted; messages stay. A consumer that uses the name later creates a new subscription.`,
      subscription.consumers?.length ? `${plural(subscription.consumers.length, "consumer")} is connected, so this will be refused.`.replace("consumers is", "consumers are") : "No consumer is connected.",
    ],
    fields: confirmField(subscription.name),
    confirm: "Delete the subscription",
    isDangerous: true,
    run: (form) => post(`${topicPath(topic.topic)}/subscriptions/${encodeURIComponent(subscription.name)}/delete`, { confirm: check(form) }),
    done: told(ctx),
  });
}

// -- dead letters ---------------------------------------------------------------------------

// The broker handles some at a time, and says where to continue.
async function resolveAll(path, selection) {
  let done = 0;
  const failed = [];
  let start = 0;
  while (start !== null) {
    const answer = await post(path, { ...selection, start });
    done += answer.count;
    failed.push(...answer.failed);
    start = answer.next;
  }
  return { done, failed };
}

function outcome(ctx, verb) {
  return ({ done, failed }) => {
    ctx.toast(`${plural(done, "message")} ${verb}${failed.length ? `; ${plural(failed.length, "message")} failed and stay: ${failed[0].error}` : ""}.`,
      failed.length ? "bad" : "ok");
    ctx.state.letters = null;
    ctx.reload();
  };
}

export function askRequeue(ctx, topic, selection, what) {
  ask({
    title: `Requeue ${what}`,
    words: [
      "The messages are published again to the end of the topic that they failed in, with their original attributes. Every subscription of that topic gets them, each at least once.",
      "Fix the consumer first: otherwise they come back.",
    ],
    fields: field("To another topic", h("input", { name: "to", type: "text", autocomplete: "off", spellcheck: "false", placeholder: "the topic that each failed in" })),
    confirm: "Requeue",
    isDangerous: true,
    run: (form) => resolveAll(`${topicPath(topic)}/dead-letters/requeue`, { ...selection, to: form.to.value.trim() }),
    done: outcome(ctx, "requeued"),
  });
}

export function askDrop(ctx, topic, selection, what) {
  ask({
    title: `Drop ${what}`,
    words: ["The messages are no longer pending. They stay in the dead-letter topic until its retention removes them, but cannot be requeued."],
    confirm: "Drop",
    isDangerous: true,
    run: () => resolveAll(`${topicPath(topic)}/dead-letters/drop`, selection),
    done: outcome(ctx, "dropped"),
  });
}
