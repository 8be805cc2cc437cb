// Charts as SVG: lines, a histogram over time, and stacked columns. Each has a title, a readout that the pointer or the arrow keys move,
// and a table with its numbers.
import { h, svg, table } from "./dom.js";
import { number, percent } from "./format.js";
import { extent, linear, linePath, nearest, smoothed, stack, ticks } from "./scales.js";

const WIDTH = 560;
const HEIGHT = 200;
const LEFT = 52;
const RIGHT = 12;
const TOP = 10;
const BOTTOM = 26;
const COLUMNS_MAX = 160;
const TABLE_ROWS_MAX = 200;
const SMOOTHED_FROM = 100; // values from which a line gets a moving average; its own values stay as a faint line
const SMOOTHED_TO = 40; // windows of the moving average per chart
const cursors = new Map(); // index of the readout by chart

// Draw lines over `xs`. series: [{name, values, dots}]. options: {id, title, x, whole, bound: {name, value}, from}.
export function lines(series, xs, options) {
  const shown = series.filter((one) => one.values.some((value) => Number.isFinite(value)));
  if (!xs.length || !shown.length) return empty(options);
  const values = shown.flatMap((one) => one.values);
  const range = extent([...values, ...(options.bound ? [options.bound.value] : []), ...(options.from ?? [])]);
  const x = linear(extent(xs), [LEFT, WIDTH - RIGHT]);
  const y = linear(range, [HEIGHT - BOTTOM, TOP]);
  const marks = shown.map((one, n) => {
    const points = xs.map((at, index) => [x(at), Number.isFinite(one.values[index]) ? y(one.values[index]) : null]);
    const few = one.dots || xs.length === 1;
    const noisy = !one.dots && xs.length >= SMOOTHED_FROM;
    const mean = noisy ? smoothed(one.values, Math.ceil(xs.length / SMOOTHED_TO)).map((value, index) => [x(xs[index]), Number.isFinite(value) ? y(value) : null]) : [];
    return svg("g", { class: `s${n}` }, svg("path", { d: linePath(points), class: noisy ? "line raw" : "line" }), noisy ? svg("path", { d: linePath(mean), class: "line" }) : null,
      few ? points.filter(([, at]) => at !== null).map(([px, py]) => svg("circle", { cx: px.toFixed(1), cy: py.toFixed(1), r: 3 })) : null);
  });
  const bound = options.bound ? svg("g", { class: "bound" }, svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(options.bound.value), y2: y(options.bound.value) }),
    svg("text", { x: WIDTH - RIGHT - 2, y: y(options.bound.value) - 4, "text-anchor": "end" }, options.bound.name)) : null;
  const read = (index) => shown.map((one) => `${shown.length > 1 ? `${one.name} ` : ""}${number(one.values[index])}`).join(", ");
  return frame({
    ...options, xs, x, read,
    content: [yAxis(y, range), xAxis(x, xs), bound, marks],
    legend: shown.length > 1 ? shown.map((one, n) => [`s${n}`, one.name]) : [],
    rows: () => table(options.title, [options.x, ...shown.map((one) => one.name)], sampled(xs).map((index) => [number(xs[index]), ...shown.map((one) => number(one.values[index]))])),
  });
}

// Draw the share of each key over `xs` as columns of cells: darker is a larger share. counts: one {key: number} per x.
export function histogramOverTime(counts, xs, keys, options) {
  if (!xs.length || !keys.length) return empty(options);
  const columns = merged(counts, xs);
  const x = linear([0, columns.length], [LEFT, WIDTH - RIGHT]);
  const y = linear([0, keys.length], [HEIGHT - BOTTOM, TOP]);
  const cells = columns.flatMap((column, n) => stack(column.counts, keys).map((one, k) => {
    const level = Math.ceil((one.to - one.from) * 8 - 1e-9);
    return level > 0 ? svg("rect", { class: `heat${level}`, x: x(n).toFixed(1), y: y(k + 1).toFixed(1), width: Math.max(1, x(1) - x(0) - 0.5).toFixed(1), height: (y(0) - y(1) - 1).toFixed(1) }) : null;
  }));
  const every = Math.ceil(keys.length / 8);
  const labels = keys.map((key, k) => (k % every ? null : svg("text", { x: LEFT - 6, y: (y(k + 0.5) + 4).toFixed(1), "text-anchor": "end" }, String(key))));
  const centers = columns.map((_, n) => n + 0.5);
  return frame({
    ...options, xs: columns.map((one) => one.x), x: (_, index) => x(centers[index]),
    read: (index) => stack(columns[index].counts, keys).filter((one) => one.to > one.from).map((one) => `${options.key} ${one.key}: ${percent(one.to - one.from)}`).join(", ") || "no samples",
    content: [svg("g", { class: "axis" }, labels), columnAxis(x, columns), cells],
    legend: [],
    rows: () => countTable(options, columns, keys),
  });
}

