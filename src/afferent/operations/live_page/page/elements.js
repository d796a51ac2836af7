// Elements, numbers and hover texts. Text from the server is inserted as text, never as HTML.

export const $ = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

export function svg(tag, attributes, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

export function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

// One child for each of the values, by key: a child that has the focus stays.
export function keyed(parent, values, keyOf, make, update) {
  const known = new Map([...parent.children].map((child) => [child.dataset.key, child]));
  let place = parent.firstElementChild;
  for (const value of values) {
    const key = String(keyOf(value));
    let child = known.get(key);
    known.delete(key);
    if (!child) { child = make(value); child.dataset.key = key; }
    if (child === place) place = place.nextElementSibling;
    else parent.insertBefore(child, place);
    update(child, value);
  }
  for (const child of known.values()) child.remove();
}

export function cells(row, values) {
  values.forEach((value, index) => text(row.children[index], value));
}

export function rowOf(...classes) {
  return el("tr", {}, ...classes.map((name, index) =>
    el(index ? "td" : "th", index ? { class: name } : { scope: "row", class: name })));
}

export function legend(parent, entries) {
  keyed(parent, entries, ([name]) => name, ([name, , words]) => tip(el("li", { class: `key ${name}` }), words),
    (node, [, label]) => text(node, label));
}

// Numbers

function bytes(value) {
  if (!value) return ["0", "B"];
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
  return [value.toFixed(power && value < 99.95 ? 1 : 0), units[power]];
}

function seconds(value) {
  if (value < 1) return [(1e3 * value).toFixed(value && value < 0.01 ? 1 : 0), "ms"];
  if (value < 120) return [value.toFixed(value < 10 ? 2 : 1), "s"];
  return value < 7200 ? [(value / 60).toFixed(1), "min"] : [(value / 3600).toFixed(1), "h"];
}

export function parts(value, unit = "") {
  if (value === null || value === undefined) return ["–", ""];
  switch (unit) {
    case "B": return bytes(value);
    case "B/s": { const [number, size] = bytes(value); return [number, `${size}/s`]; }
    case "%": return [(100 * value).toFixed(value < 0.995 && value > 0 ? 1 : 0), "%"];
    case "s": return seconds(value);
    case "/s": return [value.toFixed(value && value < 10 ? 1 : 0), "/s"];
    default: return [Math.round(value).toLocaleString("en"), ""];
  }
}

export const show = (value, unit = "") => parts(value, unit).filter(Boolean).join(" ");
export const size = (value) => show(value, "B");
export const count = (number, noun) => `${show(number)} ${noun}${number === 1 ? "" : "s"}`;

// The first of 1, 2, 5, 10, 20, ... that is not smaller.
export function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].find((each) => each * power >= value * (1 - 1e-9)) * power;
}

// Hover texts: with the pointer, a finger or the focus; Escape hides them

let owner = null, at;

export function tip(node, words) {
  if (node.dataset.tip === words) return node;
  node.dataset.tip = words;
  node.setAttribute("aria-description", words);
  if (node === owner) text($("tip"), words);
  return node;
}

export function showTip(node, x) {
  const box = $("tip"), place = node.getBoundingClientRect();
  [owner, at] = [node, x];
  text(box, node.dataset.tip);
  box.hidden = false;
  const { offsetWidth: width, offsetHeight: height } = box;
  const below = place.bottom + 8, isBelow = below + height < innerHeight || place.top < height + 8;
  box.style.left = `${Math.max(8, Math.min((x ?? place.left + 24) - 24, document.documentElement.clientWidth - width - 8))}px`;
  box.style.top = `${isBelow ? below : place.top - height - 8}px`;
}

function hideTip() {
  owner = null;
  $("tip").hidden = true;
}

for (const name of ["pointerover", "focusin"]) {
  document.addEventListener(name, (event) => {
    const node = event.target.closest?.("[data-tip]");
    if (node) showTip(node, event.clientX);
    else hideTip();
  });
}
document.addEventListener("focusout", hideTip);
document.documentElement.addEventListener("pointerleave", hideTip);
document.addEventListener("scroll", () => { if (owner) showTip(owner, at); }, { passive: true });
document.addEventListener("keydown", (event) => { if (event.key === "Escape") hideTip(); });
