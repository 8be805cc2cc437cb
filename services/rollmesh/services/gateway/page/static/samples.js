// The view of the newest samples of a run, with filters in the URL.
import { get, runPath } from "./api.js";
import { h, replace, table } from "./dom.js";
import { clock, number, plural } from "./format.js";
import { link } from "./route.js";

const ROWS_MAX = 200;

// Return the samples that the filters of the URL allow. Pure.
export function filtered(samples, query) {
  const within = (value, low, high) => (!low || value >= Number(low)) && (!high || value <= Number(high));
  const rewarded = (one) => (!query.reward_min && !query.reward_max) || one.rewards.some((r) => r.outcome === "ok" && within(r.value, query.reward_min, query.reward_max));
  return samples.filter((one) => (!query.purpose || one.purpose === query.purpose) && (!query.end || one.end === query.end) && (!query.finish || one.finish === query.finish)
    && (!query.task || one.task.includes(query.task)) && within(one.num_tokens, query.tokens_min, query.tokens_max) && rewarded(one));
}

function range(name, label, query, change) {
  const bound = (side, words) => {
    const input = h("input", { id: `filter-${name}-${side}`, type: "number", step: "any", class: "bound-input", "aria-label": `${label} ${words}`, placeholder: words, value: query[`${name}_${side}`] ?? "", onchange: () => change({ [`${name}_${side}`]: input.value }) });
    return input;
  };
  return h("span", {}, `${label} `, bound("min", "from"), " ", bound("max", "to"));
}

function choice(name, label, values, query, change) {
  const select = h("select", { id: `filter-${name}`, onchange: () => change({ [name]: select.value }) },
    h("option", { value: "" }, "all"), [...new Set([...values, query[name]].filter(Boolean))].sort().map((value) => h("option", { value, selected: query[name] === value }, value)));
  return h("label", {}, `${label} `, select);
}

function versions(one) {
  return one.steps.map(([step, incarnation]) => `${step}${incarnation ? `.${incarnation}` : ""}`).join(", ") || "–";
}

function row(one, run) {
  const scored = one.sample_id !== one.episode || one.steps.length > 0 || one.rewards.length > 0;
  const rewards = one.rewards.map((r) => (r.outcome === "ok" ? `${r.name} ${number(r.value)}` : `${r.name} ${r.outcome.replace("_", " ")}`)).join(", ") || "–";
  return [scored ? h("a", { href: link(run, "sample", one.sample_id), id: `sample-${one.sample_id}` }, one.sample_id) : one.sample_id,
    h("a", { href: link(run, "group", one.group) }, one.group), one.task, one.purpose, rewards, number(one.num_tokens), one.finish || "–", versions(one), { value: [one.end, one.reason].filter(Boolean).join(": "), class: `end ${one.end}` }, clock(one.time_unix_s)];
}

export function samplesView(context, { run, query }) {
  const filters = h("form", { class: "filters", "aria-label": "Filters", onsubmit: (event) => event.preventDefault() });
  const body = h("div", {});
  let all = [];
  const change = (changes) => {
    const next = Object.fromEntries(Object.entries({ ...query, ...changes }).filter(([, value]) => value));
    history.replaceState(null, "", link(run, "samples", "", next));
    query = next;
    draw();
  };
  const task = h("input", { id: "filter-task", type: "search", value: query.task ?? "", oninput: () => change({ task: task.value }) });
  const draw = () => {
    replace(filters, choice("purpose", "Purpose", all.map((one) => one.purpose), query, change), choice("end", "State", all.map((one) => one.end), query, change), choice("finish", "Finish", all.map((one) => one.finish), query, change),
      range("reward", "Reward", query, change), range("tokens", "Tokens", query, change), h("label", {}, "Task contains ", task));
    const found = filtered(all, query);
    replace(body, h("p", {}, `${plural(found.length, "sample")} of the newest ${number(all.length)}${found.length > ROWS_MAX ? `; the first ${ROWS_MAX} are shown` : ""}.`),
      found.length ? table("Newest samples", ["sample", "group", "task", "purpose", "rewards", "tokens", "finish", "steps", "state", "scored"], found.slice(0, ROWS_MAX).map((one) => row(one, run)), { id: "sample-table" }) : h("p", { class: "missing" }, all.length ? "No sample passes the filters." : "No sample was scored yet."));
  };
  const read = async () => {
    const answer = await get(runPath(run, "samples"));
    all = answer.samples;
    draw();
    if (answer.problem) body.prepend(h("p", { class: "notice" }, answer.problem));
  };
  return { title: `${run}: samples`, element: h("section", {}, h("h1", { id: "title", tabindex: "-1" }, "Newest samples"), filters, body), on: { moved: context.onMoved({ list: ["sampled", "updates"] }, { list: read }) }, start: read };
}
