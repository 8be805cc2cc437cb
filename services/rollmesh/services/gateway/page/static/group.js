// The view of a group: its members side by side, with rewards and tokens colored by version.
import { get, runPath } from "./api.js";
import { h, replace } from "./dom.js";
import { number, plural } from "./format.js";
import { link } from "./route.js";
import { transcriptOf } from "./sample.js";

const MEMBERS_MAX = 16;

function member(sample, run) {
  const rewards = sample.rewards.filter((one) => one.segment < 0).map((one) => `${one.name} ${one.outcome === "ok" ? number(one.value) : one.outcome.replaceAll("_", " ")}`).join(", ");
  return h("section", { class: "member", "aria-label": sample.sample_id }, h("h2", {}, h("a", { href: link(run, "sample", sample.sample_id) }, sample.sample_id)),
    h("p", {}, `${rewards || "no reward"}; ${plural(sample.num_tokens, "token")}${sample.advantage !== null ? `; advantage ${number(sample.advantage)}` : ""}`),
    sample.runs.length ? transcriptOf(sample, "version", `transcript-${sample.sample_id}`) : sample.missing.map((text) => h("p", { class: "missing" }, text)));
}

export function groupView(context, { run, id }) {
  const head = h("div", {});
  const body = h("div", { class: "members", id: "members" });
  const read = async () => {
    const { samples } = await get(runPath(run, "samples"));
    const members = samples.filter((one) => one.group === id).map((one) => one.sample_id).sort();
    const shown = await Promise.all(members.slice(0, MEMBERS_MAX).map((name) => get(runPath(run, "samples", name))));
    replace(head, h("p", {}, members.length ? `Task ${shown[0].task}, ${plural(members.length, "member")}${members.length > MEMBERS_MAX ? `; the first ${MEMBERS_MAX} are shown` : ""}.` : "None of the newest samples is of this group."));
    replace(body, shown.map((sample) => member(sample, run)));
  };
  return { title: `${run}: group ${id}`, element: h("section", {}, h("h1", { id: "title", tabindex: "-1" }, `Group ${id}`), head, body), on: {}, start: read };
}
