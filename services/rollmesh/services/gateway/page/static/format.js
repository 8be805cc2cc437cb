// Numbers, times and versions as text. Pure functions.

// Return a number with thousands separators, or with `digits` decimals if it is not whole.
export function number(value, digits = 3) {
  if (value === null || value === undefined || !Number.isFinite(value)) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en-US");
  const size = Math.abs(value);
  if (size !== 0 && (size < 10 ** -digits || size >= 1e7)) return value.toExponential(2);
  return value.toLocaleString("en-US", { maximumFractionDigits: digits });
}

export function percent(share) {
  return share === null || share === undefined || !Number.isFinite(share) ? "–" : `${(100 * share).toFixed(share > 0 && share < 0.1 ? 1 : 0)} %`;
}

// Return a duration in the two largest units.
export function duration(seconds) {
  if (seconds === null || seconds === undefined || !Number.isFinite(seconds)) return "–";
  const s = Math.max(0, seconds);
  if (s < 60) return `${s < 10 ? s.toFixed(1) : Math.round(s)} s`;
  const units = [["d", 86400], ["h", 3600], ["min", 60], ["s", 1]];
  const first = units.findIndex(([, size]) => s >= size);
  const [name, size] = units[first];
  const whole = Math.floor(s / size);
  const next = units[first + 1];
  const rest = next ? Math.floor((s - whole * size) / next[1]) : 0;
  return rest ? `${whole} ${name} ${rest} ${next[0]}` : `${whole} ${name}`;
}

// Return the number of answered tasks, and a note on the others, of the tasks that clients submitted.
export function submittedTasks(tasks) {
  const more = tasks.finished ? "no further ones follow" : "clients may submit more";
  return [number(tasks.answered ?? 0), `${number(tasks.open ?? 0)} open, ${number(tasks.drawn ?? 0)} drawn, ${more}`];
}

// Return policy@step, with the incarnation after a roll-back.
export function version(v) {
  if (!v) return "–";
  return `${v.policy || "main"}@${v.step}${v.incarnation ? `.${v.incarnation}` : ""}`;
}

export function clock(unixSeconds) {
  if (!unixSeconds) return "–";
  return new Date(unixSeconds * 1000).toLocaleString(undefined, { month: "short", day: "numeric", hour: "2-digit", minute: "2-digit", second: "2-digit" });
}

// Return a name of an enum without its prefix, in lower case.
export function word(name, prefix) {
  return String(name || "").replace(prefix, "").toLowerCase().replaceAll("_", " ");
}

export function plural(num, one, many = `${one}s`) {
  return `${number(num)} ${num === 1 ? one : many}`;
}
