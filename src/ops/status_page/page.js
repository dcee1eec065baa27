// Adds live charts to the status page, and refreshes its numbers. All numbers come from the server; the page without this script is
// complete.
"use strict";

const RANGES = {
  "15m": { interval: 1, seconds: 15 * 60 },
  "1h": { interval: 10, seconds: 60 * 60 },
  "24h": { interval: 10, seconds: 24 * 60 * 60 },
};
const POLL_MS = 1000;
const TIMEOUT_MS = 5000;
const COLOURS = 9;
const SPAN_MIN_S = 60;
// Room for the labels around a chart.
const [LEFT, RIGHT, TOP, BOTTOM, HEIGHT] = [58, 8, 8, 20, 150];

const at = (id) => document.getElementById(id);
let range = RANGES["15m"];
// The points of the current interval, as long as the server keeps them.
let points = null;
// The time that is pointed at, or null for the newest one.
let cursor = null;
const figures = new Map();

const digits = (value) => {
  if (Number.isInteger(value) || value >= 100) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(value >= 10 ? 1 : 2);
};
// The value in the unit that is shown, and the name of that.
function scaled(unit, value) {
  if (unit === "per_second") return [value, "/s"];
  if (unit === "seconds") return value < 1e-3 ? [value * 1e6, " µs"] : value < 1 ? [value * 1e3, " ms"] : [value, " s"];
  if (unit === "bytes") return value < 1e6 ? [value / 1e3, " kB"] : value < 1e9 ? [value / 1e6, " MB"] : [value / 1e9, " GB"];
  return [value, ""];
}
function shown(unit, value) {
  const [number, name] = scaled(unit, value);
  return digits(number) + name;
}
function axisLabel(unit, value) {
  const [number, name] = scaled(unit, value);
  return Number(number.toPrecision(3)).toLocaleString("en-US") + (value === 0 ? "" : name);
}
const clock = (time, withSeconds) =>
  new Date(time * 1000).toLocaleTimeString([], {
    hour: "2-digit",
    minute: "2-digit",
    second: withSeconds ? "2-digit" : undefined,
    hourCycle: "h23",
  });

// The smallest 1, 2 or 5 times a power of ten that is not below.
function roundUp(value) {
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((factor) => factor * power >= value * 0.999);
}

