// The live page: follows the server's views, and shows them.

import { listen } from "./ask.js";
import { drawChart, makeChart } from "./chart.js";
import { $, cells, count, el, keyed, legend, parts, rowOf, show, size, text, tip } from "./elements.js";
import * as path from "./path.js";
import { auth, events, KEY } from "./server.js";
import { FIGURES, KINDS, OUTCOMES, PARTS, PROBLEMS, STATES } from "./words.js";

const HISTORY_S = 60, MIN_WAIT_MS = 500, MAX_WAIT_MS = 8000, STALE_MS = 5000;
const past = new Map();
let latest = null, latestMs = 0, following = null, wake = null, waitMs = MIN_WAIT_MS;

// The savings of hits

const ESTIMATE = "An estimate: hits, times the measured mean of the items of that kind whose features were made here. The mean contains slow first items and waits for the processor.";

function tilesOf({ savings }, features) {
  const { num_items: items, num_unmeasured: unmeasured } = savings, hits = items.hit, measured = hits - unmeasured;
  const left = unmeasured ? ` ${count(unmeasured, "hit")} of kinds that were never made here are left out.` : "";
  const total = Object.values(items).reduce((sum, one) => sum + one, 0);
  const estimate = (name, title, value, unit, note, words) => {
    const [number, shown] = parts(measured ? value : null, unit);
    return { name, title, value: measured ? [`≈ ${number}`, shown] : [number, shown], words: `${words} ${ESTIMATE}${left}`,
      notes: measured ? [`${show(value / measured, unit)} for each hit`, note] : ["no hit is measured yet", ""] };
  };
  return [
    { name: "found", title: "Items found", value: parts(savings.hit_rate, "%"), notes: [`${count(hits, "hit")} of ${count(total, "item")}`],
      words: "Measured: the part of all items whose features were in the arena already, since the counts began." },
    estimate("time", "Time", savings.saved_s, "s", `now ${show(savings.saved_s_per_s, "s")} each second`,
      "The time that workers would have spent on decoding files and computing features again, added up over hits. The encoder's time is not contained."),
    estimate("bytes", "Copies", savings.copied_nbytes, "B", "pixels, samples and features",
      "Bytes of pixels, samples and features that workers would have written again, added up over hits."),
    estimate("memory", "Memory", savings.features_nbytes, "B",
      features ? `the arena keeps ${size(features.pinned_nbytes + features.evictable_nbytes)}` : "the store does not answer",
      "Memory that hits would have filled with features of their own, added up over hits. All of them read the one copy in the arena."),
  ];
}

function makeTile(tile) {
  const node = el("li", { tabindex: "0", class: tile.name }, el("h3", {}, tile.title),
    el("strong", {}, el("span"), el("small")), ...tile.notes.map(() => el("p")));
  if (tile.name === "found") node.append(el("div", { class: "stack", "aria-hidden": "true" }), el("ul", { class: "legend" }));
  return node;
}

function updateTile(node, { name, value: [number, unit], notes, words }, items) {
  const [big, small] = node.querySelector("strong").children;
  text(big, number);
  text(small, unit);
  notes.forEach((note, index) => text(node.querySelectorAll("p")[index], note));
  tip(node, words);
  if (name !== "found") return;
  const used = Object.entries(items).filter(([outcome, number]) => number || outcome === "hit" || outcome === "made");
  keyed(node.querySelector(".stack"), used, ([outcome]) => outcome, ([outcome]) => el("i", { class: outcome }),
    (bar, [, number]) => { bar.style.flexGrow = String(number); });
  legend(node.querySelector(".legend"), used.map(([outcome, number]) => [outcome, `${OUTCOMES[outcome][0]} ${show(number)}`, OUTCOMES[outcome][1]]));
}

function renderSavings(view) {
  const features = view.kinds.find((kind) => kind.kind === "features"), items = view.savings.num_items;
  keyed($("savings"), tilesOf(view, features), (tile) => tile.name, makeTile, (node, tile) => updateTile(node, tile, items));
  $("savings").classList.toggle("empty", !items.hit);
  $("savings-none").hidden = items.hit > 0;
}

// The stages of the pipeline

