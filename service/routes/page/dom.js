// Helpers for building the page. All data reaches it through textContent, never as markup.

export const byId = (id) => document.getElementById(id);

export function element(tag, className, text) {
  const node = document.createElement(tag);
  if (className) node.className = className;
  if (text !== undefined) node.textContent = text;
  return node;
}

export function button(className, text, clicked) {
  const node = element("button", className, text);
  node.type = "button";
  node.addEventListener("click", clicked);
  return node;
}

export const isNumber = (value) => typeof value === "number" && Number.isFinite(value);
export const asText = (value) =>
  typeof value === "string" ? value.trim() : isNumber(value) ? String(value) : "";
export const asArray = (value) => (Array.isArray(value) ? value : []);
export const asList = (value) => (Array.isArray(value) ? value : [value]).map(asText).filter(Boolean);
export const asObject = (value) =>
  value !== null && typeof value === "object" && !Array.isArray(value) ? value : {};

export function milliseconds(value) {
  if (value > 0 && value < 0.05) return "<0.1";
  return value < 100 ? value.toFixed(1) : String(Math.round(value));
}

// What the reader prefers, kept on this device: the language and the developer switch, never a query.
export function preference(name) {
  try {
    return localStorage.getItem(name);
  } catch {
    return null; // storage is blocked
  }
}

export function prefer(name, value) {
  try {
    localStorage.setItem(name, value);
  } catch {
    // It then lasts until the page is closed.
  }
}
