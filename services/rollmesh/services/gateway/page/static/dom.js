// Elements from data. Text is inserted as text nodes only, so texts of tasks and models are never interpreted as markup.

const SVG = "http://www.w3.org/2000/svg";

function build(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (value === undefined || value === null || value === false) continue;
    if (name.startsWith("on")) element.addEventListener(name.slice(2), value);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

// Return an HTML element. Attributes whose name begins with "on" are listeners; null and false are omitted.
export function h(tag, attributes, ...children) {
  return build(document.createElement(tag), attributes, children);
}

// Return an SVG element.
export function svg(tag, attributes, ...children) {
  return build(document.createElementNS(SVG, tag), attributes, children);
}

// Replace the content of a panel. The focus returns to the element with the same id, and an open <details> stays open.
export function replace(panel, ...children) {
  const focused = panel.contains(document.activeElement) ? document.activeElement.id : "";
  const open = new Set([...panel.querySelectorAll("details[open]")].map((one) => one.id));
  panel.replaceChildren(...children.flat(Infinity).filter(Boolean));
  for (const one of panel.querySelectorAll("details")) if (open.has(one.id)) one.open = true;
  if (focused) document.getElementById(focused)?.focus({ preventScroll: true });
}

// Return a table with a caption. A cell is text, an element, or {value, class}.
export function table(caption, head, rows, attributes = {}) {
  const cell = (tag, given, scope) => {
    const rich = given !== null && typeof given === "object" && !(given instanceof Node);
    return h(tag, { scope, class: rich ? given.class : undefined }, rich ? given.value : given);
  };
  return h("div", { class: "scroll", tabindex: "0", role: "region", "aria-label": caption, id: attributes.id },
    h("table", {}, h("caption", { class: attributes.shown ? undefined : "hidden" }, caption),
      h("thead", {}, h("tr", {}, head.map((name) => cell("th", name, "col")))),
      h("tbody", {}, rows.map((row) => h("tr", {}, row.map((one, index) => (index ? cell("td", one) : cell("th", one, "row"))))))));
}
