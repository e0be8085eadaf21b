// The pieces that pages are made of: panels, tables, figures, badges, empty states.

import { h } from "./dom.js";
import { chartWindow, keepWindow, WINDOWS } from "./settings.js";

export function panel(title, props, ...children) {
  const { id, aside, note, ...rest } = props ?? {};
  return h(
    "section",
    { class: "panel", "aria-labelledby": id, key: id, ...rest },
    h("div", { class: "panel-head" }, h("h2", { id }, title), aside ?? null),
    note ? h("p", { class: "note" }, note) : null,
    ...children,
  );
}

// Columns are {title, of(row), kind}; a kind is "number", "name" or a class of the column.
// The roles are spelled out because phones show rows as blocks, which would hide that it is a table.
export function table(caption, columns, rows, { keyOf, empty, extra, rowClass, rowId } = {}) {
  if (!rows.length) return empty ?? null;
  const head = h(
    "tr",
    { role: "row" },
    columns.map((one) =>
      h("th", { scope: "col", role: "columnheader", class: one.kind },
        one.isHidden ? h("span", { class: "hidden-text" }, one.title) : one.title)),
  );
  const body = rows.flatMap((row, at) => {
    const key = keyOf ? keyOf(row) : at;
    const cells = columns.map((one) => {
      const content = one.of(row);
      const props = { class: one.kind, "data-label": one.title };
      return one.kind?.startsWith("name")
        ? h("th", { ...props, scope: "row", role: "rowheader" }, content)
        : h("td", { ...props, role: "cell" }, content === null ? null : h("div", { class: "cell" }, content));
    });
    const line = h("tr", { role: "row", key: `row ${key}`, class: rowClass?.(row) ?? null, id: rowId?.(row) ?? null }, cells);
    const more = extra ? extra(row) : null;
    if (!more) return [line];
    return [line, h("tr", { role: "row", class: "extra", key: `extra ${key}` },
      h("td", { role: "cell", colspan: columns.length }, more))];
  });
  return h(
    "div",
    { class: "table-box" },
    h("table", { role: "table" },
      h("caption", { class: "hidden-text" }, caption),
      h("thead", { role: "rowgroup" }, head),
      h("tbody", { role: "rowgroup" }, body)),
  );
}

export function facts(pairs) {
  return h("dl", { class: "facts" }, pairs.filter(Boolean).map(([name, value, note]) =>
    h("div", { key: name }, h("dt", null, name),
      h("dd", null, value, note ? h("span", { class: "note" }, note) : null))));
}

export function badge(text, tone = "plain", title = null) {
  return h("span", { class: `badge ${tone}`, title }, text);
}

export function tile(label, value, note, chart) {
  return h("div", { class: "tile", key: label },
    h("h3", { class: "tile-label" }, label),
    h("p", { class: "tile-value" }, value),
    h("p", { class: "note" }, note),
    chart ?? null);
}

export function empty(words, ...more) {
  return h("div", { class: "empty" }, h("p", null, words), ...more);
}

export function command(text) {
  return h("code", { class: "command" }, text);
}

export function meter(label, value, most, words) {
  const share = most > 0 ? Math.min(1, Math.max(0, value / most)) : 0;
  const tone = share > 0.95 ? "bad" : share > 0.85 ? "attention" : "ok";
  return h("div", { class: "meter" },
    h("svg", { viewBox: "0 0 100 6", preserveAspectRatio: "none", role: "img", "aria-label": `${label}: ${words}` },
      h("rect", { class: "meter-track", width: 100, height: 6 }),
      h("rect", { class: `meter-fill ${tone}`, width: (share * 100).toFixed(2), height: 6 })),
    h("p", { class: "note" }, words));
}

export function topicLink(topic, more = "") {
  return h("a", { href: `#/topics${topic}${more}` }, topic);
}

export function choice(label, name, options, current, choose) {
  return h("fieldset", { class: "choice" },
    h("legend", { class: "hidden-text" }, label),
    options.map(([value, words]) =>
      h("label", { key: value },
        h("input", {
          type: "radio", name, value, checked: value === current,
          onchange: () => choose(value),
        }),
        h("span", null, words))));
}

// A button for an action; disabled, with the reason, for users who may not do it.
export function actionButton(words, run, { label = null, refusal = "", ...props } = {}) {
  return h("button", {
    type: "button", "aria-label": label, onclick: refusal ? null : run, disabled: Boolean(refusal), title: refusal || null, ...props,
  }, words);
}

// Which time charts show; all of them the same.
export function windowChoice(ctx) {
  return choice("Time range of charts", "window", WINDOWS, chartWindow(), (value) => {
    keepWindow(value);
    ctx.reload();
  });
}

export function subscriptionLink(topic, name, words = name) {
  return h("a", { href: `#/topics${topic}?subscription=${encodeURIComponent(name)}` }, words);
}

export function subscriptionWords(kind) {
  return { key_shared: "key-shared" }[kind] ?? kind;
}