function makeStation(station) {
  const list = el("dl");
  for (const { label } of station.figures.slice(1)) {
    list.append(tip(el("div", {}, el("dt", {}, label), el("dd")), FIGURES[`${station.name}/${label}`] ?? label));
  }
  return el("li", { tabindex: "0" }, el("h3", {}, station.name, el("span")),
    el("strong", {}, el("span"), el("small")), makeChart(), list);
}

// The first view has no view before it: its rates are unknown, not 0.
const known = ({ over_s: seconds }, figure) => (seconds || !figure.unit.endsWith("/s") ? figure.value : null);

function updateStation(node, station, view) {
  const [first, ...others] = station.figures, value = known(view, first), at = view.taken_at;
  const [number, unit] = parts(value, first.unit);
  node.className = station.state;
  tip(node, `${FIGURES[`${station.name}/${first.label}`] ?? first.label} ${STATES[station.state]}`);
  text(node.querySelector("h3 span"), station.state);
  text(node.querySelector("strong span"), number);
  text(node.querySelector("strong small"), `${unit} ${first.label}`.trim());
  others.forEach((figure, index) => text(node.querySelectorAll("dd")[index], show(known(view, figure), figure.unit)));
  const kept = (past.get(station.name) ?? []).filter(([time]) => time > at - HISTORY_S && time < at);
  past.set(station.name, [...kept, [at, value]]);
  drawChart(node.querySelector(".chart"), past.get(station.name), first);
}

// Tables

function updateKind(row, kind) {
  const part = (value) => `${(100 * value) / Math.max(kind.capacity_nbytes, 1)}%`;
  const [pinned, evictable, promised] = row.querySelector(".share").children;
  pinned.style.width = part(kind.pinned_nbytes);
  evictable.style.left = pinned.style.width;
  evictable.style.width = part(kind.evictable_nbytes);
  promised.style.width = part(kind.pinned_nbytes + kind.reserved_nbytes);
  const used = `${size(kind.pinned_nbytes + kind.evictable_nbytes)} of ${size(kind.capacity_nbytes)}`;
  text(row.querySelector("small"), used);
  row.querySelector(".share").setAttribute("aria-label", `${size(kind.pinned_nbytes)} pinned, ${size(kind.evictable_nbytes)} evictable`);
  tip(row, `${KINDS[kind.kind] ?? ""} ${used} in use by ${count(kind.num_objects, "object")}: ${size(kind.pinned_nbytes)} pinned, ${size(kind.evictable_nbytes)} evictable; ${size(kind.reserved_nbytes)} reserved.`.trim());
  [size(kind.capacity_nbytes), size(kind.pinned_nbytes), size(kind.evictable_nbytes), size(kind.reserved_nbytes),
    show(kind.evicted_per_s, "/s")].forEach((value, index) => text(row.children[index + 2], value));
}

function makeKind(kind) {
  const share = el("div", { class: "share", role: "img" }, ...PARTS.map(([name]) => el("i", { class: name })));
  const numbers = Array.from({ length: 5 }, () => el("td", { class: "number" }));
  return el("tr", {}, el("th", { scope: "row" }, kind.kind, el("small")), el("td", { class: "when" }, share), ...numbers);
}

const body = (id) => $(id).tBodies[0];

