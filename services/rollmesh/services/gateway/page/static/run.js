// The view of one run: its state, curves, staleness, the ends of its samples, and who waits for whom.
import { get, runPath } from "./api.js";
import { verdictLine } from "./audit.js";
import { histogramOverTime, lines, stacked } from "./charts.js";
import { h, replace, table } from "./dom.js";
import { duration, number, percent, plural, submittedTasks } from "./format.js";
import { link } from "./route.js";
import { lagRows, meanLag, shownEvaluations } from "./scales.js";

const ENDS = [["used", "end-used"], ["exported", "end-exported"], ["filtered", "end-filtered"], ["stale", "end-stale"], ["cancelled", "end-cancelled"], ["failed", "end-failed"]];
const SHOWN_METRICS = ["loss", "kl", "entropy", "grad_norm", "ess", "length/used_mean", "lr"];
const SOURCE_SHARE = /^source\/(.+)\/groups_share$/;

function card(name, value, note) {
  return h("div", { class: "card" }, h("b", {}, value), h("span", {}, name), note ? h("small", {}, note) : null);
}

function cards(state, history) {
  const policy = state.policies?.[0] ?? {};
  const evals = shownEvaluations(history?.evals ?? []);
  const success = evals.length ? evals[evals.length - 1].mean_rewards[history.spec.success_reward] : undefined;
  const first = evals.length ? evals[0].mean_rewards[history.spec.success_reward] : undefined;
  const graded = evals.some((one) => one.graded);
  const shown = (value) => graded ? number(value, 3) : percent(value);
  const spec = history?.spec ?? {};
  return h("div", { class: "cards" },
    card("updates", number(policy.applied_step ?? 0), spec.updates_max ? `of ${number(spec.updates_max)}` : "no limit"),
    card(graded ? "held-out reward" : "held-out success", success === undefined ? "–" : shown(success), first === undefined ? (spec.eval_every ? "no evaluation yet" : "this run has no evaluations") : `${shown(first)} at step ${evals[0].step}`),
    card("staleness, mean", number(meanLag(policy.trained_by_staleness ?? {}), 2), `bound ${number(spec.max_staleness ?? 0)}`),
    card("published", policy.published_step >= 0 ? `step ${number(policy.published_step)}` : "nothing", `checkpoint ${number(policy.checkpoint_update ?? 0)}, incarnation ${number(policy.incarnation ?? 0)}`),
    state.submitted ? card("submitted tasks answered", ...submittedTasks(state.submitted)) : null,
    card("tokens generated", number(policy.tokens_generated ?? 0), `${number(policy.tokens_trained ?? 0)} trained`),
    card("time", duration(state.seconds), state.ended ? "ended" : `progress ${duration(state.idle_s)} ago`));
}

function chain(state) {
  if (state.ended) return h("p", {}, `The run has ended: ${state.ended}`);
  const links = state.chain ?? [];
  const stalled = state.stalled ? h("p", { class: "notice", role: "alert" }, `Stalled: ${state.stalled}`) : null;
  if (!links.length) return [stalled, h("p", { class: "missing" }, "No component waits for another.")];
  return [stalled, h("ol", { class: "chain", "aria-label": "Who waits for whom, down to the root cause" }, links.map((one, n) => h("li", { class: n === links.length - 1 ? "root" : undefined }, h("b", {}, one.who), " ", h("span", {}, one.what))))];
}

