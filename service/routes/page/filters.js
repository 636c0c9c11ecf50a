// Chips for the values of each metadata field that the index can be filtered by.

import { asObject, byId, element } from "./dom.js";

const LABELS = { department: "科室", topic: "主题", year: "年份", source: "来源" };

const box = byId("filters");
const groups = byId("filter-groups");
const clearButton = byId("clear-filters");

const selected = new Map(); // field → values; values keep their type: "1", 1 and true differ
let known = new Map(); // field → values that can be selected
let shown = ""; // the fields and values on the page, as JSON

const labelOf = (field) => (Object.hasOwn(LABELS, field) ? LABELS[field] : field);
const textOf = (value) => (typeof value === "boolean" ? (value ? "是" : "否") : String(value));
const isValue = (value) => ["string", "number", "boolean"].includes(typeof value);

// Returns the filter of a search: selected values by field.
export function selectedFilter() {
  return Object.fromEntries([...selected].map(([field, values]) => [field, [...values]]));
}

// Selects the values of a filter, by field, that the index has.
export function selectFilter(filter) {
  selected.clear();
  for (const [field, values] of Object.entries(filter)) {
    for (const value of Array.isArray(values) ? values : []) {
      if (known.get(field)?.includes(value)) select(field, value);
    }
  }
  paint();
}

// Shows the fields and values of the index; forgets selected ones that it does not have.
export function showFilters(filters) {
  const fields = Object.entries(asObject(filters))
    .map(([field, values]) => [field, (Array.isArray(values) ? values : []).filter(isValue)])
    .filter(([, values]) => values.length > 0);
  known = new Map(fields);
  for (const [field, values] of selected) {
    for (const value of values) if (!known.get(field)?.includes(value)) deselect(field, value);
  }
  const content = JSON.stringify(fields);
  if (content !== shown) groups.replaceChildren(...fields.map(group));
  shown = content;
  box.hidden = fields.length === 0;
  paint();
}

function group([field, values], index) {
  const node = element("div", "filter");
  node.setAttribute("role", "group");
  const label = element("span", "filter-label", labelOf(field));
  label.id = `filter-label-${index}`;
  node.setAttribute("aria-labelledby", label.id);
  const chips = element("div", "chips");
  for (const value of values) {
    const chip = element("button", "chip", textOf(value));
    chip.type = "button";
    chip.dataset.field = field;
    chip.dataset.value = JSON.stringify(value);
    chips.append(chip);
  }
  node.append(label, chips);
  return node;
}

function select(field, value) {
  if (!selected.has(field)) selected.set(field, new Set());
  selected.get(field).add(value);
}

function deselect(field, value) {
  selected.get(field)?.delete(value);
  if (selected.get(field)?.size === 0) selected.delete(field);
}

const isSelected = (field, value) => selected.get(field)?.has(value) === true;

function paint() {
  for (const chip of groups.querySelectorAll("button[data-field]")) {
    const pressed = isSelected(chip.dataset.field, JSON.parse(chip.dataset.value));
    chip.setAttribute("aria-pressed", String(pressed));
  }
  clearButton.hidden = selected.size === 0;
}

// Calls `changed` after each change by the reader.
export function onFiltersChanged(changed) {
  groups.addEventListener("click", (event) => {
    const chip = event.target.closest("button[data-field]");
    if (!chip) return;
    const { field } = chip.dataset;
    const value = JSON.parse(chip.dataset.value);
    if (isSelected(field, value)) deselect(field, value);
    else select(field, value);
    paint();
    changed();
  });
  clearButton.addEventListener("click", () => {
    selected.clear();
    groups.querySelector("button")?.focus();
    paint();
    changed();
  });
}
