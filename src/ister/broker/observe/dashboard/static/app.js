// Which page is shown, and keeping it up to date.
//
// The address behind # names the page. Its data is fetched every two seconds while the page is visible,
// and described anew. When the broker does not answer, what was known stays and is said to be old.

import { ApiError, credential, get } from "./api.js";
import { page as brokers } from "./brokers.js";
import { refreshReader } from "./charts.js";
import { page as deadLetters } from "./dead_letters.js";
import { h, render } from "./dom.js";
import { page as health } from "./health.js";
import { focusFilter, listen, showKeys } from "./keys.js";
import { page as messages } from "./messages.js";
import { page as overview } from "./overview.js";
import { badge } from "./parts.js";
import { page as pipeline } from "./pipeline.js";
import { setTheme, theme, THEMES } from "./settings.js";
import { page as topic } from "./topic.js";
import { page as topics } from "./topics.js";
import { span } from "./words.js";

const EVERY_MS = 2000;
const ACCOUNT_EVERY_MS = 10_000;
const NAV = [["#/", "Overview"], ["#/topics", "Topics"], ["#/pipeline", "Pipeline"], ["#/brokers", "Brokers"], ["#/health", "Health"]];
// After this time without an answer, the page does not call itself live.
const LIVE_SECONDS = 6;

const place = (id) => document.getElementById(id);

const shown = {
  route: null,      // {hash, parts, params, page}
  state: {},        // what a page remembers while it is shown
  data: null,
  error: null,
  updatedAt: null,  // when the broker last answered
  isAnswering: true,
  about: null,      // the overview, for the account and the footer
  aboutAt: 0,
  refusal: "",      // why a credential was not taken
  isSignIn: false,
  wantsFilter: false, // the filter of the next page is to get the focus
};
let round = 0;
let timer = 0;
let asking = null;

// -- the address ----------------------------------------------------------------------------

