// Filters for the metadata fields of the index: values to choose, ranges of numbers and dates, switches.

import { asArray, asObject, byId, element, isNumber } from "./dom.js";
import { isWide } from "./dialogs.js";
import { CHINESE, hasWords, onLanguageChanged, t } from "./language.js";

const LISTED = 100; // the service lists at most so many values of a field
const MANY = 12; // values from which on a field has a box to find one
const LONG = 40; // characters of values that nobody chooses from a list
const DATE = /^\d{4}-\d{2}-\d{2}$/;
const ADDRESS = /^https?:\/\//i;
const IDENTIFIER = /^(?=.*\d)[\x21-\x7e]{5,}$/;

// The order of kinds; fields of one kind stay in the order of their names.
const KINDS = ["choices", "range", "dates", "switch"];

const box = byId("filters");
const groups = byId("filter-groups");
const clearButton = byId("clear-filters");
const openButton = byId("open-filters");

// field → what is chosen: a Set of values, which keep their type ("1", 1 and true differ), or the
// bounds { from, to } of a range, null where it is open
const chosen = new Map();
let known = new Map(); // field → { kind, values }
let numbers = new Map(); // of the documents or passages with a value, by field and value
let shown = ""; // the fields and values on the page, as JSON

const labelOf = (field) => (hasWords(`field.${field}`) ? t(`field.${field}`) : field);
const textOf = (value) => (typeof value === "boolean" ? t(value ? "yes" : "no") : String(value));
const isValue = (value) => ["string", "number", "boolean"].includes(typeof value);
const isSwitch = (value) => typeof value === "boolean";

// Returns how a field with these values can be filtered; null if it need not be: all documents have
// one value, nearly each has its own, or the values are addresses, identifiers or long texts.
function kindOf(values, count) {
  if (values.every(isSwitch)) return values.includes(true) ? "switch" : null;
  if (values.length < 2) return null;
  if (values.every(isNumber)) return "range";
  const texts = values.filter((value) => typeof value === "string");
  const most = (test) => texts.length > 0 && texts.filter(test).length > 0.8 * texts.length;
  if (values.length < LISTED && texts.length === values.length && most((text) => DATE.test(text))) {
    return "dates";
  }
  if (most((text) => ADDRESS.test(text)) || most((text) => text.length > LONG)) return null;
  const isUnique = values.length > 20 && values.length > count / 2;
  const areMany = values.length >= LISTED && most((text) => IDENTIFIER.test(text));
  return isUnique || areMany ? null : "choices";
}

// Returns the filter of a search, by field.
export function selectedFilter() {
  return Object.fromEntries(
    [...chosen].map(([field, what]) => {
      if (what instanceof Set) return [field, [...what]];
      const { kind, values } = known.get(field);
      const { from, to } = what;
      if (kind === "range") {
        return [field, { ...(from === null ? {} : { gte: from }), ...(to === null ? {} : { lte: to }) }];
      }
      const within = values.filter((day) => (from ?? day) <= day && day <= (to ?? day));
      return [field, within.length > 0 ? within : [""]]; // a value that no document has
    }),
  );
}

// Selects what the index has of a filter.
export function selectFilter(filter) {
  chosen.clear();
  for (const [field, wanted] of Object.entries(asObject(filter))) {
    const { kind, values } = known.get(field) ?? {};
    if (kind === "range") {
      const { gte, lte } = asObject(wanted);
      choose(field, { from: isNumber(gte) ? gte : null, to: isNumber(lte) ? lte : null });
    } else if (kind) {
      const found = asArray(wanted).filter((value) => values.includes(value));
      const days = found.toSorted();
      if (kind === "dates") choose(field, { from: days[0] ?? null, to: days.at(-1) ?? null });
      else choose(field, new Set(found));
    }
  }
  paint();
}

function choose(field, what) {
  const isEmpty = what instanceof Set ? what.size === 0 : what.from === null && what.to === null;
  if (isEmpty) chosen.delete(field);
  else chosen.set(field, what);
}

// Shows the fields of an index of `count` documents, with the number of each value's if they are known;
// forgets what it does not have.
export function showFilters(filters, count, counts) {
  numbers = new Map();
  for (const [field, listed] of Object.entries(asObject(filters))) {
    const ofField = asArray(asObject(counts)[field]);
    asArray(listed).forEach((value, at) => numbers.set(JSON.stringify([field, value]), ofField[at]));
  }
  const natural = new Intl.Collator(CHINESE, { numeric: true });
  const compare = (a, b) => (isNumber(a) && isNumber(b) ? a - b : natural.compare(textOf(a), textOf(b)));
  const fields = Object.entries(asObject(filters)).flatMap(([field, listed]) => {
    const values = asArray(listed).filter(isValue).toSorted(compare);
    const kind = values.length > 0 ? kindOf(values, count) : null;
    return kind ? [[field, { kind, values }]] : [];
  });
  fields.sort(([, a], [, b]) => KINDS.indexOf(a.kind) - KINDS.indexOf(b.kind));
  known = new Map(fields);
  for (const [field, what] of [...chosen]) {
    const { kind, values } = known.get(field) ?? {};
    const isRange = kind === "range" || kind === "dates";
    chosen.delete(field);
    if (what instanceof Set && kind && !isRange) {
      choose(field, new Set([...what].filter((value) => values.includes(value))));
    } else if (!(what instanceof Set) && isRange) choose(field, what);
  }
  const content = JSON.stringify([fields, [...numbers]]);
  if (content !== shown) draw();
  shown = content;
  box.hidden = fields.length === 0;
  paint();
}

