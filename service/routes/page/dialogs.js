// Dialogs: each closes by its buttons, by a click beside it, and by Escape, which the browser handles.

import { byId } from "./dom.js";

const WIDE = matchMedia("(min-width: 60rem)");

const side = byId("side");
const sheet = byId("sheet");
const panel = byId("panel");

for (const dialog of document.querySelectorAll("dialog")) {
  for (const node of dialog.querySelectorAll(".close, .done")) {
    node.addEventListener("click", () => dialog.close());
  }
  dialog.addEventListener("click", (event) => {
    if (event.target === dialog) dialog.close();
  });
}

// The panel of filters stands at the side where there is room, and in a sheet elsewhere.
function place() {
  if (WIDE.matches && sheet.open) sheet.close();
  (WIDE.matches ? side : byId("sheet-body")).append(panel);
}

export const isWide = () => WIDE.matches;

byId("open-filters").addEventListener("click", () => sheet.showModal());
WIDE.addEventListener("change", place);
place();
