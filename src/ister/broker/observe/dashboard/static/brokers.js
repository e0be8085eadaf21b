// The brokers of the cluster, as this one sees them.

import { get } from "./api.js";
import { h } from "./dom.js";
import { badge, empty, table } from "./parts.js";
import { count, plural } from "./words.js";

export const page = {
  title: () => "Brokers",

  load: (route, state, signal) => get("api/brokers", {}, signal),

  view({ brokers }) {
    return [
      h("div", { key: "head", class: "page-head" },
        h("h1", { tabindex: -1 }, "Brokers"), h("p", { class: "note" }, plural(brokers.length, "broker"))),
      h("section", { key: "brokers", class: "panel flush" },
        table("Brokers and their addresses", [
          { title: "Node", kind: "name", of: (one) => [one.node, one.is_this ? [" ", badge("this one", "ok")] : null] },
          { title: "Topics", kind: "number", of: (one) => count(one.topics) },
          { title: "gRPC", of: (one) => h("code", null, one.broker_url) },
          { title: "Clients connect to", of: (one) => h("code", null, one.connect_url) },
          { title: "Flight", of: (one) => (one.flight_url ? h("code", null, one.flight_url) : "–") },
        ], brokers, { keyOf: (one) => one.node, empty: empty("No broker is registered.") })),
    ];
  },
};
