// Builds pages out of plain descriptions, and changes only what differs when they change.
//
// `h("p", {class: "note"}, "text")` describes an element; `render(root, children)` makes the root's
// children so. Elements that stay keep their focus, their scroll position and what was typed into
// them, so that a page can be described anew every two seconds. Text becomes text nodes and nothing
// else: there is no way here to make markup out of data.
//
// Properties: `key` pairs elements of two descriptions, `on…` are handlers. `value`, `checked` and
// `open` belong to the user once the element exists.

const SVG = "http://www.w3.org/2000/svg";
const FIRST_ONLY = new Set(["value", "checked", "open"]);
const described = new WeakMap();

export function h(tag, props, ...children) {
  return { tag, props: props ?? {}, children: flatten(children) };
}

function flatten(children) {
  return children.flat(Infinity).filter((one) => one !== null && one !== undefined && one !== false);
}

export function render(root, ...children) {
  const next = flatten(children);
  patchChildren(root, described.get(root) ?? null, next, root.namespaceURI === SVG);
  described.set(root, next);
}

function create(child, isSvg) {
  if (typeof child !== "object") return document.createTextNode(String(child));
  const inSvg = isSvg || child.tag === "svg";
  const node = inSvg ? document.createElementNS(SVG, child.tag) : document.createElement(child.tag);
  for (const [name, value] of Object.entries(child.props)) {
    if (FIRST_ONLY.has(name)) node[name] = value;
    else setProp(node, name, value);
  }
  for (const one of child.children) node.append(create(one, inSvg));
  return node;
}

function setProp(node, name, value) {
  if (name === "key") return;
  if (name.startsWith("on")) node[name] = value ?? null;
  else if (value === null || value === undefined || value === false) node.removeAttribute(name);
  else node.setAttribute(name, value === true ? "" : String(value));
}

function patch(node, old, next, isSvg) {
  if (typeof next !== "object") {
    if (old !== next) node.data = String(next);
    return;
  }
  for (const name of Object.keys(old.props)) {
    if (!(name in next.props) && !FIRST_ONLY.has(name)) setProp(node, name, null);
  }
  for (const [name, value] of Object.entries(next.props)) {
    if (value !== old.props[name] && !FIRST_ONLY.has(name)) setProp(node, name, value);
  }
  patchChildren(node, old.children, next.children, isSvg || next.tag === "svg");
}

function kind(child) {
  return typeof child === "object" ? `${child.tag}:${child.props.key ?? ""}` : "text";
}

function patchChildren(parent, old, next, isSvg) {
  if (old === null) parent.replaceChildren();
  const spare = new Map();
  const nodes = [...parent.childNodes];
  (old ?? []).forEach((child, at) => {
    const list = spare.get(kind(child)) ?? [];
    list.push([child, nodes[at]]);
    spare.set(kind(child), list);
  });
  const kept = next.map((child) => {
    const found = spare.get(kind(child))?.shift();
    return found === undefined ? null : found;
  });
  for (const list of spare.values()) for (const [, node] of list) node.remove();
  next.forEach((child, at) => {
    let node;
    if (kept[at] === null) node = create(child, isSvg);
    else {
      node = kept[at][1];
      patch(node, kept[at][0], child, isSvg);
    }
    const there = parent.childNodes[at] ?? null;
    if (there !== node) parent.insertBefore(node, there);
  });
}
