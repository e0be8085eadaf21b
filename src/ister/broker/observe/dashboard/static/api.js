// Calls of the broker's `/api`, with the credential of this tab.
//
// The credential is in the tab's session storage only: closing the tab forgets it. Addresses are
// relative, so that the pages also work below a path of a proxy.

const KEY = "ister.credential";
const TIMEOUT_MS = 10_000;
const AGAIN_MS = 150;
const DOWNLOAD_TIMEOUT_MS = 60_000;

export class ApiError extends Error {
  constructor(status, code, message, hint = "") {
    super(message);
    this.status = status;
    this.code = code;
    this.hint = hint;
  }
}

export const credential = {
  get: () => sessionStorage.getItem(KEY) ?? "",
  set: (value) => sessionStorage.setItem(KEY, value),
  clear: () => sessionStorage.removeItem(KEY),
};

export function topicPath(topic) {
  return `api/topics/${topic.split("/").slice(1).map(encodeURIComponent).join("/")}`;
}

export function get(path, params = {}, signal = undefined) {
  const given = Object.entries(params).filter(([, value]) => value !== "" && value != null);
  const query = new URLSearchParams(given).toString();
  return call(query ? `${path}?${query}` : path, { method: "GET" }, signal);
}

export function post(path, body) {
  return call(path, {
    method: "POST",
    headers: { "Content-Type": "application/json", "X-Ister-Action": "yes" },
    body: JSON.stringify(body),
  });
}

// Saves what a path answers as a file; the credential is a header, so a link would not do.
export async function download(path, params) {
  const given = Object.entries(params).filter(([, value]) => value !== "" && value != null);
  const headers = credential.get() ? { Authorization: `Bearer ${credential.get()}` } : {};
  let answer;
  try {
    answer = await fetch(`${path}?${new URLSearchParams(given)}`, {
      headers, cache: "no-store", credentials: "same-origin", redirect: "error", signal: AbortSignal.timeout(DOWNLOAD_TIMEOUT_MS),
    });
  } catch {
    throw new ApiError(0, "unreachable", "The broker does not answer.");
  }
  if (!answer.ok) {
    const content = await answer.json().catch(() => null);
    throw new ApiError(answer.status, content?.code ?? "", content?.error ?? `The broker answered ${answer.status}.`);
  }
  const name = /filename="([^"]+)"/.exec(answer.headers.get("Content-Disposition") ?? "")?.[1] ?? "messages.jsonl";
  const url = URL.createObjectURL(await answer.blob());
  const link = document.createElement("a");
  link.href = url;
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(url), 10_000);
  return { name, messages: Number(answer.headers.get("X-Ister-Messages")), next: Number(answer.headers.get("X-Ister-Next")) };
}

async function call(path, options, signal) {
  const headers = { Accept: "application/json", ...options.headers };
  if (credential.get()) headers.Authorization = `Bearer ${credential.get()}`;
  const late = AbortSignal.timeout(TIMEOUT_MS);
  const ask = async () => {
    const answer = await fetch(path, {
      ...options,
      headers,
      cache: "no-store",
      credentials: "same-origin",
      redirect: "error",
      signal: signal ? AbortSignal.any([signal, late]) : late,
    });
    return [answer, await answer.text()];
  };
  let answer;
  let text;
  try {
    [answer, text] = await ask().catch(async (error) => {
      // The broker ends connections after a while, whatever they are doing: a look is repeated once.
      if (options.method !== "GET" || late.aborted || signal?.aborted) throw error;
      await new Promise((done) => setTimeout(done, AGAIN_MS));
      return ask();
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, "unreachable", "The broker does not answer.");
  }
  let content = null;
  try {
    content = text ? JSON.parse(text) : null;
  } catch {
    content = null;
  }
  if (answer.ok && content !== null) return content;
  throw new ApiError(
    answer.status,
    content?.code ?? "",
    content?.error ?? `The broker answered ${answer.status}.`,
    content?.hint ?? "",
  );
}
