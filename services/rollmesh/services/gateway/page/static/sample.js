// The view of one sample: its tokens in color, rewards, advantage and history.
import { get, runPath } from "./api.js";
import { h, replace, table } from "./dom.js";
import { clock, number, plural } from "./format.js";
import { link } from "./route.js";
import { COLORS, classOf, legendOf, titleOf, versionsOf } from "./tokens.js";

function tokenText(text) {
  return text.replaceAll("\n", "↵\n").replaceAll("\t", "⇥\t");
}

// Return the tokens of a sample, colored. `id` is that of the element.
export function transcriptOf(sample, color, id) {
  const versions = versionsOf(sample.runs);
  return h("div", { class: "transcript", tabindex: "0", role: "region", "aria-label": `Tokens of ${sample.sample_id}`, id }, sample.runs.map((one) => {
    const facts = [one.role, one.source !== one.role ? one.source : "", plural(one.ids.length, "token"), one.step !== null && one.step !== undefined ? `step ${one.step}${one.incarnation ? `.${one.incarnation}` : ""}` : "", one.finish,
      one.reward !== null && one.reward !== undefined ? `reward ${number(one.reward)}` : ""].filter(Boolean).join(" · ");
    return h("div", { class: `segment ${one.role}` }, h("h3", {}, facts), h("p", { class: "tokens" }, one.tokens.map((text, n) => {
      const shown = text === "" && one.ids.length ? "" : tokenText(text);
      return shown === "" ? null : h("span", { class: `token ${classOf(one, n, color, sample, versions)}`, title: titleOf(one, n) }, shown);
    })));
  }));
}

function facts(sample, run) {
  const labels = Object.entries(sample.labels).map(([name, value]) => `${name} ${value}`).join(", ");
  const index = sample.siblings.indexOf(sample.sample_id);
  const other = (at, text, id) => (sample.siblings[at] ? h("a", { href: link(run, "sample", sample.siblings[at]), id }, text) : null);
  return [h("p", {}, `Task ${sample.task}${labels ? ` (${labels})` : ""}, group ${sample.group}${sample.variant ? `, variant ${sample.variant}` : ""}, ${plural(sample.num_tokens, "token")}${sample.attempt > 1 ? `, attempt ${sample.attempt}` : ""}. `,
    sample.siblings.length > 1 ? `Member ${index + 1} of ${sample.siblings.length} of its group: ` : "", sample.siblings.length > 1 ? h("a", { href: link(run, "group", sample.group), id: "side-by-side" }, "side by side") : null, " ", other(index - 1, "previous", "previous"), " ", other(index + 1, "next", "next")),
    sample.missing.map((text) => h("p", { class: "missing" }, text)),
    sample.advantage !== null ? h("p", {}, "Advantage ", h("b", {}, number(sample.advantage)), ` (${sample.advantage_of})`) : null];
}

function details(sample) {
  const rewards = sample.rewards.map((one) => [one.name, one.outcome === "ok" ? number(one.value) : one.outcome.replaceAll("_", " "), one.segment < 0 ? "sample" : `segment ${one.segment}`, one.scorer, one.answer, one.evidence]);
  return [rewards.length ? table("Rewards", ["reward", "value", "of", "scorer", "answer", "evidence"], rewards, { id: "rewards", shown: true }) : h("p", { class: "missing" }, "The sample has no reward."),
    sample.messages.length ? h("details", { id: "messages" }, h("summary", { id: "messages-summary" }, `Conversation as text, ${plural(sample.messages.length, "message")}`), sample.messages.map((one) => h("div", { class: "message" }, h("h3", {}, one.role), h("pre", {}, one.content)))) : null,
    sample.history.length ? table("History in the ledger", ["record", "time", "event"], sample.history.map((one) => [number(one.position), clock(one.time_unix_s), one.what]), { id: "history", shown: true }) : null];
}

export function sampleView(context, { run, id, query }) {
  const head = h("div", {});
  const body = h("div", {});
  let color = COLORS.includes(query.color) ? query.color : "version";
  let sample = null;
  const draw = () => {
    const options = h("fieldset", { class: "filters" }, h("legend", {}, "Color tokens by"), COLORS.map((name) => h("label", {}, h("input", { type: "radio", name: "color", value: name, id: `color-${name}`, checked: name === color, onchange: () => choose(name) }), ` ${name}`)));
    const legend = h("p", { class: "legend" }, legendOf(sample, color, versionsOf(sample.runs)).map(([cls, text]) => h("span", {}, h("i", { class: `key token ${cls}` }), text)));
    replace(head, facts(sample, run));
    replace(body, sample.runs.length ? [options, legend, transcriptOf(sample, color, "transcript")] : null, details(sample));
  };
  const choose = (name) => {
    color = name;
    history.replaceState(null, "", link(run, "sample", id, { color }));
    draw();
  };
  const read = async () => {
    sample = await get(runPath(run, "samples", id));
    draw();
  };
  return { title: `${run}: ${id}`, element: h("section", {}, h("h1", { id: "title", tabindex: "-1" }, id), head, body), on: {}, start: read };
}
