// Which index the page searches: the default one, unless the reader chooses another. Shown only if the
// key may search several.

import { readIndexes, useIndex } from "./api.js";
import { asArray, asText, byId } from "./dom.js";

const box = byId("index-choice");
const select = byId("index-name");

let byDefault = ""; // the index that addresses without a name mean

// Returns the name of the index, "" for the default one.
export const chosenIndex = () => (box.hidden || select.value === byDefault ? "" : select.value);

// Searches the index of this name from now on, "" for the default one; returns whether it is another.
export function chooseIndex(name) {
  const before = chosenIndex();
  const wanted = asText(name) || byDefault;
  if ([...select.options].some(({ value }) => value === wanted)) select.value = wanted;
  useIndex(chosenIndex());
  return chosenIndex() !== before;
}

// Offers the indexes that the key may search; without the default one, the first is chosen.
export async function offerIndexes() {
  const { value } = select;
  const listed = asArray((await readIndexes()).indexes);
  const names = listed.map(({ name }) => asText(name)).filter(Boolean);
  byDefault = asText(listed.find((one) => one.default === true)?.name);
  select.replaceChildren(...names.map((name) => new Option(name, name)));
  select.value = names.includes(value) ? value : byDefault || names[0] || "";
  box.hidden = names.length < 2 && select.value === byDefault;
  useIndex(chosenIndex());
}

// Calls `handler` when the reader has chosen another index.
export function onIndexChosen(handler) {
  select.addEventListener("change", () => {
    useIndex(chosenIndex());
    handler();
  });
}
