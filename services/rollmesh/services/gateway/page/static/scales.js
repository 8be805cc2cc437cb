// Arithmetic of charts: domains, ticks, positions, paths. Pure functions.

// Return [low, high] of finite values. A single value, or values that differ by rounding, get some space around them.
export function extent(values) {
  let low = Infinity;
  let high = -Infinity;
  for (const value of values) {
    if (value === null || value === undefined || !Number.isFinite(value)) continue;
    if (value < low) low = value;
    if (value > high) high = value;
  }
  if (low === Infinity) return [0, 1];
  if (high - low <= 1e-9 * Math.max(Math.abs(low), Math.abs(high))) {
    const space = Math.abs(low) * 0.1 || 1;
    return [low - space, high + space];
  }
  return [low, high];
}

// Return at most about `num` round numbers within [low, high].
export function ticks(low, high, num = 5, whole = false) {
  const raw = (high - low) / Math.max(1, num);
  if (!(raw > 0)) return [low];
  const power = 10 ** Math.floor(Math.log10(raw));
  let step = [1, 2, 5, 10].map((m) => m * power).find((one) => one >= raw * 0.999) ?? raw;
  if (whole) step = Math.max(1, Math.ceil(step));
  const first = Math.ceil(low / step - 1e-9);
  const count = Math.min(Math.floor(high / step + 1e-9) - first + 1, 2 * num + 2);
  return Array.from({ length: Math.max(0, count) }, (_, n) => Number(((first + n) * step).toPrecision(12)));
}

// Return a function from [low, high] to [begin, end].
export function linear([low, high], [begin, end]) {
  const size = high - low || 1;
  return (value) => begin + ((value - low) / size) * (end - begin);
}

// Return the path of points [x, y]; a missing y interrupts the line.
export function linePath(points) {
  let path = "";
  let pen = false;
  for (const [x, y] of points) {
    if (y === null || y === undefined || !Number.isFinite(y)) {
      pen = false;
      continue;
    }
    path += `${pen ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
    pen = true;
  }
  return path;
}

// Return the centered moving average of `values` over `size` of them. Missing values are ignored, and stay missing.
export function smoothed(values, size) {
  const before = Math.floor((size - 1) / 2);
  return values.map((value, n) => {
    if (!Number.isFinite(value)) return value;
    const near = values.slice(Math.max(0, n - before), n - before + size).filter(Number.isFinite);
    return near.reduce((sum, one) => sum + one, 0) / near.length;
  });
}

// Return the evaluations to show: those with samples. The newest one counts once all of its episodes are scored, because short episodes end
// first, and they are often the easy ones.
export function shownEvaluations(evals) {
  return evals.filter((one, n) => one.num_samples && (one.complete || n < evals.length - 1));
}

// Return the index of the value that is nearest to `wanted`; `values` is sorted.
export function nearest(values, wanted) {
  let best = 0;
  for (let n = 1; n < values.length; n += 1) if (Math.abs(values[n] - wanted) < Math.abs(values[best] - wanted)) best = n;
  return best;
}

// Return the shares of stacked counts per column: [{key, from, to}], in the order of `keys`.
export function stack(counts, keys) {
  const total = keys.reduce((sum, key) => sum + (counts[key] || 0), 0);
  let from = 0;
  return keys.map((key) => {
    const to = from + (total ? (counts[key] || 0) / total : 0);
    const one = { key, from, to };
    from = to;
    return one;
  });
}

// Return the level -4 to 4 of a signed value, given the size of a full level.
export function signedLevel(value, full) {
  if (value === null || value === undefined || !Number.isFinite(value) || !(full > 0)) return 0;
  const level = Math.max(-4, Math.min(4, Math.round((value / full) * 4)));
  return level || (value > 0 ? 1 : value < 0 ? -1 : 0);
}

// Return the mean of a histogram {staleness: number}, or undefined if it is empty. Samples at -1 have no tokens of the policy, so that they
// have no staleness.
export function meanLag(histogram) {
  const lags = Object.entries(histogram).map(([lag, num]) => [Number(lag), num]).filter(([lag]) => lag >= 0);
  const total = lags.reduce((sum, [, num]) => sum + num, 0);
  return total ? lags.reduce((sum, [lag, num]) => sum + lag * num, 0) / total : undefined;
}

// Return {labels, rowOf} of a histogram of staleness: rows for 0 to the bound, or for 0 to the largest that occurred if the bound is above
// `rowsMax`. Of more rows, consecutive ones are merged.
export function lagRows(bound, lags, rowsMax = 32) {
  const highest = lags.reduce((most, lag) => Math.max(most, lag), bound < rowsMax ? bound : 0);
  const size = Math.ceil((highest + 1) / rowsMax);
  const labels = Array.from({ length: Math.ceil((highest + 1) / size) }, (_, n) => (size === 1 ? String(n) : `${n * size}-${(n + 1) * size - 1}`));
  return { labels, rowOf: (lag) => labels[Math.floor(lag / size)] };
}