function element(name, attributes = {}, ...children) {
  const isSvg = ["svg", "path", "line", "text"].includes(name);
  const made = isSvg ? document.createElementNS("http://www.w3.org/2000/svg", name) : document.createElement(name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.append(...children);
  return made;
}

function merge(got) {
  const continues = points && points.started_at === got.started_at && points.interval_s === got.interval_s && points.next === got.first;
  if (!continues) {
    points = got;
    return;
  }
  const before = points.times.length;
  points.times.push(...got.times);
  points.next = got.next;
  got.charts.forEach((chart, index) => {
    const { lines } = points.charts[index];
    for (const [name, values] of chart.lines) {
      let line = lines.find(([known]) => known === name);
      if (!line) lines.push((line = [name, Array(before).fill(0)]));
      line[1].push(...values);
    }
    // An error that did not occur again.
    for (const [, values] of lines) while (values.length < points.times.length) values.push(0);
  });
  const oldest = points.times.at(-1) - 24 * 60 * 60;
  const old = points.times.findIndex((time) => time >= oldest);
  const excess = Math.max(old, points.times.length - 8640);
  if (excess > 0) {
    points.times.splice(0, excess);
    for (const { lines } of points.charts) for (const [, values] of lines) values.splice(0, excess);
  }
}

// The path of a line: of the points in a column of pixels, the highest.
function path(values, first, x, y) {
  let text = "";
  let column = null;
  let highest = 0;
  let isOpen = false;
  const flush = () => {
    if (column === null) return;
    text += `${isOpen ? "L" : "M"}${column} ${y(highest).toFixed(1)}`;
    isOpen = true;
    column = null;
  };
  for (let index = first; index < values.length; index++) {
    const value = values[index];
    if (value === null) {
      flush();
      isOpen = false;
      continue;
    }
    const at = Math.round(x(points.times[index]));
    if (at !== column) {
      flush();
      column = at;
      highest = value;
    } else {
      highest = Math.max(highest, value);
    }
  }
  flush();
  // A point alone is a dot.
  return text.replace(/M(\S+) (\S+)(?=M|$)/g, "M$1 $2h.1");
}

// The index of the newest point that is not after the cursor.
function shownIndex() {
  if (cursor === null) return points.times.length - 1;
  const after = points.times.findIndex((time) => time > cursor);
  return after < 0 ? points.times.length - 1 : Math.max(after - 1, 0);
}

function figureOf(chart) {
  const known = figures.get(chart.id);
  if (known) return known;
  const caption = element("figcaption");
  const svg = element("svg", { class: "chart", role: "img", tabindex: "0" });
  const figure = element("figure", { id: `chart-${chart.id}` }, caption, svg);
  const made = { figure, caption, svg };
  svg.addEventListener("pointermove", (event) => {
    const { left, width } = svg.getBoundingClientRect();
    pointAt(end() - span() * (1 - (event.clientX - left - LEFT) / (width - LEFT - RIGHT)));
  });
  svg.addEventListener("pointerleave", () => pointAt(null));
  svg.addEventListener("blur", () => pointAt(null));
  svg.addEventListener("keydown", (event) => {
    const steps = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
    if (event.key === "Escape") pointAt(null);
    if (!steps || !points) return;
    event.preventDefault();
    pointAt((cursor ?? points.times.at(-1)) + steps * range.interval);
  });
  figures.set(chart.id, made);
  at("grid").append(figure);
  return made;
}

const end = () => points.times.at(-1);
// The seconds that a chart shows: fewer as long as the server has not run for the whole period.
const span = () => Math.min(range.seconds, Math.max(SPAN_MIN_S, end() - points.times[0]));

function pointAt(time) {
  if (!points?.times.length) return;
  cursor = time === null ? null : Math.min(Math.max(time, points.times[0]), end());
  draw();
}

function draw() {
  if (!points?.times.length) return;
  const start = end() - span();
  const first = points.times.findIndex((time) => time >= start);
  const index = shownIndex();
  for (const chart of points.charts) {
    const hasValue = ([, values]) => values.some((value, at) => at >= first && value !== null);
    const isUsed = ([, values]) => values.some((value, at) => at >= first && value > 0);
    const { figure, caption, svg } = figureOf(chart);
    // Without a file, as with PostgreSQL, there is no size.
    const isAbsent = ["database", "wal"].includes(chart.id) && !chart.lines.some(hasValue);
    figure.hidden = isAbsent;
    if (isAbsent) continue;
    const lines = chart.lines.map((line, number) => ({ line, colour: number % COLOURS }));
    const drawn = lines.filter(({ line }, number) => isUsed(line) || (number === 0 && chart.id !== "errors"));
    const width = Math.max(svg.clientWidth, 200);
    const highest = Math.max(...drawn.flatMap(({ line }) => line[1].slice(first).filter((value) => value !== null)), 0);
    const top = highest > 0 ? roundUp(highest) : 1;
    const x = (time) => LEFT + ((time - start) / span()) * (width - LEFT - RIGHT);
    const y = (value) => HEIGHT - BOTTOM - (value / top) * (HEIGHT - TOP - BOTTOM);
    const parts = [];
    for (const value of highest > 0 ? [0, top / 2, top] : [0]) {
      parts.push(element("line", { class: "grid", x1: LEFT, x2: width - RIGHT, y1: y(value), y2: y(value) }));
      parts.push(element("text", { x: LEFT - 6, y: y(value) + 4, "text-anchor": "end" }, axisLabel(chart.unit, value)));
    }
    for (const [share, anchor] of [[0, "start"], [0.5, "middle"], [1, "end"]]) {
      const time = start + span() * share;
      parts.push(element("text", { x: x(time), y: HEIGHT - 4, "text-anchor": anchor }, clock(time, span() < 600)));
    }
    for (const { line, colour } of drawn) parts.push(element("path", { class: `line-${colour}`, d: path(line[1], first, x, y) }));
    if (cursor !== null) parts.push(element("line", { class: "cursor", x1: x(cursor), x2: x(cursor), y1: TOP, y2: HEIGHT - BOTTOM }));
    svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    svg.replaceChildren(...parts);
    const texts = drawn.map(({ line: [name, values], colour }) => {
      const value = values[index] === null ? "–" : shown(chart.unit, values[index]);
      return { name, value, colour };
    });
    const time = cursor === null ? [] : [element("span", { class: "empty" }, clock(points.times[index], true))];
    const keys = texts.map(({ name, value, colour }) =>
      element("span", { class: `key line-${colour}` }, element("span", {}, name), element("b", {}, value)));
    if (keys.length === 0) keys.push(element("span", { class: "empty" }, "none"));
    caption.replaceChildren(element("h3", {}, chart.title), ...keys, ...time);
    const summary = texts.map(({ name, value }) => `${name} ${value}`).join(", ") || "none";
    svg.setAttribute("aria-label", `${chart.title}: ${summary}`);
  }
}

// Replaces the parts of the page that have changed.
function refresh(html) {
  const fresh = new DOMParser().parseFromString(html, "text/html");
  for (const id of ["state", "facts", "numbers", "warnings"]) {
    const from = fresh.getElementById(id);
    if (from && from.innerHTML !== at(id).innerHTML) at(id).replaceChildren(...from.childNodes);
  }
  const isReady = at("state").querySelector(".ready") !== null;
  document.title = `${isReady ? "Ready" : "Not ready"} – Plant Store status`;
}

async function get(path) {
  const response = await fetch(path, { signal: AbortSignal.timeout(TIMEOUT_MS), cache: "no-store" });
  if (!response.ok) throw new Error(`${response.status}`);
  return response;
}

async function poll() {
  try {
    const asked = range;
    const first = points?.interval_s === asked.interval ? points.next : 0;
    const [page, got] = await Promise.all([get("./"), get(`status.json?interval_s=${asked.interval}&first=${first}`)]);
    const [html, json] = [await page.text(), await got.json()];
    refresh(html);
    if (asked === range) merge(json);
    draw();
  } catch {
    const lost = element("p", { class: "not-ready" }, element("strong", {}, "No response"), " from the private listener of this node");
    if (!at("state").textContent.startsWith("No response")) at("state").replaceChildren(lost);
    document.title = "No response – Plant Store status";
  }
}

async function run() {
  for (;;) {
    if (!document.hidden) await poll();
    await new Promise((resolve) => setTimeout(resolve, POLL_MS));
  }
}

for (const input of document.querySelectorAll("input[name=range]")) {
  input.addEventListener("change", () => {
    range = RANGES[input.value];
    if (points?.interval_s !== range.interval) points = null;
    cursor = null;
    poll();
  });
}
// A browser may have kept the choice from before a reload.
const chosen = document.querySelector("input[name=range]:checked");
if (chosen) range = RANGES[chosen.value];
addEventListener("resize", draw);
at("charts").hidden = false;
run();
