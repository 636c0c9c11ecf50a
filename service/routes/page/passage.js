// A hit in its document: its text or, of a document that is split, the passages around it.

import { readDocument } from "./api.js";
import { addressOf, citeButton, linkTo } from "./citing.js";
import { asArray, asObject, asText, button, byId, element, isNumber } from "./dom.js";
import { CHINESE, hasWords, t } from "./language.js";
import { marked } from "./marks.js";
import { problemOf, problemParts } from "./problems.js";

const NEIGHBOURS = 1; // passages shown before and after the one that was found

const dialog = byId("passage");
const title = byId("passage-title");
const body = byId("passage-body");

let shown = null; // the hit whose document is shown

// Shows the document of a hit, or the one with the id if that is all that is known.
export async function openPassage(hit, terms = new Set(), index = {}) {
  shown = hit;
  entitle(hit);
  body.replaceChildren(element("p", "note", t("document.loading")));
  if (!dialog.open) dialog.showModal();
  body.scrollTop = 0;
  try {
    const document = await readDocument(asText(hit.parent) || String(hit.id));
    if (shown === hit) show(hit, document, terms, index);
  } catch (error) {
    if (shown !== hit) return;
    const alert = element("div", "alert");
    alert.append(...problemParts(problemOf(error), "h3", () => openPassage(hit, terms, index)));
    body.replaceChildren(alert);
  }
}

function entitle(document) {
  title.textContent = asText(document.title) || t("document.label");
  title.lang = asText(document.title) ? CHINESE : "";
}

function show(hit, document, terms, index) {
  entitle(document);
  const passages = asArray(document.passages).map(asObject);
  const texts = element("div", "passages");
  const draw = (around) => {
    const near = passages.filter(({ chunk }) => !(Math.abs(chunk - hit.chunk) > around));
    const parts = near.map((passage) => text(passage, passage.id === hit.id, terms));
    if (!isNumber(hit.chunk)) near.forEach(({ id }, i) => parts[i].prepend(element("span", "note id", id)));
    texts.replaceChildren(...parts);
  };
  const parts = [texts];
  if (passages.length === 0) texts.append(text(document, false, terms));
  else {
    draw(isNumber(hit.chunk) ? NEIGHBOURS : Infinity);
    if (texts.childElementCount < passages.length) {
      const all = button("plain", t("document.all", { count: passages.length }), () => {
        draw(Infinity);
        all.remove();
        texts.querySelector(".found")?.scrollIntoView({ block: "center" });
      });
      parts.push(all);
    }
  }
  const address = addressOf(document);
  const sources = element("p", "actions");
  if (address) sources.append(linkTo(address, "", t("hit.source", { host: new URL(address).host })));
  if (asText(hit.text)) sources.append(citeButton(hit, asText(hit.text), index));
  body.replaceChildren(...parts, sources, metadata(asObject(document.metadata)));
}

function text(passage, isFound, terms) {
  const node = element("p", isFound ? "text found" : "text");
  node.lang = CHINESE;
  if (isFound) node.append(element("span", "visually-hidden", `${t("document.here")}${t("label.colon")}`));
  node.append(...marked(typeof passage.text === "string" ? passage.text : "", terms));
  return node;
}

function metadata(fields) {
  const list = element("dl", "facts");
  for (const [field, value] of Object.entries(fields)) {
    const group = element("div");
    const shownValue = Array.isArray(value) ? value.join(t("results.comma")) : value;
    const words = shownValue !== null && typeof shownValue === "object" ? JSON.stringify(shownValue) : String(shownValue);
    group.append(element("dt", "", hasWords(`field.${field}`) ? t(`field.${field}`) : field));
    group.append(element("dd", "", words));
    list.append(group);
  }
  return list;
}

dialog.addEventListener("close", () => {
  shown = null;
  body.replaceChildren();
});
