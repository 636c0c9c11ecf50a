// The documents of the index, page by page, and one by its id. Needs a key with the role admin.

import { readDocuments } from "./api.js";
import { asArray, asObject, asText, button, element, isNumber } from "./dom.js";
import { CHINESE, grouped, t } from "./language.js";
import { openPassage } from "./passage.js";
import { problemOf } from "./problems.js";

const LIMIT = 20;

// Returns the list of documents with its first page; throws a problem if that cannot be read.
export async function documentsView() {
  const box = element("section", "documents");
  const status = element("p", "note");
  status.tabIndex = -1;
  status.setAttribute("role", "status");
  const list = element("ol");
  const before = button("retry", t("documents.before"), () => turn(-1, before));
  const after = button("retry", t("documents.after"), () => turn(1, after));
  const pager = element("p", "index-tools");
  pager.append(before, after);
  const cursors = [null]; // what each page that is known begins behind
  let at = 0;

  async function read(page) {
    const answer = await readDocuments(LIMIT, cursors[page]);
    at = page;
    const documents = asArray(answer.documents).map(asObject);
    list.replaceChildren(...documents.map(item));
    list.start = at * LIMIT + 1;
    const next = asText(answer.next);
    if (next) cursors[at + 1] = answer.next;
    before.hidden = at === 0;
    after.hidden = !next;
    const range = { from: list.start, to: at * LIMIT + documents.length, total: grouped(answer.total) };
    status.textContent = documents.length ? t("documents.range", range) : t("documents.none");
  }

  // The pressed button keeps the focus, unless it is the last page in its direction.
  async function turn(step, pressed) {
    try {
      await read(at + step);
      list.scrollIntoView({ block: "nearest" });
      if (pressed.hidden) status.focus();
    } catch (error) {
      status.textContent = problemOf(error).heading;
    }
  }

  await read(0);
  box.append(element("h3", "", t("index.documents")), lookup(), status, list, pager);
  return box;
}

function item({ id, title, chunks }) {
  const node = element("li");
  const open = button("plain", asText(title) || t("hit.untitled"), () => openPassage({ id, title }));
  if (asText(title)) open.lang = CHINESE;
  open.setAttribute("aria-haspopup", "dialog");
  const facts = [String(id), isNumber(chunks) ? t("documents.chunks", { count: chunks }) : ""];
  node.append(open, " ", element("span", "note", facts.filter(Boolean).join(" · ")));
  return node;
}

function lookup() {
  const form = element("form", "lookup");
  const label = element("label", "", t("documents.id"));
  const field = element("input");
  field.id = "document-id";
  field.autocomplete = "off";
  field.spellcheck = false;
  field.required = true;
  label.htmlFor = field.id;
  form.append(label, field, element("button", "retry", t("documents.open")));
  form.addEventListener("submit", (event) => {
    event.preventDefault();
    openPassage({ id: field.value });
  });
  return form;
}
