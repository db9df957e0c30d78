// Elements whose text is only ever text: nothing a model wrote is parsed as HTML.

const ROUNDING = 1e-6;

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "class") made.className = value;
    else if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else made.setAttribute(name, value === true ? "" : String(value));
  }
  made.append(...children.flat().filter((child) => child !== null && child !== undefined).map(asNode));
  return made;
}

function asNode(child) {
  return child instanceof Node ? child : document.createTextNode(String(child));
}

export function number(value, digits = 4) {
  if (value === null || value === undefined) return "–";
  if (Number.isInteger(value)) return value.toLocaleString("en");
  const size = Math.abs(value);
  return size !== 0 && (size < 1e-3 || size >= 1e6) ? value.toExponential(digits - 1) : String(+value.toPrecision(digits));
}

export function select(label, options, value, changed) {
  const choice = el("select", { onchange: (event) => changed(event.target.value) });
  for (const [key, text] of options) choice.append(el("option", { value: key }, text));
  choice.value = value;
  return el("label", {}, label, choice);
}

export function field(label, type, value, changed, attributes = {}) {
  const input = el("input", { type, value: value ?? "", onchange: (event) => changed(event.target.value), ...attributes });
  return el("label", { class: attributes.wide ? "wide" : null }, label, input);
}

export function colour(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

export function sign(value) {
  return value === null || value === undefined || Math.abs(value) < ROUNDING ? "" : value > 0 ? "good" : "bad";
}
