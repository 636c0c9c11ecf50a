// What a developer chooses for a search: its mode, a second mode to compare with, and reranking.

import { asArray, byId, prefer, preference } from "./dom.js";
import { onLanguageChanged, t } from "./language.js";

const MODES = ["hybrid", "dense", "lexical"];
const NAME = "care.developer";

const developer = byId("developer");
const box = byId("options");
const modeBox = byId("modes");
const modeSelect = byId("mode");
const compareSelect = byId("compare");
const rerankBox = byId("reranking");
const rerankCheck = byId("rerank");

let known = []; // the modes of the index, the default first

export const modeName = (mode) => (MODES.includes(mode) ? t(`mode.${mode}`) : "");

// Returns the mode, "" for the default, the mode to compare with, "" for none, and whether to rerank.
export function chosenOptions() {
  return {
    mode: modeBox.hidden ? "" : modeSelect.value,
    compare: modeBox.hidden ? "" : compareSelect.value,
    rerank: !rerankBox.hidden && rerankCheck.checked,
  };
}

// Chooses what the index has of `options`; the rest becomes the default. What is not shown otherwise
// turns the developer details on, for this visit.
export function chooseOptions({ mode, compare, rerank }) {
  modeSelect.value = known.includes(mode) ? mode : (known[0] ?? "");
  fillCompare(compare);
  rerankCheck.checked = rerank === true;
  if (compareSelect.value) showDeveloper(true);
}

// Chooses the mode that searches most ways; returns whether there is a better one than now.
export function widestMode() {
  return known.includes("hybrid") && modeSelect.value !== "hybrid" ? "hybrid" : "";
}

export function chooseMode(mode) {
  modeSelect.value = mode;
  fillCompare(compareSelect.value);
}

// Offers what the index can do; what is chosen stays chosen in a new version.
export function showOptions({ modes, reranker }) {
  const { value } = modeSelect;
  known = asArray(modes).filter((mode) => MODES.includes(mode));
  modeSelect.replaceChildren(...known.map(option));
  if (known.includes(value)) modeSelect.value = value;
  fillCompare(compareSelect.value);
  modeBox.hidden = known.length < 2;
  rerankBox.hidden = typeof reranker !== "string";
}

const option = (mode) => new Option(modeName(mode), mode);

function fillCompare(chosen) {
  const others = known.filter((mode) => mode !== modeSelect.value);
  compareSelect.replaceChildren(new Option(t("mode.alone"), ""), ...others.map(option));
  compareSelect.value = others.includes(chosen) ? chosen : "";
}

export const isDeveloper = () => developer.checked;

function showDeveloper(on) {
  developer.checked = on;
  box.hidden = !on;
  document.body.classList.toggle("developer", on);
}

// Calls `changed` after each change of the search by the reader, and `shown` after the switch.
export function onOptionsChanged(changed, shown) {
  modeSelect.addEventListener("change", () => {
    fillCompare(compareSelect.value);
    changed();
  });
  compareSelect.addEventListener("change", changed);
  rerankCheck.addEventListener("change", changed);
  developer.addEventListener("change", () => {
    const { compare } = chosenOptions();
    showDeveloper(developer.checked);
    prefer(NAME, developer.checked ? "on" : "off");
    if (!developer.checked && compare) {
      compareSelect.value = "";
      changed();
    } else shown();
  });
}

onLanguageChanged(() => {
  const { value } = compareSelect;
  for (const choice of modeSelect.options) choice.text = modeName(choice.value);
  fillCompare(value);
});

showDeveloper(preference(NAME) === "on");
