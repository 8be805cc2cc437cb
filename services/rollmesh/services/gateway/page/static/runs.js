// The view of all runs of the mesh.
import { h, replace, table } from "./dom.js";
import { duration, number, plural } from "./format.js";
import { link } from "./route.js";

function rewards(progress) {
  const found = Object.entries(progress.rewards).map(([name, value]) => `${name} ${number(value)}`).join(", ");
  return found ? `${found} (${progress.evaluated ? "held out" : "training"})` : "–";
}

export function runsView(context) {
  const body = h("div", {});
  const draw = () => {
    const mesh = context.mesh;
    if (!mesh) return replace(body, h("p", { class: "missing" }, "Reading the runs …"));
    const rows = mesh.runs.map(({ run, ended, progress }) => [h("a", { href: link(run), id: `run-${run}` }, run), { value: ended ? `ended: ${ended}` : "running", class: ended ? "" : "state ready" },
      progress ? number(progress.update) : "–", progress ? rewards(progress) : "–", progress ? duration(progress.seconds) : "–"]);
    return replace(body, mesh.error ? h("p", { class: "notice", role: "alert" }, mesh.error) : null,
      rows.length ? table("Runs", ["run", "state", "update", "mean reward", "running time"], rows, { id: "run-table" }) : h("p", { class: "missing" }, "This mesh has no run. A trainer creates one with CreateRun."),
      h("p", {}, h("a", { href: "#/nodes", id: "to-nodes" }, plural(mesh.nodes.length, "node"))));
  };
  return { title: "Runs", element: h("section", {}, h("h1", { id: "title", tabindex: "-1" }, "Runs"), body), on: { mesh: draw }, start: draw };
}
