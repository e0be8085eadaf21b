// Questions before something is done. Nothing happens until the button that says what is pressed.

import { h, render } from "./dom.js";

const dialog = document.getElementById("dialog");

// `run(form)` does it and returns what happened in words; what it throws is shown in the dialog.
export function ask({ title, words, fields = null, confirm, isDangerous = false, run, done }) {
  const hasFields = fields !== null;
  const state = { error: null, isBusy: false };
  const opener = document.activeElement;

  const close = () => dialog.close();
  dialog.onclose = () => {
    render(dialog);
    if (opener?.isConnected) opener.focus();
  };
  dialog.onclick = (event) => { if (event.target === dialog && !state.isBusy) close(); };
  dialog.oncancel = (event) => { if (state.isBusy) event.preventDefault(); };

  const submit = async (event) => {
    event.preventDefault();
    if (state.isBusy) return;
    const form = event.target;
    Object.assign(state, { error: null, isBusy: true });
    draw();
    try {
      const happened = await run(form.elements);
      close();
      done?.(happened);
    } catch (error) {
      Object.assign(state, { error, isBusy: false });
      draw();
    }
  };

  function draw() {
    render(dialog,
      h("form", { method: "dialog", onsubmit: submit },
        h("h2", { id: "dialog-title" }, title),
        words.map((one) => h("p", null, one)),
        fields,
        state.error
          ? h("div", { class: "banner bad", role: "alert" },
            h("p", null, h("strong", null, state.error.status === 403 ? "You may not do this. " : "It was not done. "), state.error.message),
            state.error.hint ? h("p", { class: "note" }, state.error.hint) : null)
          : null,
        h("div", { class: "dialog-end" },
          h("button", { type: "button", onclick: close, autofocus: !hasFields }, "Cancel"),
          h("button", { type: "submit", class: isDangerous ? "danger" : "primary", "aria-disabled": state.isBusy ? "true" : null },
            state.isBusy ? "Working…" : confirm))));
  }

  draw();
  dialog.showModal();
}
