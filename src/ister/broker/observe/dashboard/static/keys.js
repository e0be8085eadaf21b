// Keys for the whole page; see HELP. None of them works while something is typed or a question is open.

import { h, render } from "./dom.js";

const HELP = [
  [["/"], "Filter topics or messages"],
  [["?"], "Show these keys"],
  [["Esc"], "Close a dialog; leave a field"],
  [["g", "o"], "Overview"],
  [["g", "t"], "Topics"],
  [["g", "p"], "Pipeline"],
  [["g", "b"], "Brokers"],
  [["g", "h"], "Health"],
  [["←", "→"], "In a chart: previous and next value"],
];
const PLACES = { o: "#/", t: "#/topics", p: "#/pipeline", b: "#/brokers", h: "#/health" };
const CHORD_MS = 1200;

const dialog = document.getElementById("dialog");
let chordUntil = 0;

const isTyping = (node) => node.closest?.("input:not([type=radio]):not([type=checkbox]), textarea, select, [contenteditable]");

export function showKeys() {
  const opener = document.activeElement;
  dialog.onclose = () => {
    render(dialog);
    if (opener?.isConnected) opener.focus();
  };
  dialog.onclick = (event) => { if (event.target === dialog) dialog.close(); };
  dialog.oncancel = null;
  render(dialog, h("form", { method: "dialog" },
    h("h2", { id: "dialog-title" }, "Keys"),
    h("dl", { class: "keys" }, HELP.map(([keys, words]) => h("div", { key: words },
      h("dt", null, keys.map((key) => h("kbd", { key }, key))), h("dd", null, words)))),
    h("div", { class: "dialog-end" }, h("button", { type: "submit", autofocus: true }, "Close"))));
  dialog.showModal();
}

// Focuses the filter of the page; pages without one lead to that of topics.
export function focusFilter() {
  const field = document.querySelector("main [data-filter]");
  if (field === null) return false;
  field.closest("details")?.setAttribute("open", "");
  field.focus();
  field.select?.();
  return true;
}

export function listen({ wantFilter }) {
  document.addEventListener("keydown", (event) => {
    if (event.defaultPrevented || event.ctrlKey || event.metaKey || event.altKey || dialog.open) return;
    if (isTyping(event.target)) {
      if (event.key === "Escape") event.target.blur();
      return;
    }
    const isChord = Date.now() < chordUntil;
    chordUntil = 0;
    if (isChord && event.key in PLACES) location.hash = PLACES[event.key];
    else if (event.key === "/") {
      if (!focusFilter()) wantFilter();
    } else if (event.key === "?") showKeys();
    else if (event.key === "g") {
      chordUntil = Date.now() + CHORD_MS;
      return;
    } else return;
    event.preventDefault();
  });
}
