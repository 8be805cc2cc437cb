// Requests to the gateway, and its stream of events.

export class Failed extends Error {
  constructor(status, message) {
    super(message);
    this.status = status;
  }
}

async function request(path, options = {}) {
  let response;
  try {
    response = await fetch(path, { credentials: "same-origin", ...options });
  } catch {
    throw new Failed(0, "The gateway does not respond.");
  }
  const body = await response.json().catch(() => null);
  if (!response.ok) throw new Failed(response.status, body?.error?.message ?? `The gateway returned status ${response.status}.`);
  return body;
}

export function get(path) {
  return request(path);
}

export function post(path, body = {}) {
  return request(path, { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify(body) });
}

export function runPath(run, ...parts) {
  return ["/api/runs", run, ...parts].map((part, n) => (n ? encodeURIComponent(part) : part)).join("/");
}

// Follow the mesh and a run. `on(name, value)` gets each event, `onState(state)` "live", "waiting" or "refused". Return a function that ends it.
// The browser reconnects a broken stream; one that the gateway refused is opened again with a growing delay.
export function follow(run, on, onState) {
  let source = null;
  let timer = 0;
  let delay = 1000;
  let ended = false;
  const open = () => {
    source = new EventSource(run ? `/api/events?run=${encodeURIComponent(run)}` : "/api/events");
    source.onopen = () => {
      delay = 1000;
      onState("live");
    };
    for (const name of ["mesh", "run", "moved"]) source.addEventListener(name, (event) => on(name, JSON.parse(event.data)));
    source.onerror = () => {
      if (ended) return;
      onState(source.readyState === EventSource.CLOSED ? "refused" : "waiting");
      if (source.readyState !== EventSource.CLOSED) return;
      timer = setTimeout(open, delay);
      delay = Math.min(delay * 2, 15000);
    };
  };
  open();
  return () => {
    ended = true;
    clearTimeout(timer);
    source.close();
  };
}