function samples(state) {
  const counts = state.samples ?? {};
  const names = ["live", "trained", "exported", "filtered", "stale", "cancelled", "failed"];
  const reserved = counts.reserved || 0;
  const rows = names.flatMap((name) => {
    const reasons = Object.entries(counts.reasons ?? {}).filter(([reason]) => reason.startsWith(`${name}/`)).sort((a, b) => b[1] - a[1]);
    return counts[name] || name === "live" || name === "trained"
      ? [[name, number(counts[name] ?? 0), reserved ? percent((counts[name] ?? 0) / reserved) : "–"], ...reasons.map(([reason, num]) => [h("span", { class: "sub" }, reason.slice(name.length + 1)), number(num), percent(num / reserved)])]
      : [];
  });
  const replayed = state.replay?.samples ?? {};
  const others = (state.submitted_samples ?? []).map((one) => [one.source, number(one.groups), number(one.waiting), number(one.dropped ?? 0), number(one.samples?.trained ?? 0), number(one.samples?.filtered ?? 0), number(one.samples?.stale ?? 0)]);
  return [table("Training samples by end", ["samples", "number", "share"], [["reserved", number(reserved), ""], ...rows]),
    replayed.reserved ? table("Replayed samples by end", ["samples", "number"], ["reserved", ...names].filter((name) => replayed[name]).map((name) => [name, number(replayed[name])])) : null,
    others.length ? table("Samples that clients submitted", ["source", "groups", "groups waiting", "groups dropped as too old", "samples trained", "samples filtered", "samples stale"], others) : null,
    state.failed_attempts?.num ? h("p", { class: "notice" }, `${plural(state.failed_attempts.num, "failed attempt")} since the coordinator started. Newest: ${state.failed_attempts.cause}`) : null];
}

// Return the histogram of `field` of each update.
function staleness(updates, field, bound, { id, title, missing }) {
  const unlimited = bound === "unlimited";
  const lags = [...new Set(updates.flatMap((one) => Object.keys(one[field]).map(Number)))];
  const { labels, rowOf } = lagRows(unlimited ? 0 : Number(bound ?? 0), lags);
  const byRow = updates.map((one) => {
    const found = {};
    for (const [lag, num] of Object.entries(one[field])) found[rowOf(Number(lag))] = (found[rowOf(Number(lag))] || 0) + num;
    return found;
  });
  const note = `Rows are staleness; ${unlimited ? "it has no bound" : `the bound is ${number(Number(bound ?? 0))}`}. A darker cell is a larger share of the update.`;
  return histogramOverTime(byRow, updates.map((one) => one.update), labels, { id, title, key: "staleness", note, missing });
}

function curves(history) {
  const updates = history.updates;
  const xs = updates.map((one) => one.update);
  const evals = shownEvaluations(history.evals);
  const success = history.spec.success_reward;
  const labels = [...new Set(evals.flatMap((one) => Object.keys(one.success_by_label)))].sort().slice(0, 7);
  const byLabel = labels.map((name) => ({ name, values: evals.map((one) => one.success_by_label[name] ?? null), dots: true }));
  const rewards = [...new Set(updates.flatMap((one) => Object.keys(one.rewards)))].slice(0, 8);
  const starts = [history.began_unix_s, ...updates.map((one) => one.time_unix_s)];
  const took = updates.map((one, n) => (one.time_unix_s - starts[n]) / one.num_updates);
  const none = "No update was committed yet.";
  return [
    lines([{ name: "all tasks", values: evals.map((one) => one.mean_rewards[success] ?? null), dots: true }, ...(byLabel.length > 1 ? byLabel : [])], evals.map((one) => one.step),
      { id: "success", title: evals.some((one) => one.graded) ? "Held-out reward" : "Held-out success", x: "step", unit: "step", from: [0, 1], missing: history.spec.eval_every ? "No evaluation has finished yet." : "This run has no evaluations (run.eval_every is 0)." }),
    lines(rewards.map((name) => ({ name, values: updates.map((one) => one.rewards[name] ?? null) })), xs, { id: "reward", title: "Mean reward of the batch", x: "update", missing: none }),
    staleness(updates, "lags", history.spec.max_staleness, { id: "lag", title: "Staleness of the trained samples", missing: none }),
    updates.some((one) => Object.keys(one.replayed).length) ? staleness(updates, "replayed", history.spec.replay?.max_staleness, { id: "replayed-lag", title: "Staleness of the replayed samples", missing: none }) : null,
    stacked(updates.map((one) => one.ends), xs, ENDS, { id: "ends", title: "What became of the samples, per update", missing: none }),
    lines([{ name: "seconds", values: took }], xs, { id: "duration", title: "Seconds per update", x: "update", from: [0], missing: none }),
    lines([{ name: "mean |advantage|", values: updates.map((one) => one.abs_advantage) }], xs, { id: "advantage", title: "Mean absolute advantage per token", x: "update", from: [0], missing: updates.length ? "The trainer did not report measurements of groups." : none }),
    lines([{ name: "policy loss", values: updates.map((one) => one.policy_loss) }], xs, { id: "policy-loss", title: "Policy loss per token, without a clip", x: "update", missing: updates.length ? "The trainer did not report measurements of groups." : none }),
  ];
}

