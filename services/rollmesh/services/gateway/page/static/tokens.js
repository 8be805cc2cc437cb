// The class and the explanation of each token of a transcript, by what it is colored for. Pure functions.
import { signedLevel } from "./scales.js";

export const COLORS = ["version", "source", "advantage", "log-prob"];
const SOURCES = ["policy", "prompt", "tool", "hint", "summary", "dataset", "replay", "rewritten", "peer", "human"];

// Return the versions of a transcript in the order of their steps: ["3.0", "4.0"].
export function versionsOf(runs) {
  const found = new Map();
  for (const one of runs) if (one.step !== null && one.step !== undefined) found.set(`${one.step}.${one.incarnation}`, [one.incarnation, one.step]);
  return [...found.entries()].sort((a, b) => a[1][0] - b[1][0] || a[1][1] - b[1][1]).map(([name]) => name);
}

// Return the class of token `n` of a run of tokens.
export function classOf(one, n, color, transcript, versions) {
  const sampled = one.step !== null && one.step !== undefined;
  if (color === "source") return `src-${one.source}`;
  if (!sampled) return "plain";
  if (color === "version") return `v${versions.indexOf(`${one.step}.${one.incarnation}`) % 8}`;
  if (color === "log-prob") {
    const value = one.logprobs?.[n];
    return value === undefined ? "plain" : `lp${Math.max(0, Math.min(4, Math.floor(-value)))}`;
  }
  if (!one.trained?.[n] || transcript.advantage === null) return "plain";
  const level = signedLevel(transcript.advantage, 2);
  return `adv${level < 0 ? "m" : "p"}${Math.abs(level)}`;
}

// Return the entries of the legend: [[class, text]].
export function legendOf(transcript, color, versions) {
  const lag = (name) => (transcript.update ? `, staleness ${transcript.update - 1 - Number(name.split(".")[0])} at update ${transcript.update}` : "");
  if (color === "version") return versions.map((name, n) => [`v${n % 8}`, `step ${name.replace(/\.0$/, "")}${lag(name)}`]);
  if (color === "source") return SOURCES.filter((name) => transcript.runs.some((one) => one.source === name)).map((name) => [`src-${name}`, name]);
  if (color === "log-prob") return [0, 1, 2, 3, 4].map((n) => [`lp${n}`, n === 4 ? "below -4" : `${-n} to ${-n - 1}`]);
  if (transcript.advantage === null) return [];
  const level = signedLevel(transcript.advantage, 2);
  return [[`adv${level < 0 ? "m" : "p"}${Math.abs(level)}`, `advantage ${transcript.advantage.toFixed(3)} of each trained token (${transcript.advantage_of})`]];
}

// Return what a token shows when it is pointed at.
export function titleOf(one, n) {
  const facts = [`id ${one.ids[n]}`, one.source];
  if (one.step !== null && one.step !== undefined) facts.push(`step ${one.step}${one.incarnation ? `.${one.incarnation}` : ""}`);
  if (one.logprobs) facts.push(`log-prob ${one.logprobs[n]}`);
  facts.push(one.trained?.[n] ? "trained on" : "not trained on");
  return facts.join(", ");
}
