// The verdict of the audit: a line for the view of a run, and a view with the claims and findings.
import { get, post, runPath } from "./api.js";
import { h, replace, table } from "./dom.js";
import { clock, duration, number, plural } from "./format.js";
import { link } from "./route.js";

const CLAIMS = [
  ["chain", "No record was removed, inserted or changed up to the newest stored head."],
  ["ledger", "Records can be read, and none contradicts earlier ones."],
  ["conservation", "reserved = live + the sum of all ends, counted twice."],
  ["once", "No sample is used by two updates of one history."],
  ["bound", "No sample is trained beyond the staleness bound."],
  ["digest", "The digest of each update is that of its samples."],
  ["checkpoint", "The newest checkpoint contains the samples of the ledger."],
];

function status(verdict) {
  if (verdict.report) return verdict.report.holds ? ["holds", "Every claim holds"] : ["broken", `${plural(verdict.report.num_findings, "finding")}: claims are broken`];
  if (verdict.state === "running" || verdict.state === "waiting") return ["unknown", "The audit is running"];
  return ["unknown", verdict.cause || "Not audited yet"];
}

// Return the verdict as one line with a link to the view.
export function verdictLine(verdict, run) {
  const [cls, text] = status(verdict);
  const when = verdict.report ? ` over ${plural(verdict.report.num_records, "ledger record")}, ${clock(verdict.finished_unix_s)}` : "";
  return h("p", { class: `verdict ${cls}`, role: "status" }, h("b", {}, "Audit: "), text, when, ". ", h("a", { href: link(run, "audit"), id: "verdict-link" }, "Claims"));
}

function claims(report) {
  const broken = new Set(report.findings.map((one) => one.check));
  const said = (check) => {
    if (broken.has(check)) return { value: "BROKEN", class: "state broken" };
    if (check === "checkpoint" && !report.checkpoint) return "not compared: this gateway has no checkpoint of the run";
    if (check === "chain") return `holds; compared with ${plural(report.heads.length, "stored head")}`;
    return { value: "holds", class: "state ready" };
  };
  return table("Claims of the audit", ["claim", "meaning", "result"], CLAIMS.map(([check, meaning]) => [check, meaning, said(check)]), { id: "claims" });
}

export function auditView(context, { run }) {
  const body = h("div", {});
  const draw = async () => {
    const verdict = await get(runPath(run, "audit"));
    const [cls, text] = status(verdict);
    const report = verdict.report;
    const busy = verdict.state === "running" || verdict.state === "waiting";
    const wait = verdict.next_in_s > 0;
    replace(body, h("p", { class: `verdict ${cls}`, role: "status" }, h("b", {}, text), report ? ` (${clock(verdict.finished_unix_s)})` : ""),
      verdict.state === "failed" ? h("p", { class: "notice", role: "alert" }, `The newest audit failed: ${verdict.cause}`) : null,
      h("p", {}, h("button", { type: "button", id: "audit-now", "aria-disabled": busy || wait ? "true" : "false", onclick: async () => { await post(runPath(run, "audit")); await draw(); } }, busy ? "Audit is running …" : "Audit now"),
        wait && !busy ? h("small", {}, ` A new audit can start in ${duration(verdict.next_in_s)}.`) : ""),
      report ? [claims(report),
        report.findings.length ? table("Findings", ["record", "claim", "finding", "remedy"], report.findings.slice(0, 100).map((one) => [number(one.position), one.check, one.message, one.remedy]), { id: "findings" }) : null,
        report.warnings.length ? table("Warnings", ["record", "warning"], report.warnings.slice(0, 100).map((one) => [number(one.position), one.message]), { id: "warnings" }) : null,
        report.changes.length ? table("Changed settings", ["record", "key", "before", "after"], report.changes.map((one) => [number(one.position), one.key, one.old, one.new]), { id: "changes", shown: true }) : null,
        h("p", {}, `${plural(report.num_records, "record")}, ${plural(report.updates, "update")}, ${report.updates_undone} undone, largest staleness ${report.lag_max < 0 ? "–" : report.lag_max} of ${report.eta}.`),
        h("p", {}, "Head: ", h("code", {}, report.head))] : null,
      h("p", { class: "note" }, "The same as ", h("code", {}, "rollmesh audit"), ", in a separate process beside the gateway. Payloads are compared by ", h("code", {}, "rollmesh audit RUN --payloads"), "."));
  };
  return { title: `${run}: audit`, element: h("section", {}, h("h1", { id: "title", tabindex: "-1" }, "Audit"), body), on: { moved: context.onMoved({ audit: ["audit"] }, { audit: draw }) }, start: draw };
}