function learner(metrics) {
  if (metrics.missing) return h("p", { class: "missing" }, metrics.missing);
  const names = Object.keys(metrics.metrics);
  const first = SHOWN_METRICS.filter((name) => names.includes(name));
  const sources = names.filter((name) => SOURCE_SHARE.test(name)).slice(0, 8);
  const rest = names.filter((name) => !first.includes(name) && !sources.includes(name));
  const draw = (name) => lines([{ name, values: metrics.metrics[name] }], metrics.updates, { id: `metric-${name.replaceAll("/", "-")}`, title: name, x: "update" });
  const phases = Object.keys(metrics.seconds);
  const seconds = metrics.updates.map((_, n) => Object.fromEntries(phases.map((name) => [name, metrics.seconds[name][n] ?? 0])));
  const sourceOf = (name) => SOURCE_SHARE.exec(name)[1];
  const shares = metrics.updates.map((_, n) => Object.fromEntries(sources.map((name) => [sourceOf(name), metrics.metrics[name][n] ?? 0])));
  const more = h("details", { id: "more-metrics" }, h("summary", { id: "more-metrics-summary" }, `${plural(rest.length, "further metric")}`));
  more.addEventListener("toggle", () => {
    if (more.open && more.childElementCount === 1) more.append(h("div", { class: "charts" }, rest.map(draw)));
  });
  return [h("div", { class: "charts" }, first.map(draw),
    sources.length ? stacked(shares, metrics.updates, sources.map((name, n) => [sourceOf(name), `s${n}`]), { id: "sources", title: "Share of each task source in the batch" }) : null,
    stacked(seconds, metrics.updates, phases.slice(0, 8).map((name, n) => [name, `s${n}`]), { id: "phases", title: "Time of the learner by phase" })), rest.length ? more : null];
}

export function runView(context, { run }) {
  const parts = { notice: h("div", {}), cards: h("div", {}), verdict: h("div", {}), chain: h("div", {}), curves: h("div", { class: "charts" }), samples: h("div", {}), learner: h("div", {}) };
  let history = null;
  const drawState = () => {
    const news = context.run;
    if (!news) return;
    const notice = news.gone ? "This run was deleted." : news.unreachable ? `The coordinator does not respond: ${news.unreachable}. The values below are the newest ones.` : "";
    replace(parts.notice, notice ? h("p", { class: "notice", role: "alert" }, notice) : null);
    if (!news.state.run) return;
    replace(parts.cards, cards(news.state, history));
    replace(parts.chain, chain(news.state));
    replace(parts.samples, samples(news.state));
  };
  const drawHistory = async () => {
    history = await get(runPath(run, "history"));
    replace(parts.curves, history.problem ? h("p", { class: "notice" }, history.problem) : null, curves(history));
    drawState();
    replace(parts.learner, learner(await get(runPath(run, "metrics"))));
  };
  const drawVerdict = async () => replace(parts.verdict, verdictLine(await get(runPath(run, "audit")), run));
  const moved = context.onMoved({ history: ["updates", "evals", "behind"], audit: ["audit"] }, { history: drawHistory, audit: drawVerdict });
  const element = h("section", {}, h("h1", { id: "title", tabindex: "-1" }, run), parts.notice, parts.cards, parts.verdict,
    h("h2", {}, "Who waits for whom"), parts.chain, h("h2", {}, "Curves"), parts.curves,
    h("div", { class: "two" }, h("div", {}, h("h2", {}, "What became of the samples"), parts.samples), h("div", {}, h("h2", {}, "Look closer"),
      h("p", {}, h("a", { href: link(run, "samples"), id: "to-samples" }, "Newest samples with their tokens")), h("p", {}, h("a", { href: "#/nodes", id: "to-nodes" }, "Nodes with versions and load")), h("p", {}, h("a", { href: link(run, "audit"), id: "to-audit" }, "The audit and its claims")))),
    h("h2", {}, "Metrics of the learner"), parts.learner);
  return { title: run, element, on: { run: drawState, moved }, start: () => Promise.all([drawHistory(), drawVerdict()]) };
}
