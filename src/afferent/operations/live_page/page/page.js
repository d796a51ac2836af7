// The live page. Whatever comes from the server is put into the document as text, never as HTML.

const KEY = "afferent-key", HISTORY = 60, MAX_WAIT_MS = 8000;
const $ = (id) => document.getElementById(id);
const state = { view: null, mine: new Set(), past: new Map(), follow: null, asked: null, image: "" };

// Building

function el(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== false) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children);
  return node;
}

function svg(tag, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

function text(node, value) {
  if (node.textContent !== value) node.textContent = value;
}

// One child for each of the values, by key: what is open, or has the focus, stays.
function keyed(parent, values, keyOf, make, update) {
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

function cells(row, values) {
  values.forEach((value, index) => text(row.children[index], value));
}

function rowOf(...classes) {
  return el("tr", {}, ...classes.map((name, index) =>
    el(index ? "td" : "th", index ? { class: name } : { scope: "row", class: name })));
}

// Numbers

function bytes(value) {
  if (!value) return ["0", ""];
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let power = 0;
  while (value >= 1024 && power < units.length - 1) { value /= 1024; power += 1; }
  return [value.toFixed(power && value < 99.95 ? 1 : 0), units[power]];
}

function parts(value, unit) {
  if (value === null || value === undefined) return ["–", ""];
  switch (unit) {
    case "B": return bytes(value);
    case "B/s": { const [number, size] = bytes(value); return [number, `${size || "B"}/s`]; }
    case "%": return [(100 * value).toFixed(value < 0.995 ? 1 : 0), "%"];
    case "s": return value < 1 ? [(1e3 * value).toFixed(value < 0.01 ? 1 : 0), "ms"] : [value.toFixed(value < 10 ? 2 : 1), "s"];
    case "/s": return [value.toFixed(value && value < 10 ? 1 : 0), "/s"];
    default: return [Math.round(value).toLocaleString("en"), ""];
  }
}

const show = (value, unit = "") => parts(value, unit).filter(Boolean).join(" ");
const size = (value) => show(value, "B");
const count = (number, noun) => `${show(number)} ${noun}${number === 1 ? "" : "s"}`;

// The way of the data

function makeStation(station) {
  const graph = svg("svg", { viewBox: `0 0 ${HISTORY - 1} 26`, preserveAspectRatio: "none", "aria-hidden": "true" });
  graph.append(svg("polygon", { points: "" }), svg("polyline", { points: "" }));
  const list = el("dl");
  for (const figure of station.figures.slice(1)) list.append(el("dt", {}, figure.label), el("dd"));
  return el("li", {}, el("h3", {}, station.name, el("span")),
    el("strong", {}, el("span"), el("small")), graph, list);
}

function updateStation(node, station) {
  const [first, ...others] = station.figures;
  const [number, unit] = parts(first.value, first.unit);
  node.className = station.state;
  text(node.querySelector("h3 span"), station.state === "waiting" ? "waiting" : "");
  text(node.querySelector("strong span"), number);
  text(node.querySelector("strong small"), `${unit} ${first.label}`.trim());
  others.forEach((figure, index) =>
    text(node.querySelectorAll("dd")[index], show(figure.value, figure.unit)));
  const past = state.past.get(station.name) ?? [];
  past.push(first.value ?? 0);
  state.past.set(station.name, past.slice(-HISTORY));
  const most = Math.max(...past, 1e-9), start = HISTORY - past.slice(-HISTORY).length;
  const points = past.slice(-HISTORY).map((value, index) =>
    `${start + index},${(25 - (23 * value) / most).toFixed(1)}`).join(" ");
  node.querySelector("polyline").setAttribute("points", points);
  node.querySelector("polygon").setAttribute("points", `${start},25 ${points} ${HISTORY - 1},25`);
}

// Requests

function bar(stage, total) {
  const mark = el("i", { class: stage.process.split(/[- ]/)[0] });
  mark.style.left = `${Math.min((100 * stage.start_s) / total, 99.5)}%`;
  mark.style.width = `${Math.max(0, (100 * Math.min(stage.seconds, total - stage.start_s)) / total)}%`;
  return mark;
}

const lastEnd = (request) =>
  Math.max(request.seconds, ...request.stages.map((stage) => stage.start_s + stage.seconds), 1e-6);

function waterfall(request) {
  const total = lastEnd(request);
  const body = el("tbody");
  let shown = "";
  for (const stage of request.stages) {
    body.append(el("tr", {},
      el("th", { scope: "row" }, stage.process === shown ? "" : stage.process),
      el("td", {}, stage.stage),
      el("td", { class: "when" }, el("span", { class: "bars", "aria-hidden": "true" }, bar(stage, total))),
      el("td", { class: "number" }, (1e3 * stage.seconds).toFixed(2)),
      el("td", { class: "number copied" }, stage.copied_nbytes ? size(stage.copied_nbytes) : "0"),
      el("td", { class: "note" }, stage.note)));
    shown = stage.process;
  }
  const names = [["Process", ""], ["Stage", ""], ["When", "when"], ["ms", "number"], ["Copied", "number copied"], ["", "note"]];
  const head = el("tr", {}, ...names.map(([name, kind]) => el("th", { scope: "col", class: kind }, name)));
  return el("table", {}, el("thead", {}, head), body);
}

function makeRequest() {
  const summary = el("summary", {}, el("span", { class: "outcome" }), el("span", { class: "what" }),
    el("span", { class: "items" }), el("span", { class: "bars", "aria-hidden": "true" }), el("span", { class: "ms" }));
  const inside = el("div", { class: "scroll" });
  const node = el("li", {}, el("details", {}, summary, inside));
  node.firstChild.addEventListener("toggle", () => fillRequest(node));
  return node;
}

function fillRequest(node) {
  const request = node.request, inside = node.querySelector("details > div");
  if (!node.firstChild.open || !request || inside.dataset.of === node.signature) return;
  inside.dataset.of = node.signature;
  const who = [request.id, request.process, request.tenant && `tenant ${request.tenant}`,
    `${size(request.copied_nbytes)} copied`, request.num_left_out && `${count(request.num_left_out, "shorter stage")} left out`];
  inside.replaceChildren(el("p", { class: "id" }, who.filter(Boolean).join(" · ")), waterfall(request));
}

function updateRequest(node, request) {
  const [outcome, what, items, bars, ms] = node.firstChild.firstChild.children;
  const tokens = request.num_answer_tokens ? count(request.num_answer_tokens, "token") : "";
  node.request = request;
  node.className = state.mine.has(request.id) ? "mine" : "";
  outcome.className = `outcome ${request.outcome ? (request.outcome === "ok" ? "" : "bad") : "run"}`;
  text(outcome, request.outcome ? request.outcome.replaceAll("_", " ") : `in ${request.where}`);
  text(what, request.what.replace(/^POST \/v1\//, ""));
  text(items, [request.items.join(", ") || (request.media === "none" ? "text" : request.media), tokens].filter(Boolean).join(" · "));
  text(ms, show(request.seconds, "s"));
  const signature = `${request.stages.length} ${request.outcome} ${request.outcome ? "" : request.seconds}`;
  if (node.signature !== signature) {
    node.signature = signature;
    bars.replaceChildren(...request.stages.map((stage) => bar(stage, lastEnd(request))));
    fillRequest(node);
  }
}

// Tables

function updateKind(row, kind) {
  const part = (value) => `${(100 * value) / Math.max(kind.capacity_nbytes, 1)}%`;
  const [pinned, evictable, promised] = row.querySelector(".share").children;
  pinned.style.width = part(kind.pinned_nbytes);
  evictable.style.left = pinned.style.width;
  evictable.style.width = part(kind.evictable_nbytes);
  promised.style.width = part(kind.pinned_nbytes + kind.reserved_nbytes);
  row.querySelector(".share").setAttribute("aria-label",
    `${show(kind.pinned_nbytes / kind.capacity_nbytes, "%")} pinned, ${show(kind.evictable_nbytes / kind.capacity_nbytes, "%")} evictable`);
  [size(kind.capacity_nbytes), size(kind.pinned_nbytes), size(kind.evictable_nbytes), size(kind.reserved_nbytes),
    show(kind.evicted_per_s, "/s")].forEach((value, index) => text(row.children[index + 2], value));
}

function makeKind(kind) {
  const share = el("div", { class: "share", role: "img" }, ...["pinned", "evictable", "promised"].map((name) => el("i", { class: name })));
  const numbers = Array.from({ length: 5 }, () => el("td", { class: "number" }));
  return el("tr", {}, el("th", { scope: "row" }, kind.kind), el("td", { class: "when" }, share), ...numbers);
}

const body = (id) => $(id).tBodies[0];

function render(view) {
  state.view = view;
  text($("model"), view.model);
  mark(view.problem || "live", view.problem ? "lost" : "live");
  keyed($("way"), view.way, (station) => station.name, makeStation, updateStation);
  keyed($("running"), view.running, (request) => request.id, makeRequest, updateRequest);
  keyed($("ended"), view.ended, (request) => request.id, makeRequest, updateRequest);
  $("requests-none").hidden = view.running.length + view.ended.length > 0;
  text($("requests-note"), `${show(view.num_running)} in flight`);
  keyed(body("kinds"), view.kinds, (kind) => kind.kind, makeKind, updateKind);
  const sum = (name) => view.kinds.reduce((so_far, kind) => so_far + kind[name], 0);
  const arena = `${size(sum("capacity_nbytes"))}, ${size(sum("backed_nbytes"))} in memory`;
  text($("arena-note"), `${arena}${view.hit_rate === null ? "" : `, ${show(view.hit_rate, "%")} of items found`}`);
  const { gate } = view;
  text($("gate-note"), `${show(gate.num_waiting_for_room)} waiting for room, ${show(gate.num_waiting_for_permits)} for a permit`);
  $("tenants").hidden = !gate.tenants.length;
  $("tenants-none").hidden = gate.tenants.length > 0;
  keyed(body("tenants"), gate.tenants, (one) => one.name, () => rowOf("", "number", "number", "number", "number"), (row, one) =>
    cells(row, [one.name || "everybody", show(one.share, "%"), show(one.num_running), show(one.num_waiting), size(one.reserved_nbytes)]));
  text($("items-note"), `of ${count(view.num_objects, "object")}`);
  keyed(body("items"), view.items.map((item, index) => [index, item]), ([index]) => index,
    () => rowOf("key-of", "", "dim", "number", "held"), (row, [, item]) =>
      cells(row, [item.key || "–", item.kind, item.state, size(item.nbytes), item.held_by.join(", ") || "–"]));
  keyed(body("processes"), view.processes, (one) => `${one.name} ${one.pid}`, () => rowOf("", "number", "number", "number"), (row, one) =>
    cells(row, [one.is_connected ? one.name : `${one.name} (lost)`, String(one.pid), size(one.held_nbytes), size(one.reserved_nbytes)]));
}

function mark(words, kind) {
  text($("state"), words);
  $("state").className = kind;
}

// What comes from the server

const auth = () => (sessionStorage.getItem(KEY) ? { authorization: `Bearer ${sessionStorage.getItem(KEY)}` } : {});

async function* events(stream) {
  let rest = "";
  for await (const chunk of stream.pipeThrough(new TextDecoderStream())) {
    const found = (rest + chunk).split("\n\n");
    rest = found.pop();
    for (const event of found) {
      const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trimStart());
      if (data.length) yield data.join("\n");
    }
  }
}

async function follow() {
  let waitMs = 500;
  while (!document.hidden) {
    state.follow = new AbortController();
    try {
      const response = await fetch("views", { headers: auth(), signal: state.follow.signal });
      if (response.status === 401) return askForKey("That key is not the page's.");
      if (!response.ok) throw new Error((await response.json()).error.message);
      for await (const data of events(response.body)) { render(JSON.parse(data)); waitMs = 500; }
    } catch (error) {
      if (document.hidden) break;
      mark(error instanceof TypeError ? "the server does not answer" : error.message, "lost");
    }
    await new Promise((resume) => setTimeout(resume, waitMs));
    waitMs = Math.min(2 * waitMs, MAX_WAIT_MS);
  }
  state.follow = null;
}

function askForKey(note) {
  state.follow = null;
  sessionStorage.removeItem(KEY);
  text($("entry-note"), note);
  $("entry").hidden = false;
  mark("a key is needed", "lost");
  $("key").focus();
}

// Asking

function take(file) {
  if (!file || !file.type.startsWith("image/")) return;
  const reader = new FileReader();
  reader.addEventListener("load", () => { state.image = reader.result; });
  reader.readAsDataURL(file);
  URL.revokeObjectURL($("preview").src);
  $("preview").src = URL.createObjectURL(file);
  $("preview").alt = file.name;
  $("preview").hidden = false;
  text($("drop-note"), file.name);
}

async function ask() {
  const content = [{ type: "text", text: $("question").value }];
  if (state.image) content.unshift({ type: "image_url", image_url: { url: state.image } });
  const started = performance.now();
  const spent = () => show((performance.now() - started) / 1e3, "s");
  let answer = "";
  state.asked = new AbortController();
  text($("send"), "Stop");
  text($("answer"), "");
  text($("ask-note"), "asking");
  $("answer").className = "";
  try {
    const response = await fetch("ask", {
      method: "POST", signal: state.asked.signal, headers: { "content-type": "application/json", ...auth() },
      body: JSON.stringify({ model: state.view.model, messages: [{ role: "user", content }], stream: true }),
    });
    state.mine.add(response.headers.get("x-request-id"));
    if (!response.ok) throw new Error((await response.json()).error.message);
    for await (const data of events(response.body)) {
      if (data === "[DONE]") break;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new Error(chunk.error.message);
      const piece = chunk.choices?.[0]?.delta?.content;
      if (piece && !answer) text($("ask-note"), `first token after ${spent()}`);
      answer += piece ?? "";
      text($("answer"), answer);
    }
    text($("ask-note"), `${$("ask-note").textContent}, answered in ${spent()}`);
  } catch (error) {
    $("answer").className = error.name === "AbortError" ? "" : "bad";
    text($("answer"), error.name === "AbortError" ? answer : error.message);
    text($("ask-note"), error.name === "AbortError" ? "stopped" : "refused");
  }
  state.asked = null;
  text($("send"), "Ask");
}

$("file").addEventListener("change", () => take($("file").files[0]));
for (const name of ["dragover", "dragleave", "drop"]) {
  document.addEventListener(name, (event) => {
    event.preventDefault();
    $("drop").classList.toggle("over", name === "dragover");
    if (name === "drop") take(event.dataTransfer.files[0]);
  });
}
document.addEventListener("paste", (event) => take(event.clipboardData.files[0]));
$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  if (state.asked) state.asked.abort();
  else if (state.view?.model) ask();
});
$("entry").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem(KEY, $("key").value);
  $("entry").hidden = true;
  follow();
});
// Nobody is asked for a page that nobody sees.
document.addEventListener("visibilitychange", () => {
  if (document.hidden) state.follow?.abort();
  else if (!state.follow && $("entry").hidden) follow();
});

const about = await (await fetch("about")).json();
text($("about"), `Afferent ${about.version}. Rates are over five seconds; waits and times are of requests in that time.`);
if (!about.can_ask) {
  for (const id of ["file", "question", "send"]) $(id).disabled = true;
  text($("ask-note"), "The server's tenants have keys, and the page has none.");
}
if (about.needs_key && !sessionStorage.getItem(KEY)) askForKey("");
else follow();
