// A link to a search. The search stands in the fragment of the link, which browsers send to no server.
// The page puts it neither in its address nor in the history.

import { asObject, byId } from "./dom.js";

const box = byId("share");
const copyButton = byId("copy-link");
const copied = byId("copied");
const linkBox = byId("link-box");
const linkField = byId("link");

let offered = ""; // the link that the button copies

const addressOfPage = () => location.href.split("#")[0];

// Returns the search of the page's address, which then no longer has it; null if it has no query.
export function takeLink() {
  const fields = new URLSearchParams(location.hash.slice(1));
  if (location.href.includes("#")) history.replaceState(null, "", addressOfPage());
  const text = (name) => (fields.get(name) ?? "").trim();
  if (!text("q")) return null;
  return {
    query: text("q"),
    mode: text("mode"),
    compare: text("compare"),
    rerank: text("rerank") === "1",
    filter: filterOf(text("filter")),
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
export function offerLink({ query, mode, compare, rerank, filter }) {
  const fields = new URLSearchParams({ q: query });
  if (mode) fields.set("mode", mode);
  if (compare) fields.set("compare", compare);
  if (rerank) fields.set("rerank", "1");
  if (Object.keys(filter).length > 0) fields.set("filter", JSON.stringify(filter));
  withdrawLink();
  offered = `${addressOfPage()}#${fields}`;
  box.hidden = false;
}

export function withdrawLink() {
  box.hidden = true;
  offered = "";
  copied.textContent = "";
  linkBox.hidden = true;
  linkField.value = "";
}

copyButton.addEventListener("click", async () => {
  const link = offered;
  copied.textContent = "";
  try {
    await navigator.clipboard.writeText(link); // undefined without https
    if (link === offered) copied.textContent = "链接已复制。";
  } catch {
    if (link !== offered) return;
    linkBox.hidden = false;
    linkField.value = link;
    linkField.focus();
    linkField.select();
  }
});
