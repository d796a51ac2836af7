// The list of requests, and the path of one of them: the latest, unless another is chosen.

import { $, count, el, keyed, legend, roundUp, show, size, text, tip } from "./elements.js";
import { PROCESSES, STAGES } from "./words.js";

const STAY_MS = 3000;
const mine = new Set();
let chosen = "", shown = null, since = 0, latest = null;

const kindOf = (stage) => stage.process.split(/[- ]/)[0];
const colourOf = (kind) => (kind in PROCESSES ? kind : "worker");
const milliseconds = (value) => (1e3 * value).toFixed(value < 0.1 ? 2 : 1);
const lastEnd = (request) =>
  Math.max(request.seconds, ...request.stages.map((stage) => stage.start_s + stage.seconds), 1e-6);

function bar(stage, total) {
  const mark = el("i", { class: colourOf(kindOf(stage)) });
  mark.style.left = `${Math.min((100 * stage.start_s) / total, 99.5)}%`;
  mark.style.width = `${Math.max(0, (100 * Math.min(stage.seconds, total - stage.start_s)) / total)}%`;
  return mark;
}

function itemsOf(request) {
  return request.items.join(", ") || (request.media === "none" ? "text only" : request.media);
}

// The list

function makeRequest() {
  const button = el("button", { class: "request", type: "button" },
    ...["outcome", "what", "items", "bars", "ms"].map((name) => el("span", { class: name, "aria-hidden": name === "bars" })));
  const node = el("li", {}, button);
  button.addEventListener("click", () => {
    choose(chosen === node.dataset.key ? "" : node.dataset.key);
    $("path-section").scrollIntoView({ block: "nearest" });
  });
  return node;
}

function updateRequest(node, request) {
  const [outcome, what, items, bars, ms] = node.firstChild.children;
  const tokens = request.num_answer_tokens ? count(request.num_answer_tokens, "token") : "";
  node.request = request;
  node.className = mine.has(request.id) ? "mine" : "";
  node.firstChild.setAttribute("aria-pressed", String(shown?.id === request.id));
  outcome.className = `outcome ${request.outcome ? (request.outcome === "ok" ? "good" : "bad") : "run"}`;
  text(outcome, request.outcome ? request.outcome.replaceAll("_", " ") : `in ${request.where}`);
  text(what, request.what.replace(/^POST \/v1\//, ""));
  text(items, [itemsOf(request), tokens].filter(Boolean).join(" · "));
  text(ms, show(request.seconds, "s"));
  const signature = `${request.stages.length} ${request.outcome || request.seconds}`;
  if (node.signature !== signature) {
    node.signature = signature;
    bars.replaceChildren(...request.stages.map((stage) => bar(stage, lastEnd(request))));
  }
}

// The path

function choose(id) {
  chosen = id;
  since = 0;
  if (latest) render(latest);
}

function select(view) {
  const known = [...view.running, ...view.ended];
  if (chosen) return known.find((request) => request.id === chosen) ?? (shown?.id === chosen ? shown : null);
  const section = $("path-section"), isRead = section.matches(":hover") || section.contains(document.activeElement);
  if (shown && (isRead || performance.now() - since < STAY_MS)) return known.find((request) => request.id === shown.id) ?? shown;
  return view.ended.find((request) => request.stages.length) ?? view.ended[0] ?? null;
}

function stageRow(stage, total, before) {
  const kind = kindOf(stage), isSame = stage.process === before;
  const copied = stage.copied_nbytes ? size(stage.copied_nbytes) : "0";
  const row = el("tr", {},
    el("th", { scope: "row", class: `stage key ${colourOf(kind)}` }, stage.stage),
    el("td", { class: "process" }, isSame ? "" : stage.process),
    el("td", { class: "when" }, el("span", { class: "bars", "aria-hidden": "true" }, bar(stage, total))),
    el("td", { class: "number" }, milliseconds(stage.seconds)),
    el("td", { class: "number copied" }, copied), el("td", { class: "note" }, stage.note));
  const where = `${stage.process}, from ${milliseconds(stage.start_s)} to ${milliseconds(stage.start_s + stage.seconds)} ms; ${copied} copied.`;
  return tip(row, `${STAGES[stage.stage] ?? ""} ${where}`.trim());
}

// A line at each round number of milliseconds.
function axis(total) {
  const step = roundUp((1e3 * total) / 5), ticks = el("div", { class: "ticks" });
  for (let at = 0; at <= 1e3 * total * 0.96; at += step) {
    const tick = el("span", {}, at ? String(Number(at.toPrecision(6))) : "0 ms");
    tick.style.left = `${at / (10 * total)}%`;
    ticks.append(tick);
  }
  return [ticks, `${step / (10 * total)}% 100%`];
}

function fill(request) {
  const total = lastEnd(request), [ticks, grid] = axis(total), rows = [];
  request.stages.forEach((stage, index) => rows.push(stageRow(stage, total, request.stages[index - 1]?.process)));
  $("path").tHead.rows[0].cells[2].replaceChildren(el("span", { class: "unseen" }, "When"), ticks);
  $("path").tBodies[0].replaceChildren(...rows);
  for (const each of $("path").tBodies[0].querySelectorAll(".bars")) each.style.backgroundSize = grid;
  const slow = request.stages.reduce((most, stage) => (stage.seconds > (most?.seconds ?? 0) ? stage : most), null);
  const end = request.outcome ? `${request.outcome.replaceAll("_", " ")} after ${show(request.seconds, "s")}` : `in ${request.where}, ${show(request.seconds, "s")} so far`;
  $("path-words").replaceChildren(el("strong", {}, request.what.replace(/^POST \/v1\//, "")), ` ${end} · ${itemsOf(request)}`,
    ` · ${size(request.copied_nbytes)} copied${slow ? ` · longest: ${slow.stage}, ${show(slow.seconds, "s")}` : ""}`);
  const more = [request.id, request.process, request.tenant && `tenant ${request.tenant}`,
    request.num_left_out && `${count(request.num_left_out, "shorter stage")} left out`];
  text($("path-id"), more.filter(Boolean).join(" · "));
  const kinds = [...new Set(request.stages.map(kindOf))];
  legend($("path-legend"), kinds.map((kind) => [colourOf(kind), kind, PROCESSES[kind] ?? "A process of the engine."]));
}

export function follow(id) {
  mine.add(id);
  if (id) choose(id);
}

export function render(view) {
  latest = view;
  const found = select(view);
  if (found?.id !== shown?.id) since = performance.now();
  if (found && (found.id !== shown?.id || found.outcome !== shown.outcome || !found.outcome)) fill(found);
  if (found) shown = found;
  $("path-section").classList.toggle("blank", !shown);
  $("path-none").hidden = Boolean(shown);
  $("path-latest").hidden = !chosen;
  text($("path-note"), !shown ? "" : chosen ? "chosen" : "latest request");
  keyed($("running"), view.running, (request) => request.id, makeRequest, updateRequest);
  keyed($("ended"), view.ended, (request) => request.id, makeRequest, updateRequest);
  $("requests-none").hidden = view.running.length + view.ended.length > 0;
  text($("requests-note"), `${show(view.num_running)} in flight`);
}

$("path-latest").addEventListener("click", () => choose(""));
