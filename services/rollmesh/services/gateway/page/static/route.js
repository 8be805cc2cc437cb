// The address of a view: the part of the URL after "#". Pure functions.
//   #/  #/nodes  #/run/NAME  #/run/NAME/samples?purpose=eval  #/run/NAME/sample/ID?color=version  #/run/NAME/group/ID  #/run/NAME/audit

const VIEWS = ["", "samples", "sample", "group", "audit"];

// Return {view, run, id, query} of a hash; an unknown address is the list of runs.
export function parse(hash) {
  const [path, search = ""] = hash.replace(/^#/, "").split("?", 2);
  const query = Object.fromEntries(new URLSearchParams(search));
  const parts = path.split("/").filter(Boolean).map(decoded);
  if (parts[0] === "nodes") return { view: "nodes", run: "", id: "", query };
  if (parts[0] === "run" && parts[1] && VIEWS.includes(parts[2] ?? "")) {
    return { view: parts[2] || "run", run: parts[1], id: parts.slice(3).join("/"), query };
  }
  return { view: "runs", run: "", id: "", query };
}

// Return the hash of a view of a run.
export function link(run, view = "", id = "", query = {}) {
  const search = new URLSearchParams(query).toString();
  const parts = ["run", run, view, id].filter(Boolean).map(encodeURIComponent);
  return `#/${parts.join("/")}${search ? `?${search}` : ""}`;
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}