// Draw stacked columns of shares. counts: one {key: number} per x. keys: [[key, class]].
export function stacked(counts, xs, keys, options) {
  const names = keys.map(([name]) => name).filter((name) => counts.some((one) => one[name]));
  if (!xs.length || !names.length) return empty(options);
  const columns = merged(counts, xs);
  const x = linear([0, columns.length], [LEFT, WIDTH - RIGHT]);
  const y = linear([0, 1], [HEIGHT - BOTTOM, TOP]);
  const classes = Object.fromEntries(keys);
  const bars = columns.flatMap((column, n) => stack(column.counts, names).filter((one) => one.to > one.from).map((one) =>
    svg("rect", { class: classes[one.key], x: x(n).toFixed(1), y: y(one.to).toFixed(1), width: Math.max(1, x(1) - x(0) - 0.5).toFixed(1), height: (y(one.from) - y(one.to)).toFixed(1) })));
  return frame({
    ...options, xs: columns.map((one) => one.x), x: (_, index) => x(index + 0.5),
    read: (index) => names.filter((name) => columns[index].counts[name]).map((name) => `${name} ${number(columns[index].counts[name])}`).join(", ") || "none",
    content: [yAxis(y, [0, 1], percent), columnAxis(x, columns), bars],
    legend: names.map((name) => [classes[name], name]),
    rows: () => countTable(options, columns, names),
  });
}

// Return a figure that says why there is nothing to draw.
export function empty({ id, title, missing }) {
  return h("figure", { class: "chart", id }, h("figcaption", {}, title), h("p", { class: "missing" }, missing || "No data yet."));
}

function frame({ id, title, note, xs, x: place, read, content, legend, rows, ...options }) {
  const readout = h("output", { class: "readout", id: `${id}-readout` });
  const cursor = svg("line", { class: "cursor", y1: TOP, y2: HEIGHT - BOTTOM });
  const last = xs.length - 1;
  const move = (index) => {
    const at = Math.max(0, Math.min(last, index));
    cursors.set(id, at === last ? undefined : at);
    const px = place(xs[at], at).toFixed(1);
    cursor.setAttribute("x1", px);
    cursor.setAttribute("x2", px);
    readout.textContent = `${options.unit ?? "update"} ${number(xs[at])}: ${read(at)}`;
    return at;
  };
  let current = move(cursors.get(id) ?? last);
  const drawing = svg("svg", {
    viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", tabindex: "0", id: `${id}-svg`, "aria-label": `${title}. Arrow keys read the values. Newest: ${read(last)}`,
    "aria-describedby": `${id}-readout`,
    onpointermove: (event) => {
      const box = drawing.getBoundingClientRect();
      const px = ((event.clientX - box.left) / box.width) * WIDTH;
      current = move(nearest(xs.map((one, index) => place(one, index)), px));
    },
    onkeydown: (event) => {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -xs.length, End: xs.length }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      current = move(current + step);
    },
  }, content, cursor);
  const details = h("details", { id: `${id}-table` }, h("summary", { id: `${id}-summary` }, "Table"));
  details.addEventListener("toggle", () => {
    if (details.open && details.childElementCount === 1) details.append(rows());
  });
  return h("figure", { class: "chart", id }, h("figcaption", {}, title), note ? h("p", { class: "note" }, note) : null,
    legend.length ? h("p", { class: "legend" }, legend.map(([cls, name]) => h("span", {}, h("i", { class: `key ${cls}` }), name))) : null,
    drawing, readout, details);
}

function yAxis(y, [low, high], text = number) {
  return svg("g", { class: "axis" }, ticks(low, high, 4).map((value) => [
    svg("line", { x1: LEFT, x2: WIDTH - RIGHT, y1: y(value).toFixed(1), y2: y(value).toFixed(1) }),
    svg("text", { x: LEFT - 6, y: (y(value) + 4).toFixed(1), "text-anchor": "end" }, text(value)),
  ]));
}

function xAxis(x, xs) {
  const [low, high] = extent(xs);
  return svg("g", { class: "axis x" }, ticks(low, high, 6, true).map((value) => svg("text", { x: x(value).toFixed(1), y: HEIGHT - 8, "text-anchor": "middle" }, number(value))));
}

function columnAxis(x, columns) {
  const every = Math.ceil(columns.length / 7);
  return svg("g", { class: "axis x" }, columns.map((column, n) => (n % every ? null : svg("text", { x: x(n + 0.5).toFixed(1), y: HEIGHT - 8, "text-anchor": "middle" }, number(column.x)))));
}

// Merge consecutive columns, so that each is wide enough to see.
function merged(counts, xs) {
  const size = Math.ceil(xs.length / COLUMNS_MAX);
  const columns = [];
  for (let n = 0; n < xs.length; n += size) {
    const sum = {};
    for (const one of counts.slice(n, n + size)) for (const [key, num] of Object.entries(one)) sum[key] = (sum[key] || 0) + num;
    columns.push({ x: xs[Math.min(n + size, xs.length) - 1], counts: sum });
  }
  return columns;
}

function sampled(xs) {
  const every = Math.ceil(xs.length / TABLE_ROWS_MAX) || 1;
  return xs.map((_, index) => index).filter((index) => index % every === 0 || index === xs.length - 1);
}

function countTable(options, columns, keys) {
  const rows = sampled(columns).map((index) => [number(columns[index].x), ...keys.map((key) => number(columns[index].counts[key] || 0))]);
  return table(options.title, [options.unit ?? "update", ...keys.map((key) => (options.key ? `${options.key} ${key}` : key))], rows);
}
