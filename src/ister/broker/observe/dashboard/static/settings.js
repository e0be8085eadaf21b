// What a person has chosen for this browser: the theme and the window of charts. A browser that keeps
// nothing works as well; a choice then lasts as long as the page.

const PREFIX = "ister.";
const chosen = new Map();

export function recall(name, fallback) {
  if (chosen.has(name)) return chosen.get(name);
  try {
    return localStorage.getItem(PREFIX + name) ?? fallback;
  } catch {
    return fallback;
  }
}

// The fallback is not stored: it may become another one.
export function keep(name, value, fallback) {
  chosen.set(name, value);
  try {
    if (value === fallback) localStorage.removeItem(PREFIX + name);
    else localStorage.setItem(PREFIX + name, value);
  } catch {
    // Private windows may refuse.
  }
}

export const WINDOWS = [["5m", "5 min"], ["1h", "1 hour"], ["1d", "1 day"]];

const isWindow = (value) => WINDOWS.some(([name]) => name === value);

export function chartWindow() {
  const value = recall("window", "5m");
  return isWindow(value) ? value : "5m";
}

export function keepWindow(value) {
  keep("window", value, "5m");
}

// -- the theme ------------------------------------------------------------------------------

export const THEMES = ["auto", "light", "dark"];

export function theme() {
  const value = recall("theme", "auto");
  return THEMES.includes(value) ? value : "auto";
}

export function setTheme(value) {
  keep("theme", value, "auto");
  if (value === "auto") delete document.documentElement.dataset.theme;
  else document.documentElement.dataset.theme = value;
}