function draw() {
  groups.replaceChildren(...[...known].map(([field, { kind, values }], at) => group(field, kind, values, at)));
}

function group(field, kind, values, at) {
  if (kind === "switch") return switchOf(field);
  const node = element("details", "filter");
  node.dataset.field = field;
  node.open = at === 0 && isWide() && kind === "choices" && values.length <= MANY;
  const label = element("summary");
  label.append(element("span", "filter-label", labelOf(field)), element("span", "filter-count"));
  node.append(label, kind === "choices" ? choices(field, values) : range(field, kind, values));
  return node;
}

function switchOf(field) {
  const node = element("label", "switch filter");
  const input = element("input");
  input.type = "checkbox";
  input.setAttribute("role", "switch");
  input.dataset.field = field;
  input.dataset.value = "true";
  node.append(input, element("span", "", labelOf(field)));
  return node;
}

function choices(field, values) {
  const node = element("fieldset", "choices");
  node.append(element("legend", "visually-hidden", labelOf(field)));
  if (values.length > MANY) {
    const finder = element("input", "find");
    finder.type = "search";
    finder.autocomplete = "off";
    finder.placeholder = t("filters.find");
    finder.setAttribute("aria-label", `${labelOf(field)}${t("label.colon")}${t("filters.find")}`);
    finder.addEventListener("input", () => {
      const wanted = finder.value.trim().toLowerCase();
      for (const choice of node.querySelectorAll(".choice")) {
        choice.hidden = !choice.querySelector("span").textContent.toLowerCase().includes(wanted);
      }
    });
    node.append(finder);
  }
  const list = element("div", "choice-list");
  for (const value of values) {
    const choice = element("label", "choice");
    const input = element("input");
    input.type = "checkbox";
    input.dataset.field = field;
    input.dataset.value = JSON.stringify(value);
    choice.append(input, element("span", "", textOf(value)));
    const number = numbers.get(JSON.stringify([field, value]));
    if (isNumber(number)) {
      const count = element("span", "choice-count", String(number));
      count.setAttribute("aria-hidden", "true"); // no part of the name of the choice
      choice.append(count);
    }
    list.append(choice);
  }
  node.append(list);
  return node;
}

function range(field, kind, values) {
  const node = element("fieldset", "range");
  node.append(element("legend", "visually-hidden", labelOf(field)));
  for (const [bound, value] of [["from", values[0]], ["to", values.at(-1)]]) {
    const label = element("label", "", `${t(`filters.${bound}`)} `);
    const input = element("input");
    input.type = kind === "dates" ? "date" : "number";
    input.dataset.field = field;
    input.dataset.bound = bound;
    if (kind === "dates") {
      input.min = values[0];
      input.max = values.at(-1);
    } else {
      input.step = "any";
      input.inputMode = "decimal";
      input.placeholder = String(value);
    }
    label.append(input);
    node.append(label);
  }
  return node;
}

function paint() {
  let count = 0;
  for (const [field, what] of chosen) count += what instanceof Set ? what.size : 1;
  for (const input of groups.querySelectorAll("input[data-field]")) {
    const what = chosen.get(input.dataset.field);
    if (input.dataset.bound) {
      const value = what?.[input.dataset.bound] ?? null;
      if (document.activeElement !== input) input.value = value === null ? "" : String(value);
    } else input.checked = what?.has(JSON.parse(input.dataset.value)) === true;
  }
  for (const node of groups.querySelectorAll("details")) {
    const what = chosen.get(node.dataset.field);
    const number = what instanceof Set ? what.size : Number(what !== undefined);
    node.querySelector(".filter-count").textContent = number > 0 ? String(number) : "";
  }
  clearButton.hidden = chosen.size === 0;
  openButton.textContent = t("filters.open", { count });
}

function read(input) {
  const { field, bound } = input.dataset;
  if (!bound) {
    const values = new Set(chosen.get(field));
    const value = JSON.parse(input.dataset.value);
    if (input.checked) values.add(value);
    else values.delete(value);
    choose(field, values);
    return;
  }
  const { kind } = known.get(field);
  const number = kind === "range" ? input.valueAsNumber : NaN;
  const value = kind === "range" ? (isNumber(number) ? number : null) : input.value || null;
  choose(field, { from: null, to: null, ...chosen.get(field), [bound]: value });
}

export function clearFilters() {
  chosen.clear();
  for (const input of groups.querySelectorAll("input[data-bound]")) input.value = "";
  paint();
}

// Calls `changed` after each change by the reader.
export function onFiltersChanged(changed) {
  groups.addEventListener("change", (event) => {
    if (!event.target.dataset.field) return;
    read(event.target);
    paint();
    changed();
  });
  clearButton.addEventListener("click", () => {
    clearFilters();
    groups.querySelector("summary, input")?.focus();
    changed();
  });
}

onLanguageChanged(() => {
  draw();
  paint();
});
