// The index version that is served: a line in the footer, and a dialog with all its facts.

import { readVersions, reloadIndex, useAccessKey } from "./api.js";
import { asArray, asObject, asText, byId, element, isNumber } from "./dom.js";
import { documentsView } from "./documents_view.js";
import { grouped, isEnglish, onLanguageChanged, t } from "./language.js";
import { problemOf, problemParts } from "./problems.js";

const info = byId("index-info");
const openButton = byId("open-index");
const dialog = byId("index-view");
const described = byId("index-facts");
const more = byId("index-more"); // what the reader has asked for

let known = null; // the index, as the service describes it
let reloaded = () => {};

function facts(className, rows) {
  const list = element("dl", className);
  for (const [name, value] of rows) {
    if (!value) continue;
    const group = element("div");
    const description = element("dd", "", value);
    description.dataset.field = name;
    group.append(element("dt", "", t(`index.${name}`)), description);
    list.append(group);
  }
  return list;
}

export function showIndex(index) {
  known = index;
  openButton.hidden = false;
  info.replaceChildren(
    facts("", [
      ["name", asText(index.name)],
      ["version", asText(index.version)],
      ["count", grouped(index.count)],
      ["pair", asText(index.pair)],
    ]),
  );
  if (dialog.open) describe();
}

export function showNoIndex() {
  if (known === null) info.textContent = t("index.unknown");
}

function describe() {
  const created = new Date(asText(known.created_at));
  const named = (values) =>
    Object.entries(asObject(values)).map(([name, value]) => `${name} ${value}`).join(t("results.comma"));
  const fields = Object.entries(asObject(known.filters)).map(
    ([field, values]) => `${field} (${asArray(values).length})`,
  );
  described.replaceChildren(facts("facts", [
    ["name", asText(known.name)],
    ["version", asText(known.version)],
    ["state", t(known.active === true ? "index.active" : "index.inactive")],
    ["created", Number.isNaN(created.getTime()) ? "" : created.toLocaleString(isEnglish() ? "en" : "zh-CN")],
    ["documents", grouped(known.documents)],
    ["count", grouped(known.count)],
    ["pair", asText(known.pair)],
    ["space", asText(known.embedding_space)],
    ["dimension", asText(known.dimension)],
    ["factory", asText(known.factory)],
    ["modes", asArray(known.modes).join(t("results.comma"))],
    ["reranker", asText(known.reranker)],
    ["thresholds", named(known.answerable_thresholds)],
    ["fields", fields.join(t("results.comma"))],
  ]));
}

// Shows what the reader has asked for, below the description.
function show(node) {
  more.replaceChildren(node);
  more.scrollIntoView({ block: "nearest" });
}

// These need a key with the role admin: for one that lacks it, the reader is asked for another.

const showVersions = asAdmin(async () => {
  const { versions } = await readVersions();
  const listed = element("ol", "versions");
  for (const one of asArray(versions).toReversed()) {
    const { version, active, documents, created_at, bytes } = asObject(one);
    const size = isNumber(bytes) ? `${(bytes / 1e6).toFixed(1)} MB` : "";
    const created = new Date(asText(created_at)).toLocaleString(isEnglish() ? "en" : "zh-CN");
    const words = [version, `${grouped(documents)} ${t("index.documents")}`, size, created];
    if (active === true) words.push(t("index.active"));
    listed.append(element("li", "", words.map(asText).join(" · ")));
  }
  show(listed);
});

const showDocuments = asAdmin(async () => show(await documentsView()));

const reload = asAdmin(async () => {
  reloaded(await reloadIndex());
  const note = element("p", "note", t("index.reloaded"));
  note.setAttribute("role", "status");
  show(note);
});

function asAdmin(act) {
  return async function attempt() {
    try {
      await act();
    } catch (error) {
      const problem = problemOf(error);
      problem.needsKey = ["unauthorized", "forbidden"].includes(problem.code);
      const alert = element("div", "alert");
      alert.setAttribute("role", "alert");
      alert.append(
        ...problemParts(problem, "h3", attempt, (key) => {
          useAccessKey(key);
          more.focus(); // the form goes
          attempt();
        }),
      );
      show(alert);
    }
  };
}

// Calls `handler` with the index after the reader has had its active version loaded.
export function onReloaded(handler) {
  reloaded = handler;
}

byId("reload-index").addEventListener("click", reload);
byId("show-versions").addEventListener("click", showVersions);
byId("show-documents").addEventListener("click", showDocuments);

openButton.addEventListener("click", () => {
  more.replaceChildren();
  describe();
  dialog.showModal();
});

onLanguageChanged(() => {
  if (known) showIndex(known);
});
