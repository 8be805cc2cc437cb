// The view of all runs of the mesh.
import { h, replace, table } from "./dom.js";
import { plural } from "./format.js";
import { link } from "./route.js";

export function runsView(context) {
  const body = h("div", {});
  const draw = () => {
    const mesh = context.mesh;
    if (!mesh) return replace(body, h("p", { class: "missing" }, "Reading the runs …"));
    const rows = mesh.runs.map((run) => [h("a", { href: link(run.run), id: `run-${run.run}` }, run.run), { value: run.ended ? `ended: ${run.ended}` : "running", class: run.ended ? "" : "state ready" }]);
    return replace(body, mesh.error ? h("p", { class: "notice", role: "alert" }, mesh.error) : null,
      rows.length ? table("Runs", ["run", "state"], rows, { id: "run-table" }) : h("p", { class: "missing" }, "This mesh has no run. A trainer creates one with CreateRun."),
      h("p", {}, h("a", { href: "#/nodes", id: "to-nodes" }, plural(mesh.nodes.length, "node"))));
  };
  return { title: "Runs", element: h("section", {}, h("h1", { id: "title", tabindex: "-1" }, "Runs"), body), on: { mesh: draw }, start: draw };
}
