// A line of the last minute, with axes; the pointer reads a value of it.

import { el, roundUp, show, showTip, svg, text, tip } from "./elements.js";

const SPAN_S = 60, HEIGHT = 100, GAP_S = 3;

export function makeChart() {
  const grid = [0, 0.5, 1].map((part) => svg("line", { class: "grid", x1: 0, x2: SPAN_S, y1: part * HEIGHT, y2: part * HEIGHT }));
  const graph = svg("svg", { viewBox: `0 0 ${SPAN_S} ${HEIGHT}`, preserveAspectRatio: "none", "aria-hidden": "true" },
    ...grid, svg("path", { class: "area" }), svg("path", { class: "line" }));
  const plot = el("div", { class: "plot" }, graph, el("i", { class: "cross", hidden: true }));
  const node = el("div", { class: "chart" },
    el("div", { class: "y", "aria-hidden": "true" }, el("span"), el("span"), el("span", {}, "0")), plot,
    el("div", { class: "x", "aria-hidden": "true" }, el("span", {}, "60 s ago"), el("span", {}, "now")));
  plot.addEventListener("pointermove", (event) => read(node, event));
  plot.addEventListener("pointerleave", () => { plot.lastChild.hidden = true; });
  return node;
}

// `past` has pairs of a time and a value; a value of null is a gap.
export function drawChart(node, past, { unit, label }) {
  const latest = past.at(-1)[0], most = roundUp(Math.max(1, ...past.map(([, value]) => value ?? 0)));
  const [top, middle] = node.querySelector(".y").children;
  text(top, most.toLocaleString("en"));
  text(middle, most > 1 ? (most / 2).toLocaleString("en") : "");
  const runs = [];
  let before = -Infinity;
  for (const [at, value] of past) {
    if (value === null) { before = -Infinity; continue; }
    if (at - before > GAP_S) runs.push([]);
    runs.at(-1).push([SPAN_S + at - latest, HEIGHT * (1 - value / most)]);
    before = at;
  }
  const points = (run) => run.map(([x, y]) => `${x.toFixed(2)},${y.toFixed(1)}`).join("L");
  const bottom = ([x]) => `${x.toFixed(2)},${HEIGHT}`;
  node.querySelector(".line").setAttribute("d", runs.map((run) => `M${points(run)}`).join(""));
  node.querySelector(".area").setAttribute("d", runs.map((run) => `M${bottom(run[0])}L${points(run)}L${bottom(run.at(-1))}Z`).join(""));
  node.past = past;
  node.unit = [unit, label];
}

function read(node, event) {
  const plot = event.currentTarget, place = plot.getBoundingClientRect();
  if (!node.past?.length) return;
  const latest = node.past.at(-1)[0];
  const at = latest - SPAN_S * (1 - (event.clientX - place.left) / place.width);
  const [found, value] = node.past.reduce((best, each) => (Math.abs(each[0] - at) < Math.abs(best[0] - at) ? each : best));
  const [unit, label] = node.unit, ago = Math.round(latest - found);
  plot.lastChild.hidden = false;
  plot.lastChild.style.left = `${100 * (1 - (latest - found) / SPAN_S)}%`;
  tip(plot, `${show(value, unit)} ${label}, ${ago ? `${ago} s ago` : "now"}`);
  showTip(plot, event.clientX);
}