function find(hash) {
  const [path, query = ""] = hash.replace(/^#/, "").split("?");
  const parts = path.split("/").filter(Boolean).map((one) => {
    try {
      return decodeURIComponent(one);
    } catch {
      return one;
    }
  });
  const params = Object.fromEntries(new URLSearchParams(query));
  const [first] = parts;
  let page = null;
  if (!parts.length) page = overview;
  else if (first === "topics" && parts.length === 1) page = topics;
  else if (first === "topics" && parts.length === 3) page = topic;
  else if (first === "topics" && parts.length === 4 && parts[3] === "messages") page = messages;
  else if (first === "topics" && parts.length === 4 && parts[3] === "dead-letters") page = deadLetters;
  else if (first === "health" && parts.length <= 2) page = health;
  else if (first === "pipeline" && parts.length === 1) page = pipeline;
  else if (first === "brokers" && parts.length === 1) page = brokers;
  return { hash: `#${path || "/"}`, parts, params, page, topic: parts.length > 2 ? `/${parts[1]}/${parts[2]}` : null };
}

function navigate(hash, { replace = false } = {}) {
  if (replace) {
    history.replaceState(null, "", hash);
    follow();
  } else location.hash = hash;
}

function follow() {
  const before = shown.route;
  const next = find(location.hash || "#/");
  shown.route = next;
  const isSamePage = before !== null && before.hash === next.hash;
  if (!isSamePage) {
    // What was typed for the page before must not lead back to it.
    clearTimeout(shown.state.typing);
    shown.state = {};
    shown.data = null;
  }
  shown.error = null;
  draw();
  if (!isSamePage && before !== null) {
    scrollTo(0, 0);
    shown.focusHeading = true;
  }
  reload();
}

// -- asking ---------------------------------------------------------------------------------

async function reload() {
  clearTimeout(timer);
  asking?.abort();
  round += 1;
  const mine = round;
  const { route, state } = shown;
  if (route.page === null) return;
  asking = new AbortController();
  try {
    const isAboutOld = shown.about === null || Date.now() - shown.aboutAt > ACCOUNT_EVERY_MS;
    const [data, about] = await Promise.all([
      route.page.load(route, state, asking.signal),
      isAboutOld && route.page !== overview && route.page !== health ? get("api/overview", {}, asking.signal).catch(keepSignIn) : null,
    ]);
    if (mine !== round) return;
    if (route.page === overview) remember(data.overview);
    else if (route.page === health) remember(data);
    else if (about) remember(about);
    noteAnswer();
    Object.assign(shown, { data, error: null, isSignIn: false });
  } catch (error) {
    if (mine !== round) return;
    fail(error);
  }
  draw();
  schedule();
}

function remember(about) {
  shown.about = about;
  shown.aboutAt = Date.now();
}

// The overview beside a page is only for its frame; but who has to sign in has to.
function keepSignIn(error) {
  if (error.status === 401 || error.name === "AbortError") throw error;
  return null;
}

// Whatever it says: a broker that has just started says that it is not ready.
function noteAnswer() {
  if (!shown.isAnswering) announce("The broker answers again.");
  shown.isAnswering = true;
  shown.updatedAt = Date.now();
}

function fail(error) {
  if (!(error instanceof ApiError)) {
    shown.error = new ApiError(-1, "page", `This page failed: ${error.message}`, "Reload it; if that does not help, it is a bug.");
    return;
  }
  if (error.status === 0) {
    if (shown.isAnswering) announce("The broker does not answer. The data shown is old.");
    shown.isAnswering = false;
    shown.error = shown.data === null ? error : null;
    return;
  }
  noteAnswer();
  if (error.status === 401) {
    shown.refusal = credential.get() ? error.message : "";
    shown.focusHeading = !shown.isSignIn;
    shown.isSignIn = true;
    shown.about = null;
    shown.data = null;
    return;
  }
  shown.isSignIn = false;
  shown.error = error;
}

function schedule() {
  clearTimeout(timer);
  if (!document.hidden && !shown.isSignIn) timer = setTimeout(reload, EVERY_MS);
}

// -- drawing --------------------------------------------------------------------------------

function announce(words) {
  place("announce").textContent = words;
}

function toast(words, tone = "ok") {
  announce(words);
  const node = document.createElement("p");
  node.className = `toast ${tone}`;
  node.textContent = words;
  place("toasts").append(node);
  setTimeout(() => node.remove(), 7000);
}

// How much room there is for pictures; not laid out yet, it counts as little.
function width() {
  const main = place("main");
  const style = getComputedStyle(main);
  return Math.max(260, Math.floor(main.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
}

function context() {
  shown.width = width();
  return {
    route: shown.route, state: shown.state, width: shown.width, about: shown.about,
    isAnswering: shown.isAnswering, age: age(),
    update: draw, reload, navigate, toast, announce,
  };
}

// Seconds since the broker last answered.
function age() {
  return shown.updatedAt === null ? 0 : Math.max(0, Math.round((Date.now() - shown.updatedAt) / 1000));
}

function draw() {
  const { route } = shown;
  const title = route.page === null ? "Page not found" : route.page.title(route);
  document.title = `${shown.isAnswering ? "" : "No answer · "}${shown.isSignIn ? "Sign in" : title} · Ister`;
  render(place("nav"), NAV.map(([href, words]) => {
    const isHere = href === "#/" ? route.hash === "#/" : route.hash.startsWith(href);
    return h("a", { key: href, href, "aria-current": isHere ? "page" : null }, words);
  }));
  drawFreshness();
  drawFrame();
  const main = place("main");
  main.dataset.route = route.hash;  // what is drawn, which the address may be ahead of
  main.classList.toggle("old", !shown.isAnswering && shown.data !== null);
  let content;
  if (route.page === null) content = notFound();
  else if (shown.isSignIn) content = signIn();
  else if (shown.error !== null) content = problem(title, shown.error);
  else if (shown.data === null) content = [h("h1", { tabindex: -1 }, title), h("p", { class: "loading" }, "Loading…")];
  else content = view(route, title);
  render(main, silence(), content);
  refreshReader();
  if (shown.focusHeading) {
    shown.focusHeading = false;
    main.querySelector("h1")?.focus({ preventScroll: true });
  }
  if (shown.data !== null && shown.wantsFilter && focusFilter()) shown.wantsFilter = false;
  scrollToWanted();
}

// A link to one row or check: that is what is to be seen, once.
function scrollToWanted() {
  const name = shown.route.params.subscription ?? (shown.route.page === health ? shown.route.parts[1] : null);
  if (!name || shown.data === null || shown.state.hasScrolled === name) return;
  const node = place("wanted") ?? place(`check-${name}`);
  if (node === null) return;
  shown.state.hasScrolled = name;
  node.scrollIntoView({ block: "center" });
}

function view(route, title) {
  try {
    return route.page.view(shown.data, context());
  } catch (error) {
    console.error(error);
    fail(error);
    return problem(title, shown.error);
  }
}

function silence() {
  if (shown.isAnswering) return null;
  const since = shown.updatedAt === null
    ? "It has not responded since this page was opened."
    : `The data shown is from ${span(Math.round((Date.now() - shown.updatedAt) / 1000))} ago.`;
  return h("div", { key: "silence", class: "banner bad" },
    h("strong", null, "The broker does not answer. "),
    h("span", null, since, " Trying again every 2 seconds."));
}

function drawFreshness() {
  const node = place("freshness");
  if (shown.isSignIn || shown.updatedAt === null) {
    render(node, shown.isAnswering ? null : [h("span", { class: "dot bad" }), "No answer"]);
    return;
  }
  const seconds = age();
  const isLate = seconds > LIVE_SECONDS;
  const tone = !shown.isAnswering ? "bad" : isLate ? "attention" : "ok";
  render(node,
    h("span", { class: `dot ${tone}` }),
    h("span", { class: "freshness-words" }, !shown.isAnswering ? "No answer" : isLate ? "Waiting" : "Live"),
    h("span", { class: "note" }, ` last update ${span(seconds)} ago`));
}

const ICONS = {
  auto: [["circle", { cx: 8, cy: 8, r: 6.2, class: "ring" }], ["path", { d: "M8 2a6 6 0 0 1 0 12Z", class: "full" }]],
  light: [["circle", { cx: 8, cy: 8, r: 3.2, class: "full" }], ["path", { d: "M8 .8v2.4M8 12.8v2.4M.8 8h2.4M12.8 8h2.4M2.9 2.9l1.7 1.7M11.4 11.4l1.7 1.7M13.1 2.9l-1.7 1.7M4.6 11.4l-1.7 1.7", class: "ring" }]],
  dark: [["path", { d: "M13.5 9.6A6 6 0 0 1 6.4 2.5a6 6 0 1 0 7.1 7.1Z", class: "full" }]],
};

function drawTools() {
  const now = theme();
  const next = THEMES[(THEMES.indexOf(now) + 1) % THEMES.length];
  const change = () => {
    setTheme(next);
    announce(`Theme: ${next}.`);
    drawTools();
  };
  render(place("tools"),
    h("button", { key: "theme", type: "button", class: "icon", "aria-label": `Theme: ${now}. Change to ${next}`, title: `Theme: ${now}`, onclick: change },
      h("svg", { key: now, width: 16, height: 16, viewBox: "0 0 16 16", "aria-hidden": "true" }, ICONS[now].map(([tag, props], at) => h(tag, { key: at, ...props })))),
    h("button", { key: "keys", type: "button", class: "icon help", "aria-label": "Keys", title: "Keys (?)", onclick: showKeys }, "?"));
}

function drawFrame() {
  const { about } = shown;
  const hasCredential = credential.get() !== "" && !shown.isSignIn;
  render(place("account"),
    about?.auth?.principal && about.auth.mode !== "none" ? h("span", { class: "note" }, about.auth.principal) : null,
    hasCredential ? h("button", { type: "button", class: "quiet", onclick: signOut }, "Sign out") : null);
  render(place("footer"), about?.broker
    ? [h("span", null, `Ister ${about.broker.version}`), h("span", null, `node ${about.broker.node}`),
      h("span", null, about.broker.broker_url), about.auth?.mode === "none" ? badge("no authentication") : null]
    : null);
}

function notFound() {
  return [h("h1", { tabindex: -1 }, "Page not found"),
    h("p", null, "This page does not exist. ", h("a", { href: "#/" }, "Go to the overview"), ".")];
}

function problem(title, error) {
  const heading = {
    403: "Permission denied",
    404: "Not found",
    503: "The broker is not ready",
    0: "The broker does not answer",
  }[error.status] ?? "Request failed";
  return [
    h("h1", { key: "h1", tabindex: -1 }, title),
    h("section", { key: "problem", class: "panel problem", "aria-labelledby": "problem" },
      h("h2", { id: "problem" }, heading),
      h("p", null, error.message),
      error.hint ? h("p", { class: "note" }, error.hint) : null,
      error.status === 403
        ? h("p", { class: "note" }, "Ask the broker's operator for the permission, or sign in with another token.")
        : null,
      error.status === 404 ? h("p", null, h("a", { href: "#/topics" }, "All topics")) : null),
  ];
}

// -- who looks ------------------------------------------------------------------------------

function signIn() {
  const submit = (event) => {
    event.preventDefault();
    const field = event.target.elements.credential;
    const value = field.value.trim();
    if (!value) return;
    credential.set(value);
    field.value = "";
    shown.refusal = "";
    reload();
  };
  return [
    h("section", { key: "sign-in", class: "panel sign-in", "aria-labelledby": "sign-in" },
      h("h1", { id: "sign-in", tabindex: -1 }, "Sign in"),
      h("p", null, "This broker requires authentication. Enter a token or an API key; it is kept in this tab only, until the tab is closed."),
      shown.refusal ? h("p", { class: "banner bad", role: "alert" }, `Not accepted: ${shown.refusal}`) : null,
      h("form", { onsubmit: submit },
        h("label", { for: "credential" }, "Token or API key"),
        h("input", {
          id: "credential", name: "credential", type: "password", autocomplete: "off", required: true,
          spellcheck: "false", placeholder: "eyJ… or ist_…",
        }),
        h("button", { type: "submit", class: "primary" }, "Sign in")),
      h("p", { class: "note" }, "Create a key: ", h("code", null, "ister auth key NAME"), " where the broker runs.")),
  ];
}

function signOut() {
  credential.clear();
  shown.refusal = "";
  shown.data = null;
  shown.about = null;
  reload();
}

// -- beginning ------------------------------------------------------------------------------

place("skip").onclick = (event) => {
  event.preventDefault();
  place("main").focus();
};
addEventListener("hashchange", follow);
new ResizeObserver(() => { if (shown.data !== null && width() !== shown.width) draw(); }).observe(place("main"));
document.addEventListener("visibilitychange", () => {
  if (document.hidden) clearTimeout(timer);
  else reload();
});
listen({
  wantFilter: () => {
    shown.wantsFilter = true;
    navigate("#/topics");
  },
});
drawTools();
setInterval(() => {
  if (document.hidden) return;
  drawFreshness();
  if (!shown.isAnswering) draw();
}, 1000);
follow();
