// Where a hit comes from, and how it is cited.

import { asList, asObject, asText, button, element } from "./dom.js";
import { t } from "./language.js";

// Returns whether the text was copied: pages of other machines have a clipboard only with https.
export async function copied(text) {
  try {
    await navigator.clipboard.writeText(text); // undefined without https
    return true;
  } catch {
    return false;
  }
}

// Returns the address that a document names as its own, if it is one of the web.
export function addressOf(hit) {
  const address = asText(asObject(hit.metadata).url);
  if (!URL.canParse(address)) return "";
  const { protocol, href } = new URL(address);
  return protocol === "https:" || protocol === "http:" ? href : "";
}

export function linkTo(address, className, ...content) {
  const link = element("a", className);
  link.href = address;
  link.target = "_blank";
  link.rel = "noopener noreferrer";
  link.append(...content, element("span", "visually-hidden", t("hit.tab")));
  return link;
}

// Returns the parts of the source of a hit that its metadata names.
export function sourceOf(hit) {
  const metadata = asObject(hit.metadata);
  const page = asList(metadata.page)[0];
  return [
    ...asList(metadata.author),
    ...asList(metadata.source ?? metadata.journal),
    ...asList(metadata.year ?? metadata.date).slice(0, 1),
    ...(page ? [t("hit.page", { page })] : []),
  ];
}

// Returns the text of a hit with what names its source.
function citation(hit, text, index) {
  const metadata = asObject(hit.metadata);
  const doi = asText(metadata.doi);
  const source = [
    asText(hit.title),
    ...sourceOf(hit),
    ...(doi ? [`doi:${doi.replace(/^(doi:|https?:\/\/(dx\.)?doi\.org\/)/i, "")}`] : []),
    addressOf(hit),
    t("hit.citation.id", {
      id: String(hit.id ?? ""),
      index: `${asText(index.name)} ${asText(index.version)}`.trim(),
    }),
  ];
  return `${text.trim()}\n—— ${source.filter(Boolean).join(t("results.comma"))}`;
}

export function citeButton(hit, text, index) {
  const box = element("span", "cite");
  const note = element("span", "note");
  const press = button("plain", t("hit.cite"), async () => {
    const cited = citation(hit, text, index);
    note.replaceChildren();
    note.setAttribute("role", "status"); // not before: one for each hit would be too many
    if (await copied(cited)) note.textContent = t("hit.cited");
    else {
      const field = element("textarea", "copy-box");
      field.readOnly = true;
      field.value = cited;
      field.rows = 4;
      const label = element("label", "", t("copy.failed"));
      label.append(field);
      note.append(label);
      field.select();
    }
  });
  box.append(press, note);
  return box;
}
