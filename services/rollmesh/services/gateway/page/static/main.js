// The page: chooses the view of the address, follows the events of the mesh, and logs in.
import { Failed, follow, get, post } from "./api.js";
import { auditView } from "./audit.js";
import { h, replace } from "./dom.js";
import { groupView } from "./group.js";
import { nodesView } from "./nodes.js";
import { link, parse } from "./route.js";
import { runView } from "./run.js";
import { runsView } from "./runs.js";
import { sampleView } from "./sample.js";
import { samplesView } from "./samples.js";

const VIEWS = { runs: runsView, nodes: nodesView, run: runView, samples: samplesView, sample: sampleView, group: groupView, audit: auditView };
const THEMES = ["system", "light", "dark"];
const content = document.getElementById("content");
const connection = document.getElementById("connection");

let view = null; // the current view
let route = null;
let stream = { run: null, end: () => {} };
let context = null;
let shownOnce = false;

// Values of the newest events, and a helper that reads again only what has moved.
function newContext() {
  return {
    mesh: context?.mesh ?? null,
    run: null,
    onMoved(kinds, reads) {
      let before = null;
      const busy = {};
      const again = {};
      const read = async (kind) => {
        if (busy[kind]) {
          again[kind] = true;
          return;
        }
        busy[kind] = true;
        try {
          await guarded(reads[kind]);
        } finally {
          busy[kind] = false;
        }
        if (again[kind]) {
          again[kind] = false;
          await read(kind);
        }
      };
      return (moved) => {
        const changed = before ? Object.keys(kinds).filter((kind) => kinds[kind].some((name) => moved[name] !== before[name])) : [];
        before = moved;
        for (const kind of changed) read(kind);
      };
    },
  };
}

async function guarded(call) {
  try {
    await call();
  } catch (error) {
    if (!(error instanceof Failed)) throw error;
    if (error.status === 401) showLogin(error.message);
    else showProblem(error.message);
  }
}

function showProblem(text) {
  content.querySelector(".problem")?.remove();
  content.append(h("p", { class: "notice problem", role: "alert" }, text));
}

function drawNavigation() {
  const run = route.run;
  const entry = (href, text, current) => h("a", { href, "aria-current": current ? "page" : undefined, id: `nav-${text.toLowerCase().replaceAll(" ", "-")}` }, text);
  replace(document.getElementById("views"), entry("#/", "Runs", route.view === "runs"), entry("#/nodes", "Nodes", route.view === "nodes"),
    run ? [h("span", { class: "crumb", "aria-hidden": "true" }, run), entry(link(run), "Run", route.view === "run"), entry(link(run, "samples"), "Samples", ["samples", "sample", "group"].includes(route.view)), entry(link(run, "audit"), "Audit", route.view === "audit")] : null);
}

// A page in the background has no stream: browsers open few connections to one gateway, and the gateway has a limit of pages.
function listen(run) {
  if (document.hidden) return pause();
  if (stream.run === run) return;
  stream.end();
  stream = { run, end: follow(run, onEvent, onConnection) };
}

function pause() {
  stream.end();
  stream = { run: null, end: () => {} };
  connection.className = "";
  connection.textContent = "paused";
}

function onEvent(name, value) {
  if (name !== "moved") context[name] = value;
  view?.on[name]?.(value);
}

async function onConnection(state) {
  connection.className = state;
  connection.textContent = { live: "live", waiting: "reconnecting …", refused: "reconnecting …" }[state];
  if (state === "refused") await guarded(() => get(route.run ? `/api/runs/${encodeURIComponent(route.run)}` : "/api/mesh"));
  if (state === "live" && view?.lost) {
    view.lost = false;
    content.querySelector(".problem")?.remove();
    await guarded(view.start);
  } else if (state !== "live" && view) view.lost = true;
}

async function show() {
  route = parse(location.hash);
  if (!context || stream.run !== route.run) context = newContext();
  drawNavigation();
  view = VIEWS[route.view](context, route);
  document.title = `${view.title} · rollmesh`;
  content.replaceChildren(view.element);
  if (shownOnce) document.getElementById("title")?.focus({ preventScroll: true });
  shownOnce = true;
  window.scrollTo(0, 0);
  document.getElementById("logout").hidden = false;
  listen(route.run);
  if (context.run) view.on.run?.(context.run);
  await guarded(view.start);
}

function showLogin(message) {
  stream.end();
  stream = { run: null, end: () => {} };
  view = null;
  context = null;
  connection.textContent = "";
  document.getElementById("logout").hidden = true;
  replace(document.getElementById("views"));
  const field = h("input", { type: "password", id: "token", autocomplete: "current-password", required: true, "aria-describedby": "login-help" });
  const problem = h("p", { class: "notice", role: "alert", hidden: !message }, message);
  content.replaceChildren(h("form", {
    class: "login", onsubmit: async (event) => {
      event.preventDefault();
      try {
        await post("/api/login", { token: field.value });
        await show();
      } catch (error) {
        if (!(error instanceof Failed)) throw error;
        problem.textContent = error.message;
        problem.hidden = false;
        field.select();
      }
    },
  }, h("h1", {}, "Log in"), problem, h("label", { for: "token" }, "Token of the mesh"), field, h("button", { type: "submit", id: "login" }, "Log in"),
  h("p", { class: "note", id: "login-help" }, "The token is in the file ", h("code", {}, "token"), " of the run folder, or in the file that ", h("code", {}, "security.token_file"), " names. On the host of the run, ", h("code", {}, "rollmesh page RUN"), " prints a link that logs in.")));
  field.focus();
}

function setTheme(name) {
  if (name === "system") document.documentElement.removeAttribute("data-theme");
  else document.documentElement.setAttribute("data-theme", name);
  document.getElementById("theme").textContent = `Theme: ${name}`;
  localStorage.setItem("theme", name);
}

async function begin() {
  const theme = document.getElementById("theme");
  setTheme(THEMES.includes(localStorage.getItem("theme")) ? localStorage.getItem("theme") : "system");
  theme.addEventListener("click", () => setTheme(THEMES[(THEMES.indexOf(localStorage.getItem("theme")) + 1) % THEMES.length]));
  document.getElementById("logout").addEventListener("click", () => guarded(async () => {
    await post("/api/logout");
    showLogin("");
  }));
  document.getElementById("skip").addEventListener("click", (event) => {
    event.preventDefault();
    content.focus();
  });
  window.addEventListener("hashchange", show);
  document.addEventListener("visibilitychange", () => view && listen(route.run));
  const ticket = new URLSearchParams(location.search).get("login");
  if (ticket) {
    history.replaceState(null, "", `/${location.hash}`);
    try {
      await post("/api/login", { ticket });
    } catch (error) {
      if (!(error instanceof Failed)) throw error;
      // A link that was used before is fine in a browser that is logged in.
      if (await get("/api/mesh").then(() => false, () => true)) return showLogin(error.message);
    }
  } else if (await get("/api/mesh").then(() => false, (error) => error.status === 401)) return showLogin("");
  return show();
}

begin();
