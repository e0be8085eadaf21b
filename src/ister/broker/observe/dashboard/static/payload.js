// Payloads as people read them: decoded by their schema, as JSON, as text, or byte by byte.

const ROW = 16;
const HEX_ROWS_MAX = 1024;

export const MODES = [["auto", "Best"], ["decoded", "By schema"], ["json", "JSON"], ["text", "Text"], ["hex", "Hex"]];

export function toBytes(base64) {
  return Uint8Array.from(atob(base64 ?? ""), (one) => one.charCodeAt(0));
}

const isThere = (value) => value !== null && value !== undefined;

// JSON `null` is a value too, but one that cannot be told from "not JSON"; text shows it.
export function bestMode(message) {
  if (isThere(message.decoded)) return "decoded";
  if (isThere(message.json)) return "json";
  return isThere(message.text) ? "text" : "hex";
}

const json = (value, indent) => JSON.stringify(value, null, indent);

// The payload as text in a mode, or why there is none: {text} or {problem}.
export function show(message, mode, { isBrief = false } = {}) {
  const used = mode === "auto" ? bestMode(message) : mode;
  const indent = isBrief ? 0 : 2;
  if (used === "decoded") {
    if (isThere(message.decoded)) return { used, text: json(message.decoded, indent) };
    if (message.decode_error) return { used, problem: `It does not match its schema: ${message.decode_error}` };
    return { used, problem: message.schema ? "It could not be decoded." : "It has no schema." };
  }
  if (used === "json") {
    return isThere(message.json) ? { used, text: json(message.json, indent) } : { used, problem: "It is not JSON." };
  }
  if (used === "text") {
    return isThere(message.text) ? { used, text: message.text } : { used, problem: "It is not text: not valid UTF-8." };
  }
  const content = toBytes(message.payload_base64);
  if (isBrief) return { used, text: [...content.slice(0, 40)].map(hex).join(" ") };
  return { used, text: hexDump(content) };
}

const hex = (byte) => byte.toString(16).padStart(2, "0");

export function hexDump(content) {
  const rows = [];
  for (let at = 0; at < content.length && rows.length < HEX_ROWS_MAX; at += ROW) {
    const part = [...content.slice(at, at + ROW)];
    const left = part.slice(0, 8).map(hex).join(" ").padEnd(23);
    const right = part.slice(8).map(hex).join(" ").padEnd(23);
    const text = part.map((one) => (one >= 32 && one < 127 ? String.fromCharCode(one) : "·")).join("");
    rows.push(`${at.toString(16).padStart(6, "0")}  ${left}  ${right}  ${text}`);
  }
  if (content.length > HEX_ROWS_MAX * ROW) rows.push(`… ${content.length - HEX_ROWS_MAX * ROW} bytes more`);
  return rows.join("\n");
}