function render(view) {
  latest = view;
  latestMs = performance.now();
  text($("model"), view.model);
  mark(view.problem || "live", view.problem ? "lost" : "live");
  report(view.problem ? PROBLEMS[view.problem] ?? view.problem : "");
  renderSavings(view);
  keyed($("way"), view.way, (station) => station.name, makeStation, (node, station) => updateStation(node, station, view));
  path.render(view);
  keyed(body("kinds"), view.kinds, (kind) => kind.kind, makeKind, updateKind);
  const sum = (name) => view.kinds.reduce((so_far, kind) => so_far + kind[name], 0);
  text($("arena-note"), view.kinds.length ? `${size(sum("capacity_nbytes"))}, ${size(sum("backed_nbytes"))} in memory` : "unknown: the store does not answer");
  const { gate } = view;
  text($("gate-note"), `${show(gate.num_waiting_for_room)} waiting for space, ${show(gate.num_waiting_for_permits)} for a permit`);
  for (const [id, values] of [["tenants", gate.tenants], ["items", view.items], ["processes", view.processes]]) {
    $(id).hidden = !values.length;
    $(`${id}-none`).hidden = values.length > 0;
  }
  keyed(body("tenants"), gate.tenants, (one) => one.name, () => rowOf("", "number", "number", "number", "number"), (row, one) =>
    cells(row, [one.name || "default", show(one.share, "%"), show(one.num_running), show(one.num_waiting), size(one.reserved_nbytes)]));
  text($("items-note"), `of ${count(view.num_objects, "object")}`);
  keyed(body("items"), view.items.map((item, index) => [index, item]), ([index]) => index,
    () => rowOf("key-of", "", "dim", "number", "held"), (row, [, item]) =>
      cells(row, [item.key || "–", item.kind, item.state, size(item.nbytes), item.held_by.join(", ") || "–"]));
  keyed(body("processes"), view.processes, (one) => `${one.name} ${one.pid}`, () => rowOf("", "number", "number", "number"), (row, one) =>
    cells(row, [one.is_connected ? one.name : `${one.name} (lost)`, String(one.pid), size(one.held_nbytes), size(one.reserved_nbytes)]));
}

// The state of the connection

function mark(words, kind) {
  text($("state"), words);
  $("state").className = kind;
}

function report(words, { isStale = false } = {}) {
  text($("trouble-words"), words);
  $("trouble").hidden = !words;
  $("again").hidden = !isStale;
  document.body.classList.toggle("stale", isStale && latest !== null);
}

function lose(words) {
  mark("no connection", "lost");
  const age = latest ? `The figures below are the last ones, of ${new Date(1e3 * latest.taken_at).toLocaleTimeString()}.` : "Nothing has arrived yet.";
  report(`${words} ${age} The page tries again by itself.`, { isStale: true });
}

async function follow() {
  waitMs = MIN_WAIT_MS;
  while (!document.hidden) {
    following = new AbortController();
    latestMs = performance.now();
    try {
      const response = await fetch("views", { headers: auth(), signal: following.signal });
      if (response.status === 401) return askForKey("That key is not the page's.");
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const data of events(response.body)) { render(JSON.parse(data)); waitMs = MIN_WAIT_MS; }
      lose("The server has closed the connection.");
    } catch (error) {
      if (document.hidden) break;
      lose(error instanceof TypeError ? "The server does not answer." : `The page gets no figures: ${error.message}.`);
    }
    await new Promise((resume) => { wake = resume; setTimeout(resume, waitMs); });
    waitMs = Math.min(Math.max(2 * waitMs, MIN_WAIT_MS), MAX_WAIT_MS);
  }
  following = null;
}

function askForKey(note) {
  following = null;
  sessionStorage.removeItem(KEY);
  text($("entry-note"), note);
  $("entry").hidden = false;
  document.body.classList.add("locked");
  report("");
  mark("a key is needed", "lost");
  $("key").focus();
}

async function start() {
  try {
    const about = await (await fetch("about")).json();
    text($("about"), `Afferent ${about.version}. Savings are since the counts began; rates are over five seconds, lines since the page was opened.`);
    if (!about.can_ask) {
      for (const id of ["file", "question", "send"]) $(id).disabled = true;
      text($("ask-note"), "The server's tenants have keys, and the page has none.");
    }
    if (about.needs_key && !sessionStorage.getItem(KEY)) return askForKey("");
  } catch { /* `follow` reports that the server does not answer */ }
  follow();
}

legend($("parts"), PARTS);
legend($("states"), Object.entries(STATES).map(([name, words]) => [name, name, words]));
listen(() => latest?.model, path.follow);
$("again").addEventListener("click", () => {
  waitMs = 0;
  following?.abort(new Error("it tries again now"));
  wake?.();
});
$("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("entry").hidden = true;
  document.body.classList.remove("locked");
  follow();
});
// A hidden page does not ask the server.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) following?.abort();
  else if (!following && $("entry").hidden) follow();
});
setInterval(() => {
  const silentMs = performance.now() - latestMs;
  if (silentMs > STALE_MS) following?.abort(new Error(`nothing has arrived for ${Math.round(silentMs / 1e3)} seconds`));
}, 1000);
start();
