// The view of the mesh: its nodes with their versions and load, and what they wait for.
import { h, replace, svg, table } from "./dom.js";
import { duration, number, plural, version, word } from "./format.js";

const ORDER = ["INFERENCE", "ENDPOINT", "ROLLOUT", "SANDBOX", "REWARD", "DATA", "DEPOT", "GATEWAY", "LEARNER"];
const CLOCK_AHEAD_S_MAX = 60;
const LOADED = ["inference", "rollout", "sandbox", "endpoint"];

// Return the bar of a node's load: running work of its capacity, and waiting work beside it.
function load(node, kind) {
  if (!LOADED.includes(kind)) return "–";
  const share = node.capacity ? Math.min(1, node.num_running / node.capacity) : 0;
  const text = `${number(node.num_running)} of ${number(node.capacity)}${node.num_waiting ? `, ${number(node.num_waiting)} waiting` : ""}`;
  return h("span", { class: "load" },
    svg("svg", { viewBox: "0 0 60 8", width: 60, height: 8, "aria-hidden": "true" }, svg("rect", { class: "track", width: 60, height: 8, rx: 2 }),
      svg("rect", { class: share >= 1 ? "full" : "part", width: (60 * share).toFixed(1), height: 8, rx: 2 })), text);
}

function weights(node) {
  if (!node.active) return "–";
  const more = [node.prepared && node.prepared.step !== node.active.step ? `prepared ${version(node.prepared)}` : "",
    node.held?.length ? `also ${node.held.map(version).join(", ")}` : ""].filter(Boolean).join("; ");
  return more ? h("span", {}, version(node.active), h("small", {}, ` ${more}`)) : version(node.active);
}

// Return how wrong the clock of a node's host is, beyond the difference that the coordinator reports.
function clockWarning(node) {
  const ahead = node.clock_ahead_s ?? 0;
  return Math.abs(ahead) > CLOCK_AHEAD_S_MAX ? `the clock of its host is ${duration(Math.abs(ahead))} ${ahead > 0 ? "ahead of" : "behind"} the coordinator's` : "";
}

export function nodeTable(nodes) {
  const sorted = [...nodes].sort((a, b) => ORDER.indexOf(word(a.kind, "NODE_KIND_").toUpperCase()) - ORDER.indexOf(word(b.kind, "NODE_KIND_").toUpperCase()) || a.node_id.localeCompare(b.node_id));
  const rows = sorted.map((node) => {
    const kind = word(node.kind, "NODE_KIND_");
    const state = word(node.state, "NODE_STATE_");
    return [node.node_id, kind, { value: state, class: `state ${state}` }, weights(node), load(node, kind), duration(node.silent_s),
      node.process?.version || "–", node.process?.host || "–", [node.cause || node.waiting_for, clockWarning(node)].filter(Boolean).join("; ") || "–"];
  });
  return table("Nodes", ["node", "kind", "state", "weights", "load", "last message", "build", "host", "waits for, or cause"], rows, { id: "node-table", shown: true });
}

export function nodesView(context) {
  const body = h("div", {});
  const draw = () => {
    const mesh = context.mesh;
    if (!mesh) return replace(body, h("p", { class: "missing" }, "Reading the nodes …"));
    const states = {};
    for (const node of mesh.nodes) states[word(node.state, "NODE_STATE_")] = (states[word(node.state, "NODE_STATE_")] || 0) + 1;
    const summary = `${plural(mesh.nodes.length, "node")}: ${Object.entries(states).map(([name, num]) => `${num} ${name}`).join(", ")}.`;
    return replace(body, mesh.error ? h("p", { class: "notice", role: "alert" }, mesh.error) : h("p", {}, summary),
      mesh.nodes.length ? nodeTable(mesh.nodes) : null,
      h("p", { class: "note" }, "A node without heartbeat is suspect, then dead. A stale node lacks weights that the next update may use. ", h("code", {}, "rollmesh drain NODE"), " removes a node."));
  };
  return { title: "Nodes", element: h("section", {}, h("h1", { id: "title", tabindex: "-1" }, "Nodes"), body), on: { mesh: draw }, start: draw };
}
