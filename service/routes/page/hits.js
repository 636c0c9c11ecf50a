// One hit: what it says, where it comes from, and what a reader can do with it.

import { addressOf, citeButton, linkTo, sourceOf } from "./citing.js";
import { asList, asObject, asText, button, element, isNumber } from "./dom.js";
import { CHINESE, t } from "./language.js";
import { certainEvidence, marked } from "./marks.js";
import { openPassage } from "./passage.js";

const TAGS = ["department", "topic"];

function heading(tag, hit, rank, terms) {
  const title = asText(hit.title);
  const node = element(tag, title ? "" : "visually-hidden");
  if (!title) node.textContent = t("hit.number", { rank });
  else {
    const words = element("span");
    words.lang = CHINESE;
    words.append(...marked(title, terms));
    const address = addressOf(hit);
    node.append(address ? linkTo(address, "", words) : words);
  }
  return node;
}

// The text with the words of the question marked, and the sentence that answers it, if that is certain.
function body(hit, terms) {
  const paragraph = element("p", "text clamped");
  paragraph.lang = CHINESE;
  const certain = certainEvidence(hit.text, hit.evidence);
  if (!certain) paragraph.append(...marked(hit.text, terms));
  else {
    const [from, to] = certain;
    const sentence = element("strong", "evidence");
    sentence.append(...marked(hit.text.slice(from, to), terms));
    paragraph.append(
      ...marked(hit.text.slice(0, from), terms),
      sentence,
      ...marked(hit.text.slice(to), terms),
    );
  }
  return paragraph;
}

function unfoldButton(item, paragraph, headingId) {
  const toggle = button("plain toggle", t("hit.unfold"), () => {
    const open = paragraph.classList.toggle("clamped") === false;
    toggle.textContent = t(open ? "hit.fold" : "hit.unfold");
    toggle.setAttribute("aria-expanded", String(open));
    if (!open) item.scrollIntoView({ block: "nearest" });
  });
  toggle.hidden = true;
  toggle.setAttribute("aria-expanded", "false");
  toggle.setAttribute("aria-controls", paragraph.id);
  toggle.setAttribute("aria-describedby", headingId);
  return toggle;
}

function tagsOf(hit) {
  const tags = element("ul", "tags");
  const metadata = asObject(hit.metadata);
  for (const field of TAGS) {
    for (const value of asList(metadata[field])) {
      const tag = element("li", `tag ${field}`);
      const label = `${t(`field.${field}`)}${t("label.colon")}`;
      tag.append(element("span", "visually-hidden", label), value);
      tags.append(tag);
    }
  }
  for (const part of sourceOf(hit)) tags.append(element("li", "source", part));
  if (isNumber(hit.chunk) && hit.chunks > 1) {
    const place = { number: hit.chunk + 1, count: hit.chunks };
    tags.append(element("li", "source chunk", t("hit.chunk", place)));
  }
  return tags;
}

function relevance(score, share) {
  const node = element("div", "relevance");
  const track = element("span", "track");
  track.setAttribute("aria-hidden", "true");
  const fill = element("span", "fill");
  fill.style.width = `${(share(score) * 100).toFixed(1)}%`;
  track.append(fill);
  node.append(element("span", "", t("hit.score")), track, element("span", "score", score.toFixed(3)));
  return node;
}

// Returns a hit. `prefix` begins its ids, `tag` is that of its heading, `terms` are those of the
// question, `share` maps its score to the width of a bar, and `place` is where another mode has it.
export function renderHit(hit, at, { prefix, tag, terms, share, place, index }) {
  const item = element("li", "hit");
  item.dataset.id = String(hit.id ?? "");
  item.tabIndex = -1;
  const article = element("article");
  const number = isNumber(hit.rank) ? hit.rank : at + 1;
  const title = heading(tag, hit, number, terms);
  title.id = `${prefix}-${at + 1}-title`;
  article.setAttribute("aria-labelledby", title.id);
  item.setAttribute("aria-labelledby", title.id);

  const rank = element("span", "rank", String(number));
  rank.setAttribute("aria-hidden", "true"); // the list already numbers its items
  const main = element("div", "hit-main");
  main.append(title);
  const actions = element("div", "actions");
  if (asText(hit.text)) {
    const paragraph = body(hit, terms);
    paragraph.id = `${prefix}-${at + 1}-text`;
    main.append(paragraph);
    actions.append(unfoldButton(item, paragraph, title.id));
  }
  const tags = tagsOf(hit);
  if (tags.childElementCount > 0) main.append(tags);
  const open = button("plain open", t("hit.open"), () => openPassage(hit, terms, index));
  open.setAttribute("aria-haspopup", "dialog");
  open.setAttribute("aria-describedby", title.id);
  actions.append(open, citeButton(hit, asText(hit.text), index));
  const address = addressOf(hit);
  if (address && !asText(hit.title)) {
    actions.append(linkTo(address, "", t("hit.source", { host: new URL(address).host })));
  }
  if (place) actions.append(element("p", "place", place));
  if (isNumber(hit.score)) actions.append(relevance(hit.score, share));
  main.append(actions);
  article.append(rank, main);
  item.append(article);
  return item;
}
