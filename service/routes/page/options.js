// What the reader chooses for a search: its mode, a second mode to compare with, and reranking.

import { byId } from "./dom.js";

const MODES = { hybrid: "意思和字词", dense: "意思", lexical: "字词" };
const NO_COMPARISON = "不对比";

const modeBox = byId("modes");
const modeSelect = byId("mode");
const compareSelect = byId("compare");
const rerankBox = byId("reranking");
const rerankCheck = byId("rerank");

let known = []; // the modes of the index, the default first

export const modeName = (mode) => (Object.hasOwn(MODES, mode) ? MODES[mode] : "");

// Returns the mode, "" for the default, the mode to compare with, "" for none, and whether to rerank.
export function chosenOptions() {
  return {
    mode: modeBox.hidden ? "" : modeSelect.value,
    compare: modeBox.hidden ? "" : compareSelect.value,
    rerank: !rerankBox.hidden && rerankCheck.checked,
  };
}

// Chooses what the index has of `options`; the rest becomes the default.
export function chooseOptions({ mode, compare, rerank }) {
  modeSelect.value = known.includes(mode) ? mode : (known[0] ?? "");
  fillCompare(compare);
  rerankCheck.checked = rerank;
}

// Offers what the index can do; what is chosen stays chosen in a new version.
export function showOptions({ modes, reranker }) {
  const { value } = modeSelect;
  known = (Array.isArray(modes) ? modes : []).filter((mode) => Object.hasOwn(MODES, mode));
  modeSelect.replaceChildren(...known.map(option));
  if (known.includes(value)) modeSelect.value = value;
  fillCompare(compareSelect.value);
  modeBox.hidden = known.length < 2;
  rerankBox.hidden = typeof reranker !== "string";
}

const option = (mode) => new Option(MODES[mode], mode);

function fillCompare(chosen) {
  const others = known.filter((mode) => mode !== modeSelect.value);
  compareSelect.replaceChildren(new Option(NO_COMPARISON, ""), ...others.map(option));
  compareSelect.value = others.includes(chosen) ? chosen : "";
}

// Calls `changed` after each change by the reader.
export function onOptionsChanged(changed) {
  modeSelect.addEventListener("change", () => {
    fillCompare(compareSelect.value);
    changed();
  });
  compareSelect.addEventListener("change", changed);
  rerankCheck.addEventListener("change", changed);
}
