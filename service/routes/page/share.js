// A link to a search. The search stands in the fragment of the link, which browsers send to no server.
// The page puts it neither in its address nor in the title.

import { copied } from "./citing.js";
import { asObject, byId } from "./dom.js";
import { t } from "./language.js";

const copyButton = byId("copy-link");
const note = byId("copied");
const linkBox = byId("link-box");
const linkField = byId("link");

let offered = ""; // the link that the button copies

const addressOfPage = () => location.href.split("#")[0];

// Returns the search of the page's address, which then no longer has it; null if it has no query.
export function takeLink() {
  const fields = new URLSearchParams(location.hash.slice(1));
  if (location.href.includes("#")) history.replaceState(history.state, "", addressOfPage());
  const text = (name) => (fields.get(name) ?? "").trim();
  if (!text("q")) return null;
  return {
    query: text("q"),
    mode: text("mode"),
    compare: text("compare"),
    rerank: text("rerank") === "1",
    filter: filterOf(text("filter")),
    index: text("index"),
  };
}

function filterOf(text) {
  try {
    return asObject(JSON.parse(text));
  } catch {
    return {};
  }
}

// Offers the link to a search.
export function offerLink({ query, mode, compare, rerank, filter, index }) {
  const fields = new URLSearchParams({ q: query });
  if (mode) fields.set("mode", mode);
  if (compare) fields.set("compare", compare);
  if (rerank) fields.set("rerank", "1");
  if (Object.keys(filter).length > 0) fields.set("filter", JSON.stringify(filter));
  if (index) fields.set("index", index);
  withdrawLink();
  offered = `${addressOfPage()}#${fields}`;
  copyButton.hidden = false;
}

export function withdrawLink() {
  copyButton.hidden = true;
  offered = "";
  note.textContent = "";
  linkBox.hidden = true;
  linkField.value = "";
}

copyButton.addEventListener("click", async () => {
  const link = offered;
  note.textContent = "";
  const done = await copied(link);
  if (link !== offered) return;
  if (done) note.textContent = `${t("link.copied")}${t("link.hint")}`;
  else {
    linkBox.hidden = false;
    linkField.value = link;
    linkField.focus();
    linkField.select();
  }
});
